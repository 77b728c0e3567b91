"""The options that say which environments to make."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Self

from tyro.conf import arg

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.envs.workers import Workers

Json = Annotated[dict[str, Any], arg(constructor=json.loads, metavar="JSON")]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on."""

    env: str
    """Gymnasium id of the task, e.g. rlxf/TMaze-v0 or CartPole-v1; package:id imports the package first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object, e.g. '{"corridor_length": 100}'."""

    previous_reward: bool = False
    """The reward before is part of each step's input, for tasks in which it tells something: bandits."""
    previous_transition: bool = False
    """Action, reward and end of the step before are part of each step's input, also of the first step of an
    episode: what the last episode ended with. For --across-episodes."""

    @classmethod
    def of_run(
        cls, config: dict[str, Any], env: str | None, env_kwargs: dict[str, Any], trust: bool = False
    ) -> Self:
        """The task of a run, with other arguments; or another one, ``env``, that shows the agent as much.

        Args:
            config: of the run, read from its file.
            env: the id on the command line; None for that of the run.
            env_kwargs: on the command line; without ``env`` they change those of the run.
            trust: import the module that the file names, and use the arguments that it gives.

        Raises:
            ValueError: if the run's configuration names no environment, the arguments are no JSON object, or
                they need trust (`check_described`).
        """
        shown = {name: config.get(name, False) for name in ("previous_reward", "previous_transition")}
        if env is not None:
            return cls(env=env, env_kwargs=env_kwargs, **shown)
        if not isinstance(config.get("env"), str):
            raise ValueError(f"config.json names no env but {config.get('env')!r}: restore it, or give --env")
        if not trust:
            check_described(config, env_kwargs)
        kwargs = json_object(config.get("env_kwargs", {})) | json_object(env_kwargs)
        return cls(env=config["env"], env_kwargs=kwargs, **shown)

    def make(self, n_envs: int, seed: int | None, workers: "Workers | None" = None) -> "VecEnv":
        """So many environments side by side, as `make_vec_env` makes them.

        Raises:
            ValueError: if the id is unknown or the arguments are no JSON object.
            TypeError: if the environment does not take the arguments, or a space is not supported.
        """
        from rlxf.envs.make import make_vec_env

        kwargs = json_object(self.env_kwargs)
        return make_vec_env(self.env, n_envs, seed, kwargs, workers=workers, **self.shown)

    @property
    def shown(self) -> dict[str, Any]:
        """What environments show beside their observations, as `make_vec_env` and `make_env` take it."""
        return {"previous_reward": self.previous_reward, "previous_transition": self.previous_transition}


def json_object(env_kwargs: Any) -> dict[str, Any]:
    """Arguments of an environment as they are.

    Raises:
        ValueError: if they are no JSON object.
    """
    if not isinstance(env_kwargs, dict):
        raise ValueError(f"env_kwargs must be a JSON object, got {env_kwargs!r}")
    return env_kwargs


def check_described(config: dict[str, Any], given: Collection[str] = ()) -> None:
    """Raise ValueError if the environment in the ``config.json`` of a run needs trust.

    An id with a module needs trust, and so do arguments with which the environment is not registered. A run
    without an environment passes.

    Args:
        config: of the run.
        given: names of arguments that the command line gives.
    """
    from rlxf.envs.trust import DescribedEnv

    if config.get("env") is not None:
        DescribedEnv(config["env"], json_object(config.get("env_kwargs", {}))).local_spec(given)


def trust_option(config: dict[str, Any]) -> str:
    """Return `` --trust`` if commands on a run with this configuration need it, else nothing."""
    try:
        check_described(config)
    except ValueError:
        return " --trust"
    return " --trust" if config.get("trust_data") else ""
