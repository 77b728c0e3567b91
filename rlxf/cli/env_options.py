"""Options of the environment of a run, its curriculum, and checks of configurations that need trust."""

import os
import reprlib
from collections.abc import Collection
from dataclasses import field
from typing import TYPE_CHECKING, Any, Self

from rlxf.cli.options import Json, json_object, options
from rlxf.utils.names import short_repr

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.envs.curriculum import Curriculum
    from rlxf.envs.worker_pool import Workers


@options
class EnvOptions:
    """Options of the training environments."""

    env: str
    """Gymnasium id of the environment, e.g. rlxf/TMaze-v0 or CartPole-v1.
    With module:id, the module is imported first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object, e.g. '{"corridor_length": 100}'."""
    curriculum: Json = field(default_factory=dict)
    """Easier tasks with which the training begins, as a JSON object, e.g.
    '{"stages": [{"corridor_length": 10}, {"corridor_length": 30}], "advance_return": 0.8}'. A stage has
    arguments that replace those of the environment, or is a Gymnasium id. Each copy of the environment
    continues with the next stage once its last 20 episodes ("episodes") have this mean return. Evaluations
    are in the environment itself."""

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
                f"env in config.json must be a Gymnasium id, got {short_repr(config.get('env'))}: correct "
                f"it, or pass --env"
            )
        return cls(env=config["env"], env_kwargs=merge_env_kwargs(config, env_kwargs, trust), **extended)

    def check(self) -> None:
        """Raise ValueError if the id is empty, or the arguments or the curriculum are invalid."""
        if not self.env:
            raise ValueError("--env is empty: name an environment, e.g. CartPole-v1")
        json_object(self.env_kwargs)
        read_curriculum(self.curriculum)

    def make(
        self,
        n_envs: int,
        seed: int | None,
        workers: "Workers | None" = None,
        curriculum: "Curriculum | None" = None,
    ) -> "VecEnv":
        """Make ``n_envs`` parallel environments with `make_vec_env`, by default without a curriculum.

        Raises:
            ValueError: if the id is unknown or the arguments are not a JSON object.
            TypeError: if the environment does not accept the arguments, or a space is not supported.
        """
        from rlxf.envs.make import make_vec_env

        kwargs = json_object(self.env_kwargs)
        extended = self.observation_options
        return make_vec_env(
            self.env, n_envs, seed, kwargs, workers=workers, curriculum=curriculum, **extended
        )

    def make_for_training(self, n_envs: int, seed: int | None, workers: "Workers | None" = None) -> "VecEnv":
        """Make environments that begin with the easier tasks of the curriculum, if there is one.

        Raises:
            ValueError, TypeError: as `make`, and if the curriculum is invalid.
        """
        return self.make(n_envs, seed, workers, read_curriculum(self.curriculum))

    @property
    def observation_options(self) -> dict[str, Any]:
        """Return the arguments of `make_vec_env` and `make_env` that extend the observations."""
        return {"previous_reward": self.previous_reward, "previous_transition": self.previous_transition}


def read_curriculum(value: Any) -> "Curriculum | None":
    """Return the curriculum that a JSON object describes; None if the object is empty.

    Raises:
        ValueError, TypeError: if the object does not describe a curriculum.
    """
    from rlxf.envs.curriculum import Curriculum

    given = json_object(value, "--curriculum")
    if not given:
        return None
    allowed = ("stages", "advance_return", "episodes")
    required = {"stages", "advance_return"}
    if unknown := sorted(given.keys() - {*allowed}):
        raise ValueError(
            f"--curriculum: a curriculum has {', '.join(allowed)}, got {reprlib.repr(', '.join(unknown))}"
        )
    if missing := sorted(required - given.keys()):
        raise ValueError(
            f"--curriculum: a curriculum needs stages and advance_return, got no {' and no '.join(missing)}"
        )
    try:
        return Curriculum(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--curriculum: {error}") from error


def merge_env_kwargs(config: dict[str, Any], given: dict[str, Any], trust: bool) -> dict[str, Any]:
    """Return the arguments of the environment of a run, updated with ``given``.

    Raises:
        ValueError: if the arguments are not a JSON object, or they need trust (`check_env_trust`) and
            ``trust`` is False.
    """
    if not trust:
        check_env_trust(config, given)
    return json_object(config.get("env_kwargs", {})) | json_object(given)


def check_env_trust(config: dict[str, Any], given: Collection[str] = ()) -> None:
    """Raise ValueError if the environment in the ``config.json`` of a run needs trust.

    An id with a module needs trust, and so do arguments that differ from those of the registration. A run
    without an environment passes.

    Args:
        config: configuration of the run.
        given: names of arguments from the command line.
    """
    from rlxf.envs.described_env import DescribedEnv

    if config.get("env") is not None:
        DescribedEnv(config["env"], json_object(config.get("env_kwargs", {}))).local_spec(given)


def check_curriculum_trust(config: dict[str, Any]) -> None:
    """Raise ValueError if a stage of the curriculum in the ``config.json`` of a run needs trust.

    A stage is an environment as in `check_env_trust`. Evaluations do not use the curriculum.
    """
    from rlxf.envs.described_env import DescribedEnv

    curriculum = read_curriculum(config.get("curriculum", {}))
    if curriculum is None:
        return
    tasks = curriculum.tasks(config["env"], json_object(config.get("env_kwargs", {})))
    for number, task in enumerate(tasks[:-1], 1):
        if untrusted := DescribedEnv(*task).needs_trust():
            raise ValueError(
                f"stage {number} of the curriculum in the file is {task[0]!r} with {', '.join(untrusted)}, "
                f"which is not used without trust, as it can run code or read files: give your own "
                f"--curriculum, or state that you trust the author of the file with --trust"
            )


WORKERS_WITHOUT_TRUST = 16
"""Number of worker processes that a run may have on every machine; larger ones may have more."""


def check_worker_trust(config: dict[str, Any]) -> None:
    """Raise ValueError if a run has so many worker processes that they may exhaust this machine."""
    sizes = [config.get(name, 0) for name in ("workers", "n_envs")]
    workers = min(size if isinstance(size, int) else 0 for size in sizes)  # other types are refused later
    if workers > (most := max(WORKERS_WITHOUT_TRUST, 2 * (os.cpu_count() or 1))):
        raise ValueError(
            f"the run has {workers:,} worker processes; more than {most} are started only with --trust"
        )


def trust_option(config: dict[str, Any]) -> str:
    """Return `` --trust`` if commands that act with this configuration need it, else an empty string."""
    try:
        check_env_trust(config)
    except ValueError:
        return " --trust"
    return " --trust" if config.get("trust_data") else ""


def resume_trust_option(config: dict[str, Any]) -> str:
    """Return `` --trust`` if ``rlxf resume`` may need it for this configuration, else an empty string.

    Weights of another run need it before the first checkpoint.
    """
    if config.get("pretrained") is not None:
        return " --trust"
    try:
        check_curriculum_trust(config)
        check_worker_trust(config)
    except (ValueError, TypeError):
        return " --trust"
    return trust_option(config)
