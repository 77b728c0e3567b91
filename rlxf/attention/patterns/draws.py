"""Random numbers that depend on a seed and on positions alone: the same in acting and learning."""

import torch
from torch import Tensor

MASK = 2**63 - 1


def draw(seed: int, *numbers: Tensor | int) -> Tensor:
    """A uniform number in [0, 1) for each tuple of whole numbers, float64; they broadcast.

    A chain of multiplications and shifts that mixes all bits, as in SplitMix64.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators", section 5.
    """
    state = torch.tensor(seed)
    for number in numbers:
        state = _mixed(state + torch.as_tensor(number) * -7046029254386353131 + 1)
    return (state & MASK).double() / 2.0**63


def _mixed(x: Tensor) -> Tensor:
    """x int64, overflow wanted."""
    x = (x ^ _right(x, 30)) * -4658895280553007687
    x = (x ^ _right(x, 27)) * -7723592293110705685
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift that fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
