"""State of ``predict``: checks that it fits the agent, and a warning if it is missing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlxf.utils.warnings import warn_user

PATIENCE = 10
"""Consecutive calls without state or episode_start after which a mistake is assumed."""


def check_state_type(state: Any, expected: type, advice: str) -> None:
    """Raise TypeError, with an advice, unless a state passed to ``predict`` is of the expected class."""
    if not isinstance(state, expected):
        raise TypeError(f"state must be one that predict returned, got {type(state).__name__}; {advice}")


def check_state_rows(rows: Tensor, batch: int, device: torch.device, advice: str) -> None:
    """Check that a state passed to ``predict`` is of the environments of the observation.

    Args:
        rows: tensor of the state with one row for each of its environments.
        batch: number of observations.
        device: device of the agent.
        advice: end of the message.

    Raises:
        ValueError: if the number of environments or the device differs.
    """
    if len(rows) != batch:
        raise ValueError(f"the state is of {len(rows)} environments, the observation of {batch}; {advice}")
    if rows.device != device:
        raise ValueError(f"the state is on {rows.device}, the agent on {device}; {advice}")


def check_state_layout(given: Mapping[str, object], own: Mapping[str, object], advice: str) -> None:
    """Raise ValueError, with an advice, unless caches of two cores have equal parts (`KVCache.layout`)."""
    if given == own:
        return
    name = next(name for name in {**own, **given} if given.get(name) != own.get(name))
    raise ValueError(
        f"the state is of another core: {name} is {given.get(name)} in the state, {own.get(name)} in this "
        f"agent; {advice}"
    )


class MissingStateWarning:
    """Warn once if an agent with memory predicts without the state of the previous step.

    The warning is issued if there is no state although ``episode_start`` marks an observation as not the
    first of its episode. It is also issued at the `PATIENCE`-th consecutive call with neither a state nor
    ``episode_start``. To predict for independent observations, pass
    ``episode_start=np.ones(n, dtype=bool)``: these calls are never counted.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def record(self, state: Any, first: bool | None) -> None:
        """Record a call.

        Args:
            state: the state that was passed; None if there was none.
            first: whether all observations are the first of their episodes; None if unknown.
        """
        if self._warned:
            return
        self._in_a_row = self._in_a_row + 1 if state is None and first is None else 0
        if self._in_a_row == PATIENCE:
            self._warn(f"predict was called {PATIENCE} times in a row with neither state nor episode_start")
        if state is None and first is False:
            self._warn("predict got no state, although episode_start marks an episode as continuing")

    def record_start(self, state: Any, start: Tensor, given: bool) -> None:
        """Record a call with a mask of the environments at the first observation of an episode.

        Args:
            state: see `record`.
            start: (E,) bool.
            given: whether the caller passed ``episode_start``.
        """
        first = None
        if state is None and not self._warned:  # reading the mask waits for the device
            all_first = bool(start.all())
            first = all_first if given or all_first else None
        self.record(state, first)

    def _warn(self, problem: str) -> None:
        self._warned = True
        warn_user(
            f"{problem}, so the agent acts without memory, as in the first step of an episode: pass the "
            f"state of the previous call, actions, state = agent.predict(obs, state, episode_start); for "
            f"independent observations pass episode_start=np.ones(n, dtype=bool)"
        )
