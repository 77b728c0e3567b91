"""Estimates of the memory in bytes that an agent needs to act in one environment, before it is built."""

import torch

from rlxf.attention import TransformerSpec
from rlxf.attention.memory.state import State

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
