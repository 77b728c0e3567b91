"""Curriculum: episodes of easier tasks first, and of the task itself once the agent solves them."""

import reprlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.gym_api import reset_env
from rlxf.envs.vector import innermost_env
from rlxf.utils.checks import is_number
from rlxf.utils.warnings import warn_user

MAX_STAGES = 100
"""Largest number of easier stages."""
MAX_EPISODES = 1000
"""Largest number of episodes that decide on the next stage. Checkpoints contain their returns."""
CUT_EPISODES = 10
"""Number of episodes in succession, ended from outside of the environment, at which a warning is given."""
STAGE = "curriculum_stage"
"""Key of the stage of the episode, from 1, in the info of each step."""
Stage = str | Mapping[str, Any]
"""Gymnasium id of an easier task, or arguments of the environment that make it easier."""


@dataclass(frozen=True)
class Curriculum:
    """Easier tasks before the task of `make_vec_env`, and the returns at which the next one begins.

    Each copy of the environment begins with the first stage. It continues with the next one, from the next
    episode on, once the mean return of its last ``episodes`` episodes in the stage is at least
    ``advance_return``, and never goes back. Copies are independent, so for a while some train in the next
    stage and others in the one before. The last stage is the task itself, with the id and the arguments that
    `make_vec_env` gets.

    The returns are sums of the rewards of the environment, without a ``wrapper_class`` of `make_vec_env` or
    `VecNormalize`. Episodes must end in the environment itself: those that a wrapper around it ends, such as
    a ``TimeLimit`` in ``wrapper_class``, do not count, and a warning reports them.

    Source: Bengio et al. 2009, "Curriculum learning", ICML; a survey for reinforcement learning is Narvekar
    et al. 2020, arXiv:2003.04960.

    Args:
        stages: the easier tasks in their order, at most 100. A stage is a Gymnasium id, with no arguments but
            those of its registration and ``render_mode``; or arguments that are added to those of the task
            and replace equal names.
        advance_return: mean return at which the next stage begins. Actions during training are random, so
            choose it below the return of a perfect episode.
        episodes: number of episodes over which the returns are averaged, from 1 to 1,000. With few episodes,
            a copy may advance by chance.

    Raises:
        TypeError: if stages is not a sequence of ids and mappings.
        ValueError: if there is no stage or more than 100, episodes is not a whole number from 1 to 1,000, or
            advance_return is not a finite number.
    """

    stages: Sequence[Stage]
    advance_return: float
    episodes: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.stages, str | Mapping) or not isinstance(self.stages, Sequence):
            raise TypeError(f"the stages of a curriculum must be a list, got {reprlib.repr(self.stages)}")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not 1 <= len(self.stages) <= MAX_STAGES:
            raise ValueError(
                f"a curriculum needs from 1 to {MAX_STAGES} easier stages before the task, got "
                f"{len(self.stages)}"
            )
        for stage in self.stages:
            if not isinstance(stage, str | Mapping):
                raise TypeError(
                    f"a stage of a curriculum must be the id of an environment, such as 'CartPole-v1', or "
                    f"arguments of the environment, such as {{'corridor_length': 10}}, got "
                    f"{reprlib.repr(stage)}"
                )
        if not _is_finite(self.advance_return):
            raise ValueError(
                f"advance_return must be a finite number, got {reprlib.repr(self.advance_return)}"
            )
        is_whole = is_number(self.episodes, Integral)
        if not is_whole or not 1 <= self.episodes <= MAX_EPISODES:
            raise ValueError(
                f"episodes must be a whole number from 1 to {MAX_EPISODES:,}, got "
                f"{reprlib.repr(self.episodes)}"
            )
        object.__setattr__(self, "advance_return", float(self.advance_return))
        object.__setattr__(self, "episodes", int(self.episodes))

    def tasks(self, env_id: Any, env_kwargs: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        """Return the id and the arguments of each stage, of which the last one is the task."""
        shared = {name: env_kwargs[name] for name in ("render_mode",) if name in env_kwargs}
        earlier = [
            (stage, shared) if isinstance(stage, str) else (env_id, {**env_kwargs, **stage})
            for stage in self.stages
        ]
        return [*earlier, (env_id, dict(env_kwargs))]


class CurriculumEnv(gymnasium.Wrapper):
    """Environment whose episodes come from the first of several tasks, and later from harder ones.

    `Curriculum` describes when the next stage begins. `make_vec_env` makes environments of this class with
    ``curriculum=...``. The wrapped environment is that of the current stage; it is closed when the next one
    begins. The info of each step has the stage of the episode as ``curriculum_stage``. The stage is a
    persistent state (`rlxf.envs.ActionReplay`), so a resumed training continues in it.

    Args:
        env_fns: functions without arguments that create the environments of the stages.
        curriculum: the rule for the next stage.
        spec: spec of the task, the last stage; None if it has none.

    Raises:
        ValueError: at the beginning of a stage, if its spaces differ from those of the first one.

    Warns:
        UserWarning: if a reset ends ten episodes in succession, outside of evaluations.

    Attributes:
        stage: number of the stage of the next episode, from 1.
        stages: number of stages, with the task.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        curriculum: Curriculum,
        spec: EnvSpec | None = None,
    ):
        super().__init__(env_fns[0]())
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self.curriculum = curriculum
        self.stage = 1
        self.stages = len(env_fns)
        self._env_fns = env_fns
        self._spec = spec
        self._env_stage = 1
        self._evaluates = False
        self._in_episode = False  # after its first step
        self._cut_episodes = 0
        self._returns: deque[float] = deque(maxlen=curriculum.episodes)
        self._return = 0.0
        self._unseeded = True
        self._generator = np.random.default_rng()

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the task, the last stage."""
        return self._spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode of the current stage, or of the task during an evaluation."""
        self._count_cut_episode()
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        stage = self.stages if self._evaluates else self.stage
        if self._env_stage != stage:
            self._make_env(stage)
        if seed is None and self._unseeded:
            seed = int(self._generator.integers(2**31))
        self._return = 0.0
        self._unseeded = False
        return reset_env(self.env, seed, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the current episode; at its end, decide on the stage of the next one."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._in_episode = not (terminated or truncated)
        if not self._in_episode and self._decides:
            self._cut_episodes = 0
            self._advance()
        return observation, reward, terminated, truncated, {**info, STAGE: self._env_stage}

    def begin_evaluation(self) -> None:
        """Use the task, the last stage, from the next reset until `end_evaluation`; returns do not count."""
        self._evaluates = True

    def end_evaluation(self) -> None:
        """Use the stage of the training again, from the next reset."""
        self._evaluates = False

    def persistent_state(self) -> dict[str, Any]:
        """Return what lasts across episodes, as JSON: the stage, its last returns, and the state of its task.

        The task has a state if it has the method ``persistent_state`` itself.
        """
        state = {"stage": self.stage, "returns": list(self._returns)}
        if self._env_stage != self.stage or not self.env.has_wrapper_attr("persistent_state"):
            return state
        return state | {"task": self.env.get_wrapper_attr("persistent_state")()}

    def load_persistent_state(self, state: dict[str, Any]) -> None:
        """Load a `persistent_state`, which the next reset uses.

        Raises:
            ValueError: if the state is not one of an environment with these stages.
        """
        stage, returns = state["stage"], state["returns"]
        is_stage = type(stage) is int and 1 <= stage <= self.stages
        if not (is_stage and isinstance(returns, list) and all(map(_is_finite, returns))):
            raise ValueError(f"not a state of {self.stages} stages: {reprlib.repr(state)}")
        self.stage = stage
        self._make_env(stage)
        self._returns = deque(returns, maxlen=self.curriculum.episodes)
        if "task" in state:
            self.env.get_wrapper_attr("load_persistent_state")(state["task"])

    @property
    def _decides(self) -> bool:
        """True if the current episode counts: it is one of the training, in an easier stage."""
        return not self._evaluates and self._env_stage == self.stage < self.stages

    def _count_cut_episode(self) -> None:
        """Warn if the last episodes have ended by a reset, so that no next stage can begin.

        Such an episode does not count: agents and users reset environments at other times, too.
        """
        if self._in_episode and self._decides:
            self._cut_episodes += 1
            if self._cut_episodes == CUT_EPISODES:
                warn_user(
                    f"the last {CUT_EPISODES} episodes in stage {self.stage} of a curriculum were ended by a "
                    f"reset and not by the environment, so their returns do not count and the next stage "
                    f"does not begin. If a wrapper ends them, such as TimeLimit in wrapper_class, end them "
                    f"in the environment itself, e.g. by env_kwargs={{'max_episode_steps': 100}}"
                )
        self._in_episode = False

    def _advance(self) -> None:
        """Continue with the next stage if the last episodes allow it; returns that are NaN do not count."""
        if not _is_finite(self._return):
            return
        self._returns.append(self._return)
        enough = len(self._returns) == self.curriculum.episodes
        if enough and np.mean(self._returns) >= self.curriculum.advance_return:
            self.stage += 1
            self._returns.clear()

    def _make_env(self, stage: int) -> None:
        """Begin a stage: replace the environment by a new one."""
        with ExitStack() as stack:
            env = stack.enter_context(closing(self._env_fns[stage - 1]()))
            check_same_spaces(stage, env, (self.observation_space, self.action_space))
            stack.pop_all()
        self.env.close()
        self.env = env
        self._env_stage = stage
        self._unseeded = True


class CurriculumCallback(BaseCallback):
    """Log the mean stage of the copies of a `CurriculumEnv`, from 1, as ``curriculum/stage``.

    It is logged at the end of each rollout, for the environments of this process. The stage of a copy is that
    of its last step, or of its last episode if its observation space is nested.

    Warns:
        UserWarning: at the start of a training, if its environments have no curriculum.
    """

    def _on_training_start(self) -> None:
        self._stages: dict[int, int] = {}
        if not has_curriculum(self.training_env):
            warn_user(
                "CurriculumCallback logs nothing, because the environments have no curriculum: make them "
                "with make_vec_env(..., curriculum=rlxf.envs.Curriculum(stages, advance_return=...))"
            )

    def _on_step(self) -> bool:
        self._stages |= {i: info[STAGE] for i, info in enumerate(self.locals["infos"]) if STAGE in info}
        return True

    def _on_rollout_end(self) -> None:
        if self._stages:
            self.logger.record("curriculum/stage", float(np.mean(list(self._stages.values()))))


def has_curriculum(env: VecEnv) -> bool:
    """Return whether all environments are `CurriculumEnv`, also those in processes of Gymnasium."""
    if isinstance(innermost_env(env), AsyncVectorEnv):  # its environments are not asked for their wrappers
        return all(env.env_method("has_wrapper_attr", "begin_evaluation"))
    try:
        return all(env.env_is_wrapped(CurriculumEnv))
    except NotImplementedError:  # not an environment of `make_vec_env`
        return False


def check_curriculum(curriculum: Any) -> None:
    """Raise TypeError unless the argument ``curriculum`` is None or a `Curriculum`."""
    if not isinstance(curriculum, Curriculum | None):
        raise TypeError(
            f"curriculum must be a Curriculum, got {reprlib.repr(curriculum)}: pass "
            f"rlxf.envs.Curriculum(stages, advance_return=...)"
        )


def check_stages(env_fns: Sequence[Callable[[], gymnasium.Env]]) -> EnvSpec | None:
    """Create the environment of each stage once, and return the spec of the last one.

    Raises:
        ValueError: if the spaces of a stage differ from those of the first one.
    """
    with closing(env_fns[0]()) as env:
        expected = env.observation_space, env.action_space
    spec = env.spec
    for number, env_fn in enumerate(env_fns[1:], 2):
        with closing(env_fn()) as env:
            check_same_spaces(number, env, expected)
            spec = env.spec
    return spec


def check_same_spaces(number: int, env: gymnasium.Env, expected: tuple[spaces.Space, spaces.Space]) -> None:
    """Raise ValueError unless the environment of a stage has the expected observation and action spaces."""
    own = env.observation_space, env.action_space
    if own != expected:
        raise ValueError(
            f"all stages of a curriculum need the same spaces: stage {number} has the observation and action "
            f"spaces {own}, but stage 1 has {expected}"
        )


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    try:
        return is_number(value) and isfinite(value)
    except OverflowError:  # of an int
        return False
