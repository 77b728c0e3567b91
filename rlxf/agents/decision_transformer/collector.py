"""Playing on while learning, and keeping what was played as whole episodes."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer.replay import Episode
from rlxf.agents.decision_transformer.steps import Steps
from rlxf.agents.guards import check_first, check_step, unspoiled
from rlxf.envs.step_checks import with_checked_steps


class Player(Protocol):
    """Who plays."""

    def predict(
        self, observation: Any, state: Any, episode_start: Any, deterministic: bool
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions."""

    def encode(self, observation: Any, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Observations and actions as in the data."""


class Step(NamedTuple):
    """What E environments showed, did and paid at one step."""

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]


class Collector:
    """Plays in E environments side by side, sampling actions, and hands out episodes as they end.

    Args:
        player: chooses the actions.
        env: wrapped in `ReturnToGo`; it is reset before the first step.

    Raises:
        FaultyEnvironmentError: from `step` too, if an observation or a reward is NaN or infinite; what was
            played of these episodes is lost.
    """

    def __init__(self, player: Player, env: VecEnv):
        self.player, self.env = player, with_checked_steps(env)
        assert isinstance(env.observation_space, spaces.Dict)  # of a `ReturnToGo`
        self._space = env.observation_space["observation"]
        self._taken = 0
        self.forget()

    def forget(self) -> None:
        """Begin fresh episodes with the next step."""
        self._seen: Any = None
        self._state: Steps | None = None
        self._starts = np.ones(self.env.num_envs, np.bool_)
        self._steps: list[Step] = []
        self._first = np.zeros(self.env.num_envs, np.int64)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state that is needed to continue the current episodes."""
        own = {"starts": self._starts, "first": self._first, "taken": np.array(self._taken)}
        if self._seen is not None:
            own |= {f"seen.{name}": np.asarray(part) for name, part in self._seen.items()}
        if self._state is not None:
            own |= {f"state.{name}": part.cpu().numpy() for name, part in vars(self._state).items()}
        if self._steps:
            parts = zip(Step._fields, zip(*self._steps, strict=True), strict=True)
            own |= {f"steps.{name}": np.stack(each) for name, each in parts}
        return own

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        """Continue from the result of `arrays`."""
        self._starts, self._first, self._taken = arrays["starts"], arrays["first"], int(arrays["taken"])
        self._seen = _named("seen.", arrays) or None
        state = {name: torch.from_numpy(part).to(device) for name, part in _named("state.", arrays).items()}
        self._state = Steps(**state) if state else None
        steps = [arrays[f"steps.{name}"] for name in Step._fields if f"steps.{name}" in arrays]
        self._steps = [Step(*parts) for parts in zip(*steps, strict=True)]

    def step(self) -> tuple[list[Episode], NDArray[np.bool_], list[dict[str, Any]]]:
        """One step of every environment: the episodes that it ended, who ended, and the infos."""
        if self._seen is None:
            self._begin()
        actions, self._state = self.player.predict(self._seen, self._state, self._starts, deterministic=False)
        observations, taken = self.player.encode(self._seen, actions)
        self._taken += 1
        with unspoiled(self.env):
            self._seen, rewards, dones, infos = self.env.step(actions)
            check_step(
                self.env, self._seen["observation"], rewards, self._taken, space=self._space, dones=dones
            )
        self._steps.append(Step(observations, taken, np.asarray(rewards, np.float32)))
        fillers = np.array([info.get("filler", False) for info in infos], np.bool_)
        ended = [self._episode(row) for row in np.flatnonzero(dones & ~fillers).tolist()]
        self._starts = dones | fillers
        self._first[self._starts] = len(self._steps)
        self._drop_ended()
        return ended, dones, infos

    def _begin(self) -> None:
        with unspoiled(self.env):
            seen: Any = self.env.reset()
            check_first(self.env, seen["observation"], self._taken, space=self._space)
        self._seen = seen

    def _episode(self, row: int) -> Episode:
        steps = self._steps[self._first[row] :]
        return Episode(*(np.stack([part[row] for part in parts]) for parts in zip(*steps, strict=True)))

    def _drop_ended(self) -> None:
        """Drop the steps before every episode that is still played."""
        over = int(self._first.min())
        del self._steps[:over]
        self._first -= over


def _named(start: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(start): part for name, part in arrays.items() if name.startswith(start)}
