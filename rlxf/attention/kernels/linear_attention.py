"""Attention whose weights are products of features: what Performer and RFA share."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.base import LayerRecurrent
from rlxf.attention.kernels.sums import Keys, Sums, over_pairs, over_past, quotient, with_ones
from rlxf.attention.patterns.full import Full
from rlxf.attention.relation import Relation

CHUNK = 128
"""Tokens that are read together where cost is linear: all pairs among them, sums for what was before."""

SMALL = 1 << 16
"""Pairs of query and key up to which all of them at once are faster."""


class LinearAttention(LayerRecurrent):
    """``o_i = sum_j w_ij v_j / sum_j w_ij`` over the keys j that query i sees, ``w_ij = phi(q_i) . phi(k_j)``.

    It is executed in three ways. Any pattern, memory and episodes: pair by pair. Where all tokens of a row see all
    of their row, or its past: in time and memory linear in the length, by `Sums`. And token by token, with `Sums` as
    all that is remembered. No weight is ever dropped: two of the three ways never compute one.
    """

    features: int
    """M."""

    least: float
    """How near to 0 a denominator may come, in units of the heaviest key in view."""

    @abstractmethod
    def asking(self, q: Tensor) -> Tensor:
        """phi of queries (B, H, T, D), up to a factor for each: (B, H, T, M)."""

    @abstractmethod
    def heard(self, k: Tensor) -> Keys:
        """phi of keys (B, H, T, D + F), as they come from `meet`."""

    def alone(self, k: Tensor) -> Tensor:
        """Keys (B, H, 1, D + F) as from `meet`, of a token behind which there is no other."""
        return k

    def fading(self, k: Tensor) -> Tensor:
        """(B, H, T) float64: logarithm of what each token leaves of those before it. By default all."""
        return k.new_zeros(k.shape[:-1], dtype=torch.float64)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`. The fast way is that of rule `Full`, see `in_one_stretch`."""
        values = with_ones(wide(v))
        if not in_one_stretch(relation):
            sums = over_pairs(self.asking(q), self.heard(k), values, relation.allowed_by_head)
        else:
            empty = relation.key.episode == EMPTY
            values = values.masked_fill(empty[:, None, :, None], 0.0)
            read = self._past if relation.causal else self._everything
            sums = torch.cat(list(read(q, k, values, empty)), dim=2)
        return quotient(sums, self.least).to(v.dtype)

    def _past(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """What each query finds up to its own key; queries are the last of the keys."""
        older = chunks(k.shape[2] - q.shape[2])
        sizes = [*older, *chunks(q.shape[2])]
        sums = Sums.none(self.features, values)
        parts = list(zip(k.split(sizes, 2), values.split(sizes, 2), empty.split(sizes, 1), strict=True))
        for part in parts[: len(older)]:
            sums = recomputed(self._add, *part, sums)
        for some, part in zip(q.split(CHUNK, 2), parts[len(older) :], strict=True):
            found, sums = recomputed(self._read, some, *part, sums)
            yield found

    def _everything(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """What each query finds in all keys."""
        sums = Sums.none(self.features, values)
        for part in zip(k.split(CHUNK, 2), values.split(CHUNK, 2), empty.split(CHUNK, 1), strict=True):
            sums = recomputed(self._add, *part, sums)
        for some in q.split(CHUNK, 2):
            yield recomputed(self._ask, some, sums)

    def _add(self, k: Tensor, values: Tensor, empty: Tensor, sums: Sums) -> Sums:
        return sums.plus(self.heard(k).without(empty), values)

    def _ask(self, q: Tensor, sums: Sums) -> Tensor:
        return self.asking(q) @ sums.total

    def _read(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor, before: Sums) -> tuple[Tensor, Sums]:
        keys = self.heard(k).without(empty)
        return over_past(self.asking(q), keys, values, before), before.plus(keys, values)
