"""Detection of agents that act repeatedly without their previous state."""

import warnings
from typing import Any

PATIENCE = 10
"""Consecutive calls without state or episode_start after which a mistake is assumed."""


class StatelessCalls:
    """Warn once if an agent with memory predicts without the state of the previous step.

    The warning is issued if there is no state although ``episode_start`` marks an observation as not the
    first of its episode. It is also issued at the `PATIENCE`-th consecutive call with neither a state nor
    ``episode_start``. To predict for independent observations, pass
    ``episode_start=np.ones(n, dtype=bool)``: these calls are never counted.

    Args:
        stacklevel: frames from the warning to the caller of ``predict``, as in ``warnings.warn``.
    """

    def __init__(self, stacklevel: int) -> None:
        self._in_a_row, self._warned, self._stacklevel = 0, False, stacklevel

    def note(self, state: Any, first: bool | None) -> None:
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

    def _warn(self, problem: str) -> None:
        self._warned = True
        warnings.warn(
            f"{problem}, so the agent acts without memory, as in the first step of an episode: pass the "
            f"state of the previous call, actions, state = agent.predict(obs, state, episode_start); for "
            f"independent observations pass episode_start=np.ones(n, dtype=bool)",
            stacklevel=self._stacklevel,
        )
