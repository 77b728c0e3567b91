"""Memory that an agent needs to act for one environment, estimated before anything of it is built."""

import torch

from rlxf.attention import TransformerSpec
from rlxf.attention.memory.state import State

CACHE_COPIES = 8
"""Memory of acting per byte of a state: keys, values and tables of distances, and their copies."""
STEP_COPIES = 4
"""Memory of acting per byte of a context window: the window, the one shifted by a step, and its tokens."""
NUMBER_BYTES = 8
INDEX_NUMBERS = 32
"""Numbers of a step besides: return, time step, mask, and positions and masks of its tokens."""


def state_memory(core: TransformerSpec) -> int:
    """Return an upper estimate of the bytes that a core remembers of one environment while it acts."""
    if core.memory is None:
        return 0
    like = torch.empty(0, device="meta")
    return CACHE_COPIES * _bytes(core.memory.empty(core.layers, 1, like, core.width))


def window_memory(steps: int, numbers: int, width: int) -> int:
    """Return an upper estimate of the bytes of a context window of so many steps of one environment.

    Args:
        steps: length of the window.
        numbers: of an encoded observation and action.
        width: of a token; a step has three.
    """
    return STEP_COPIES * NUMBER_BYTES * steps * (numbers + 3 * width + INDEX_NUMBERS)


def _bytes(state: State | None) -> int:
    if state is None:
        return 0
    index = state.index.position.nbytes + state.index.episode.nbytes
    return state.hidden.nbytes + index + _bytes(state.older)
