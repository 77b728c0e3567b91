"""Running sums over keys for attention weights that are products of features.

``sum_j phi(q_i) . phi(k_j) v_j = phi(q_i) . sum_j phi(k_j) v_j``: the sum over keys does not depend on the
query. Keys and sums are stored like floating-point numbers, as features times ``e^scale``. The scale of a sum
is the largest scale of its terms, so nothing overflows. Later keys do not change earlier results.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LOWEST = -1e30
"""Scale of absent keys; their contribution next to any other key is 0."""


class Keys(NamedTuple):
    """Features of keys (B, H, T, M), times e^scale (B, H, T); no gradient flows through the scale."""

    features: Tensor
    scale: Tensor

    @property
    def energy(self) -> Tensor:
        """Squared norms ``|phi(k_j)|^2``, (B, H, T, 1)."""
        return self.features.square().sum(-1, keepdim=True)

    def without(self, excluded: Tensor) -> "Keys":
        """Exclude the keys for which ``excluded`` (B, T) is True; their values must be 0."""
        return Keys(self.features, self.scale.masked_fill(excluded[:, None], LOWEST))


class Sums(NamedTuple):
    """Key-value state ``sum_j phi(k_j) [v_j, 1]``: total (B, H, M, V + 1), times e^scale (B, H).

    ``energy`` (B, H, 1, 1), times e^(2 scale), is ``sum_j |phi(k_j)|^2``: a measure of the noise of an
    estimate.
    """

    total: Tensor
    scale: Tensor
    energy: Tensor

    @classmethod
    def none(cls, features: int, values: Tensor) -> "Sums":
        """Return the state of no keys, for M features and values (B, H, T, V + 1)."""
        batch, heads, _, size = values.shape
        total = values.new_zeros(batch, heads, features, size)
        return cls(total, values.new_full((batch, heads), LOWEST), values.new_zeros(batch, heads, 1, 1))

    def plus(self, keys: Keys, values: Tensor) -> "Sums":
        """Return the state with additional keys and their values (B, H, T, V + 1)."""
        scale = torch.cat([self.scale[..., None], keys.scale], dim=-1).amax(-1)
        kept, joined = self.rescaled(keys, scale)
        energy = kept.square() * self.energy + joined.square().mT @ keys.energy
        return Sums(kept * self.total + keys.features.mT @ (joined * values), scale, energy)

    def rescaled(self, keys: Keys, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors that bring this state (B, H, 1, 1) and keys (B, H, T, 1) to a scale (B, H)."""
        kept, joined = self.scale - scale, keys.scale - scale[..., None]
        return kept.exp()[..., None, None], joined.exp()[..., None]


def over_pairs(queries: Tensor, keys: Keys, values: Tensor, allowed: Tensor) -> Tensor:
    """Compute ``sum_j phi(q_i) . phi(k_j) [v_j, 1]`` and ``sum_j |phi(k_j)|^2``.

    They are divided by e^s and e^(2 s), with s the largest scale among the keys of query i.

    Args:
        queries: features (B, H, Tq, M).
        keys: features of Tk keys.
        values: values with an appended 1, (B, H, Tk, V + 1).
        allowed: attention mask (B, 1 or H, Tq, Tk) bool, True where a query may see a key.

    Returns:
        (B, H, Tq, V + 2); 0 for a query without visible keys.
    """
    scale = keys.scale[:, :, None].masked_fill(~allowed, -torch.inf)
    factor = (scale - scale.amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    result = (queries @ keys.features.mT * factor) @ values
    return torch.cat([result, factor.square() @ keys.energy], dim=-1)


def over_past(queries: Tensor, keys: Keys, values: Tensor, before: Sums) -> tuple[Tensor, Tensor]:
    """Compute `over_pairs` where each of T queries sees the state before and the keys up to its own.

    Returns:
        (B, H, T, V + 2), and the weights of the T^2 pairs, (B, H, T, T).
    """
    past, pairs = seen(keys, before)
    energy = pairs.square() @ keys.energy + past.square() * before.energy
    weights = pairs.mul_(queries @ keys.features.mT)
    result = weights @ values + past * (queries @ before.total)
    return torch.cat([result, energy], dim=-1), weights


def seen(keys: Keys, before: Sums) -> tuple[Tensor, Tensor]:
    """Return the factors of the state (B, H, T, 1) and of T keys (B, H, T, T) for T queries."""
    top = torch.maximum(keys.scale.cummax(-1).values, before.scale[..., None])
    past = before.scale[..., None] - top
    pairs = (keys.scale[..., None, :] - top[..., None]).clamp_(max=0)  # later keys might overflow
    return past.exp()[..., None], pairs.exp_().tril_()


def with_ones(v: Tensor) -> Tensor:
    """Append a 1, which sums to the denominator, to values (B, H, T, V): (B, H, T, V + 1)."""
    return F.pad(v, (0, 1), value=1.0)
