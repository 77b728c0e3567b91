"""Detection of agents that act repeatedly without their previous state."""

import warnings
from typing import Any

PATIENCE = 10
"""Calls in a row without state or episode_start that are taken for a mistake; a few may be independent."""


class StatelessCalls:
    """Warns once if an agent with memory predicts without the state of the previous step.

    There is a warning if ``episode_start`` marks an observation as not the first of its episode, and at
    the `PATIENCE`-th call in a row that has neither a state nor ``episode_start``. To predict for independent
    observations, pass ``episode_start=np.ones(n, dtype=bool)``: these calls are never counted.

    Args:
        stacklevel: frames from the warning to the caller of ``predict``, as in ``warnings.warn``.
    """

    def __init__(self, stacklevel: int) -> None:
        self._in_a_row, self._warned, self._stacklevel = 0, False, stacklevel

    def note(self, state: Any, first: bool | None) -> None:
        """Record a call.

        Args:
            state: the state that was given; None if there was none.
            first: whether all observations are the first of their episodes; None if unknown.
        """
        if self._warned:
            return
        self._in_a_row = self._in_a_row + 1 if state is None and first is None else 0
        if self._in_a_row == PATIENCE:
            self._warn(f"predict was called {PATIENCE} times in a row with neither state nor episode_start")
        if state is None and first is False:
            self._warn("predict got no state, although episode_start says that an episode goes on")

    def _warn(self, what: str) -> None:
        self._warned = True
        warnings.warn(
            f"{what}, so the agent acts without memory, as in the first step of an episode: pass on the "
            f"state of the previous call, actions, state = agent.predict(obs, state, episode_start); for "
            f"independent observations pass episode_start=np.ones(n, dtype=bool)",
            stacklevel=self._stacklevel,
        )
