"""Running sums over keys: what attention is made of whose weights are products of features.

``sum_j phi(q_i) . phi(k_j) v_j = phi(q_i) . sum_j phi(k_j) v_j``: the sum over keys does not know the query.
Like a floating-point number, a key is its features times ``e^scale``, and so is a sum; the largest scale in
it is its own. So nothing overflows, and what comes later changes nothing that was found before.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LOWEST = -1e30
"""Scale of what is not there: beside any other it counts nothing."""


class Keys(NamedTuple):
    """Keys as features (B, H, T, M), times e^scale (B, H, T); no gradient flows through the scale."""

    features: Tensor
    scale: Tensor

    @property
    def energy(self) -> Tensor:
        """``|phi(k_j)|^2``, (B, H, T, 1)."""
        return self.features.square().sum(-1, keepdim=True)

    def without(self, gone: Tensor) -> "Keys":
        """These, some of which, (B, T) bool, do not count: their values have to be 0."""
        return Keys(self.features, self.scale.masked_fill(gone[:, None], LOWEST))


class Sums(NamedTuple):
    """``sum_j phi(k_j) [v_j, 1]``: total (B, H, M, V + 1), times e^scale (B, H).

    ``energy`` (B, H, 1, 1), times e^(2 scale), is ``sum_j |phi(k_j)|^2``: a measure of an estimate's noise.
    """

    total: Tensor
    scale: Tensor
    energy: Tensor

    @classmethod
    def none(cls, features: int, values: Tensor) -> "Sums":
        """Of no key, for M features and values (B, H, T, V + 1)."""
        batch, heads, _, size = values.shape
        total = values.new_zeros(batch, heads, features, size)
        return cls(total, values.new_full((batch, heads), LOWEST), values.new_zeros(batch, heads, 1, 1))

    def plus(self, keys: Keys, values: Tensor) -> "Sums":
        """With more keys, and their values (B, H, T, V + 1)."""
        scale = torch.cat([self.scale[..., None], keys.scale], dim=-1).amax(-1)
        kept, joined = self.rescaled(keys, scale)
        energy = kept.square() * self.energy + joined.square().mT @ keys.energy
        return Sums(kept * self.total + keys.features.mT @ (joined * values), scale, energy)

    def rescaled(self, keys: Keys, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of these sums (B, H, 1, 1) and of keys (B, H, T, 1) in sums of a scale (B, H)."""
        kept, joined = self.scale - scale, keys.scale - scale[..., None]
        return kept.exp()[..., None, None], joined.exp()[..., None]


def over_pairs(queries: Tensor, keys: Keys, values: Tensor, allowed: Tensor) -> Tensor:
    """``sum_j phi(q_i) . phi(k_j) [v_j, 1]`` and ``sum_j |phi(k_j)|^2``.

    They are divided by e^s and e^(2 s), with s the largest scale among the keys of query i.

    Args:
        queries: features (B, H, Tq, M).
        keys: those of Tk keys.
        values: with a 1 behind them, (B, H, Tk, V + 1).
        allowed: who may see whom, (B, 1 or H, Tq, Tk) bool.

    Returns:
        (B, H, Tq, V + 2); 0 for a query without visible keys.
    """
    scale = keys.scale[:, :, None].masked_fill(~allowed, -torch.inf)
    factor = (scale - scale.amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    found = (queries @ keys.features.mT * factor) @ values
    return torch.cat([found, factor.square() @ keys.energy], dim=-1)


def over_past(queries: Tensor, keys: Keys, values: Tensor, before: Sums) -> tuple[Tensor, Tensor]:
    """As `over_pairs`, where each of T queries sees what was before, and of T keys those up to its own.

    Also the weights of these pairs, (B, H, T, T).
    """
    past, pairs = seen(keys, before)
    energy = pairs.square() @ keys.energy + past.square() * before.energy
    weights = pairs.mul_(queries @ keys.features.mT)
    found = weights @ values + past * (queries @ before.total)
    return torch.cat([found, energy], dim=-1), weights


def seen(keys: Keys, before: Sums) -> tuple[Tensor, Tensor]:
    """The factors of what was before (B, H, T, 1), and of T keys (B, H, T, T), in what T queries find."""
    top = torch.maximum(keys.scale.cummax(-1).values, before.scale[..., None])
    past = before.scale[..., None] - top
    pairs = (keys.scale[..., None, :] - top[..., None]).clamp_(max=0)  # keys ahead might overflow
    return past.exp()[..., None], pairs.exp_().tril_()


def with_ones(v: Tensor) -> Tensor:
    """Values (B, H, T, V) and a 1, which adds up to the denominator: (B, H, T, V + 1)."""
    return F.pad(v, (0, 1), value=1.0)
