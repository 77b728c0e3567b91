"""Hash-based random numbers that depend only on a seed and positions; equal in acting and learning."""

import torch
from torch import Tensor

MASK = 2**63 - 1


def draw(seed: int, *numbers: Tensor | int) -> Tensor:
    """Return a uniform number in [0, 1) for each tuple of integers, float64; they broadcast.

    Multiplications and shifts mix all bits, as in SplitMix64.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators", section 5.
    """
    state = torch.tensor(seed)
    for number in numbers:
        state = _mixed(state + torch.as_tensor(number) * -7046029254386353131 + 1)
    return (state & MASK).double() / 2.0**63


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of x int64; overflow is intended."""
    x = (x ^ _right(x, 30)) * -4658895280553007687
    x = (x ^ _right(x, 27)) * -7723592293110705685
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
