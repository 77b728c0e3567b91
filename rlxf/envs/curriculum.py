"""Curriculum: episodes of easier tasks first, and of the task itself once the agent solves them."""

import reprlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.callbacks import BaseCallback

MAX_STAGES = 100
"""Largest number of easier stages. Each copy of the environment creates the environments of all stages."""
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

    Source: Bengio et al. 2009, "Curriculum learning", ICML; a survey for reinforcement learning is Narvekar
    et al. 2020, arXiv:2003.04960.

    Args:
        stages: the easier tasks in their order, at most 100. A stage is a Gymnasium id, with no arguments but
            those of its registration; or arguments that are added to those of the task and replace equal
            names.
        advance_return: mean return at which the next stage begins. Actions during training are random, so
            choose it below the return of a perfect episode.
        episodes: number of episodes over which the returns are averaged, at least 1. With few episodes, a
            copy may advance by chance.

    Raises:
        TypeError: if stages is not a sequence of ids and mappings.
        ValueError: if there is no stage or more than 100, episodes is not a whole number of at least 1, or
            advance_return is not a finite number.
    """

    stages: tuple[Stage, ...]
    advance_return: float
    episodes: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.stages, str | Mapping) or not isinstance(self.stages, Sequence):
            raise TypeError(f"the stages of a curriculum must be a list, got {self.stages!r}")
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
                    f"arguments of the environment, such as {{'corridor_length': 10}}, got {stage!r}"
                )
        if not _is_number(self.advance_return):
            raise ValueError(f"advance_return must be a finite number, got {self.advance_return!r}")
        if type(self.episodes) is not int or self.episodes < 1:
            raise ValueError(f"episodes must be a whole number of at least 1, got {self.episodes!r}")

    def tasks(self, env_id: Any, env_kwargs: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        """Return the id and the arguments of each stage, of which the last one is the task."""
        earlier = [
            (stage, {}) if isinstance(stage, str) else (env_id, {**env_kwargs, **stage})
            for stage in self.stages
        ]
        return [*earlier, (env_id, dict(env_kwargs))]


class CurriculumEnv(gymnasium.Env):
    """Environment whose episodes come from the first of several tasks, and later from harder ones.

    `Curriculum` describes when the next stage begins. `make_vec_env` makes environments of this class with
    ``curriculum=...``. The current stage is a `persistent_state`, so a resumed training continues in it.

    Args:
        makers: functions without arguments that create the environments of the stages.
        curriculum: the rule for the next stage.

    Raises:
        ValueError: if the spaces of a stage differ from those of the last one.

    Attributes:
        stage: number of the current stage, from 1.
        stages: number of stages, with the task.
    """

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]], curriculum: Curriculum):
        self._envs = [make() for make in makers]
        task = self._envs[-1]
        self.observation_space, self.action_space = task.observation_space, task.action_space
        self.metadata, self.render_mode = task.metadata, task.render_mode
        for number, env in enumerate(self._envs, 1):
            _check_same_spaces(number, env, task)
        self.curriculum, self.stage, self.stages = curriculum, 1, len(self._envs)
        self._returns: deque[float] = deque(maxlen=curriculum.episodes)
        self._return, self._env, self._seeded = 0.0, self._envs[0], set[int]()

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # a property as in `gymnasium.Wrapper`
        """Spec of the task, the last stage."""
        return self._envs[-1].spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode of the current stage."""
        super().reset(seed=seed)
        if seed is not None:
            self._seeded.clear()
        if seed is None and self.stage not in self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded.add(self.stage)
        self._return, self._env = 0.0, self._envs[self.stage - 1]
        return self._env.reset(seed=seed, **({} if options is None else {"options": options}))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the current episode; at its end, add its return to those that decide on the next stage."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._return += float(reward)
        if terminated or truncated:
            self._returns.append(self._return)
            self._advance()
        return observation, reward, terminated, truncated, info

    def _advance(self) -> None:
        """Continue with the next stage if the last episodes allow it."""
        enough = len(self._returns) == self.curriculum.episodes
        solved = enough and np.mean(self._returns) >= self.curriculum.advance_return
        if solved and self.stage < self.stages:
            self.stage += 1
            self._returns.clear()

    def persistent_state(self) -> dict[str, Any]:
        """Return the state that lasts across episodes, as JSON: the stage and the last returns in it."""
        return {"stage": self.stage, "returns": list(self._returns)}

    def load_persistent_state(self, state: dict[str, Any]) -> None:
        """Load a `persistent_state`, which the next reset uses.

        Raises:
            ValueError: if the state is not one of an environment with these stages.
        """
        stage, returns = state["stage"], state["returns"]
        is_stage = type(stage) is int and 1 <= stage <= self.stages
        if not (is_stage and isinstance(returns, list) and all(map(_is_number, returns))):
            raise ValueError(f"not a state of {self.stages} stages: {reprlib.repr(state)}")
        self.stage = stage
        self._returns = deque(returns, maxlen=self.curriculum.episodes)

    def render(self) -> Any:
        """Render the current episode."""
        return self._env.render()

    def close(self) -> None:
        """Close the environments of all stages."""
        for env in self._envs:
            env.close()


class CurriculumCallback(BaseCallback):
    """Log the mean stage of the copies of a `CurriculumEnv`, from 1, as ``curriculum/stage``.

    It is logged at the end of each rollout. Environments without a curriculum are not allowed.
    """

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.logger.record("curriculum/stage", float(np.mean(self.training_env.get_attr("stage"))))


def _check_same_spaces(number: int, env: gymnasium.Env, task: gymnasium.Env) -> None:
    spaces = [(each.observation_space, each.action_space) for each in (env, task)]
    if spaces[0] != spaces[1]:
        raise ValueError(
            f"stage {number} of the curriculum has the observation and action spaces {spaces[0]}, but the "
            f"task has {spaces[1]}: all stages of a curriculum need the same spaces"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
