"""Options of environments, and the trust in descriptions of environments."""

from collections.abc import Collection
from dataclasses import field
from typing import TYPE_CHECKING, Any, Self

from rlxf.cli.options.common import Json, options

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.envs.workers import Workers


@options
class EnvOptions:
    """Options of the training environments."""

    env: str
    """Gymnasium id of the environment, e.g. rlxf/TMaze-v0 or CartPole-v1.
    With package:id, the package is imported first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object, e.g. '{"corridor_length": 100}'."""

    previous_reward: bool = False
    """Add the previous reward to the observation, for tasks where it is informative, e.g. bandits."""
    previous_transition: bool = False
    """Add the previous action, reward and episode end to the observation, for
    --persist-memory-across-episodes.
    The first observation of an episode contains those of the last step of the previous episode."""

    @classmethod
    def of_run(
        cls, config: dict[str, Any], env: str | None, env_kwargs: dict[str, Any], trust: bool = False
    ) -> Self:
        """Return the task of a run with updated arguments, or another task with the same observations.

        Args:
            config: configuration of the run.
            env: id from the command line; None for that of the run.
            env_kwargs: arguments from the command line. Without ``env`` they update those of the run.
            trust: import the module, and use the arguments, that the configuration names.

        Raises:
            ValueError: if the configuration names no environment, the arguments are not a JSON object, or
                they need trust (`check_env_trust`).
        """
        extended = {name: config.get(name, False) for name in ("previous_reward", "previous_transition")}
        if env is not None:
            return cls(env=env, env_kwargs=env_kwargs, **extended)
        if not isinstance(config.get("env"), str):
            raise ValueError(
                f"env in config.json must be a Gymnasium id, got {config.get('env')!r}: correct it, or pass "
                f"--env"
            )
        if not trust:
            check_env_trust(config, env_kwargs)
        kwargs = json_object(config.get("env_kwargs", {})) | json_object(env_kwargs)
        return cls(env=config["env"], env_kwargs=kwargs, **extended)

    def make(self, n_envs: int, seed: int | None, workers: "Workers | None" = None) -> "VecEnv":
        """Make ``n_envs`` parallel environments with `make_vec_env`.

        Raises:
            ValueError: if the id is unknown or the arguments are not a JSON object.
            TypeError: if the environment does not accept the arguments, or a space is not supported.
        """
        from rlxf.envs.make import make_vec_env

        kwargs = json_object(self.env_kwargs)
        return make_vec_env(self.env, n_envs, seed, kwargs, workers=workers, **self.observation_options)

    @property
    def observation_options(self) -> dict[str, Any]:
        """Return the arguments of `make_vec_env` and `make_env` that extend the observations."""
        return {"previous_reward": self.previous_reward, "previous_transition": self.previous_transition}


def json_object(env_kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an environment after checking that they are a JSON object.

    Raises:
        ValueError: if they are not a dict.
    """
    if not isinstance(env_kwargs, dict):
        raise ValueError(f"env_kwargs must be a JSON object, got {env_kwargs!r}")
    return env_kwargs


def check_env_trust(config: dict[str, Any], given: Collection[str] = ()) -> None:
    """Raise ValueError if the environment in the ``config.json`` of a run needs trust.

    An id with a module needs trust, and so do arguments that differ from those of the registration. A run
    without an environment passes.

    Args:
        config: configuration of the run.
        given: names of arguments from the command line.
    """
    from rlxf.envs.trust import DescribedEnv

    if config.get("env") is not None:
        DescribedEnv(config["env"], json_object(config.get("env_kwargs", {}))).local_spec(given)


def trust_option(config: dict[str, Any]) -> str:
    """Return `` --trust`` if commands on a run with this configuration need it, else an empty string."""
    try:
        check_env_trust(config)
    except ValueError:
        return " --trust"
    return " --trust" if config.get("trust_data") else ""
