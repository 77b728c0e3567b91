"""Checks on the state of `predict`: the memory it may take, and warnings when a caller drops it."""

import warnings
from typing import Any

import torch

from rlxf.attention import TransformerSpec
from rlxf.attention.memory.base import State

CACHE_COPIES = 8
"""Bytes needed to act per byte of a state: keys, values and distance tables, and their copies."""
STEP_COPIES = 4
"""Bytes needed to act per byte of a context window: the window, its copy shifted by a step, its tokens."""
NUMBER_BYTES = 8
INDEX_NUMBERS = 32
"""Additional numbers per step: return, time step, mask, and positions and masks of its tokens."""


def state_memory(core: TransformerSpec) -> int:
    """Return an upper estimate of the bytes of a core's memory for one environment while it acts."""
    if core.memory is None:
        return 0
    like = torch.empty(0, device="meta")
    return CACHE_COPIES * _bytes(core.memory.empty(core.layers, 1, like, core.width))


def window_memory(steps: int, numbers: int, width: int) -> int:
    """Return an upper estimate of the bytes of a context window of one environment.

    Args:
        steps: length of the window.
        numbers: size of an encoded observation plus an encoded action.
        width: features of a token; a step has three tokens.
    """
    return STEP_COPIES * NUMBER_BYTES * steps * (numbers + 3 * width + INDEX_NUMBERS)


def _bytes(state: State | None) -> int:
    if state is None:
        return 0
    index = state.index.position.nbytes + state.index.episode.nbytes
    return state.hidden.nbytes + index + _bytes(state.older)


PATIENCE = 10
"""Consecutive calls without state or episode_start after which a mistake is assumed."""


class MissingStateWarning:
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

    def _warn(self, problem: str) -> None:
        self._warned = True
        warnings.warn(
            f"{problem}, so the agent acts without memory, as in the first step of an episode: pass the "
            f"state of the previous call, actions, state = agent.predict(obs, state, episode_start); for "
            f"independent observations pass episode_start=np.ones(n, dtype=bool)",
            stacklevel=self._stacklevel,
        )
