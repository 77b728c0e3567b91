"""Running sums over keys: what attention is made of whose weights are products of features.

``sum_j phi(q_i) . phi(k_j) v_j = phi(q_i) . sum_j phi(k_j) v_j``: the sum over keys does not know the query.
Like a floating-point number, a key is its features times ``e^scale``, and so is a sum; the largest scale in it is
its own. So nothing overflows, and what comes later changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LOWEST = -1e30
"""Scale of what is not there: beside any other it counts nothing."""


class Keys(NamedTuple):
    """Keys as features (B, H, T, M), times e to the power of scale (B, H, T), through which no gradient flows."""

    features: Tensor
    scale: Tensor

    def without(self, empty: Tensor) -> "Keys":
        """These, with the scale of nothing where empty (B, T) bool says so; their values have to be 0."""
        return Keys(self.features, self.scale.masked_fill(empty[:, None], LOWEST))


class Sums(NamedTuple):
    """``sum_j phi(k_j) [v_j, 1]``: total (B, H, M, V + 1), times e to the power of scale (B, H)."""

    total: Tensor
    scale: Tensor

    @classmethod
    def none(cls, features: int, values: Tensor) -> "Sums":
        """Of no key, for M features and values (B, H, T, V + 1)."""
        batch, heads, _, size = values.shape
        scale = values.new_full((batch, heads), LOWEST)
        return cls(values.new_zeros(batch, heads, features, size), scale)

    def plus(self, keys: Keys, values: Tensor) -> "Sums":
        """With more keys, and their values (B, H, T, V + 1)."""
        scale = torch.cat([self.scale[..., None], keys.scale], dim=-1).amax(-1)
        kept = (self.scale - scale).exp()[..., None, None]
        fresh = keys.features * (keys.scale - scale[..., None]).exp()[..., None]
        return Sums(kept * self.total + fresh.mT @ values, scale)


def over_pairs(queries: Tensor, keys: Keys, values: Tensor, allowed: Tensor) -> Tensor:
    """``sum_j phi(q_i) . phi(k_j) [v_j, 1]``, divided by the largest e^scale that query i sees.

    Args:
        queries: features (B, H, Tq, M).
        keys: those of Tk keys.
        values: and a 1, (B, H, Tk, V + 1).
        allowed: who may see whom, (B, 1 or H, Tq, Tk) bool.

    Returns:
        (B, H, Tq, V + 1); 0 for a query that sees nothing.
    """
    scale = keys.scale[:, :, None].masked_fill(~allowed, -torch.inf)
    factor = (scale - scale.amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    return (queries @ keys.features.mT * factor) @ values


def over_past(queries: Tensor, keys: Keys, values: Tensor, before: Sums) -> Tensor:
    """As `over_pairs`, where each of T queries sees what was before, and the T keys up to its own."""
    top = torch.maximum(keys.scale.cummax(-1).values, before.scale[..., None])
    factor = (keys.scale[..., None, :] - top[..., None]).clamp_(max=0).exp_().tril_()
    own = (queries @ keys.features.mT * factor) @ values
    return own + (before.scale[..., None] - top).exp()[..., None] * (queries @ before.total)


def with_ones(v: Tensor) -> Tensor:
    """Values (B, H, T, V) and a 1, which adds up to the denominator: (B, H, T, V + 1)."""
    return F.pad(v, (0, 1), value=1.0)


def quotient(sums: Tensor, least: float) -> Tensor:
    """Numerator over denominator, (..., V + 1) -> (..., V).

    A denominator nearer to 0 than ``least`` is moved there, on its own side of 0.
    """
    over, under = sums[..., :-1], sums[..., -1:]
    nearest = torch.where(under < 0, -least, least)
    return over / torch.where(under.abs() < least, nearest.to(under.dtype), under)
