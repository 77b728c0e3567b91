"""Attention whose weights are products of features: what Performer and RFA share."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.checks import MOST_SEED
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.base import LayerMemory, LayerRecurrent, RecurrentKernel
from rlxf.attention.kernels.reading import read
from rlxf.attention.kernels.sums import LOWEST, Keys, Sums, over_pairs, over_past, with_ones
from rlxf.attention.patterns.full import Full
from rlxf.attention.relation import Relation, Share

CHUNK = 128
"""Tokens that are read together where cost is linear: all pairs among them, sums for what was before."""

STRETCH = 256
"""The same where nothing is hidden, and no pairs are computed: what fits a processor's cache."""

SMALL = 1 << 16
"""Pairs of query and key up to which all of them at once are faster."""


Seeded = TypeVar("Seeded", bound=RecurrentKernel)
"""A kernel with a ``seed``."""


def with_own_seeds(kernel: Seeded, layers: int) -> tuple[Seeded, ...]:
    """The kernel of each layer, which draws by itself: by its seed and those that follow."""
    options: Any = kernel
    return tuple(replace(options, seed=(options.seed + layer) % (MOST_SEED + 1)) for layer in range(layers))


class LinearAttention(LayerRecurrent):
    """``o_i = sum_j w_ij v_j / sum_j w_ij`` over the keys j that i sees, ``w_ij = phi(q_i) . phi(k_j)``.

    There are three ways to find it. Pair by pair: for any pattern, memory and episodes. By `Sums`, in time
    and memory linear in the length: where each token of a row sees all of it, or its past. Token by token,
    with `Sums` as all that is remembered. Two of them never compute a weight, so there is none to drop: the
    transformer's dropout leaves this average alone.
    """

    features: int
    """M."""

    precision: ClassVar[torch.dtype] = torch.float32
    """Lowest precision of features and sums."""

    @abstractmethod
    def quotient(self, found: Tensor) -> Tensor:
        """Compute the average (..., V) from the result (..., V + 2) of `over_pairs` or `over_past`.

        That result contains the numerator, the denominator, and the sum of squared norms of key features.
        """

    def wide(self, x: Tensor) -> Tensor:
        """Convert x to at least `precision`, which exponents and long sums need."""
        return x.to(torch.promote_types(x.dtype, self.precision))

    @abstractmethod
    def asking(self, q: Tensor) -> Tensor:
        """phi of queries (B, H, T, D), up to a factor for each: (B, H, T, M)."""

    @abstractmethod
    def heard(self, k: Tensor) -> Keys:
        """phi of keys (B, H, T, D + F), as they come from `among`."""

    def among(self, k: Tensor, index: Index) -> Tensor:
        """Keys (B, H, S, D + F) as they meet queries: what they owe to one another is found."""
        return k

    def fading(self, k: Tensor) -> Tensor:
        """What keys (B, H, S, D + F) leave of those before them, as logarithm: (B, H, S) float64. All."""
        return k.new_zeros(k.shape[:-1], dtype=torch.float64)

    def shares(self, relation: Relation) -> tuple[Share, ...] | None:
        """See `LayerKernel`."""
        return None if is_one_stretch(relation) else super().shares(relation)

    def meet(self, q: Tensor, k: Tensor, relation: Relation) -> tuple[Tensor, Tensor]:
        """See `LayerKernel`."""
        return q, self.among(k, relation.key)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`."""
        values = with_ones(self.wide(v))
        if is_one_stretch(relation):
            sums = self._by_sums(q, k, values, relation)
        else:
            sums = over_pairs(self.asking(q), self.heard(k), values, relation.allowed_by_head)
        return self.quotient(sums).to(v.dtype)

    def _by_sums(self, q: Tensor, k: Tensor, values: Tensor, relation: Relation) -> Tensor:
        empty = relation.key.episode == EMPTY
        values = values.masked_fill(empty[:, None, :, None], 0.0)
        read = self._past if relation.causal else self._all
        return torch.cat(list(read(q, k, values, empty)), dim=2)

    def _past(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """What each query finds up to its own key; queries are the last of the keys."""
        older, size = k.shape[2] - q.shape[2], CHUNK
        sizes = [*pieces(older, size), *pieces(q.shape[2], size)]
        parts = zip(k.split(sizes, 2), values.split(sizes, 2), empty.split(sizes, 1), strict=True)
        sums = Sums.none(self.features, values)
        for _ in pieces(older, size):
            sums = self._with(sums, *next(parts))
        for some in q.split(size, 2):
            found, sums = read(self, some, *next(parts), sums)
            yield found

    def _all(self, q: Tensor, k: Tensor, values: Tensor, empty: Tensor) -> Iterator[Tensor]:
        """What each query finds in all keys."""
        sums = Sums.none(self.features, values)
        for part in zip(k.split(STRETCH, 2), values.split(STRETCH, 2), empty.split(STRETCH, 1), strict=True):
            sums = self._with(sums, *part)
        for some in q.split(STRETCH, 2):
            found = self.asking(some) @ sums.total
            yield torch.cat([found, sums.energy.expand(-1, -1, found.shape[2], -1)], dim=-1)

    def _with(self, sums: Sums, k: Tensor, values: Tensor, empty: Tensor) -> Sums:
        return sums.plus(self.heard(k).without(empty), values)

    def begin(self, k: Tensor, v: Tensor, index: Index) -> "Remembered":
        """See `LayerRecurrent`. Tokens of the last episode alone will be seen again."""
        none = Sums.none(self.features, with_ones(self.wide(v)))
        memory = Remembered(none, latest(index))
        keys, values, _ = self._now(k, v, index.episode != memory.episode[:, None], index)
        memory.sums = none.plus(keys, values)
        return memory

    def recur(self, q: Tensor, k: Tensor, v: Tensor, index: Index, memory: LayerMemory) -> Tensor:
        """See `LayerRecurrent`."""
        assert isinstance(memory, Remembered)
        keys, values, faded = self._now(k, v, index.episode == EMPTY, index)
        before = memory.before(index, faded)
        memory.sums = before.plus(keys, values)
        return self.quotient(over_past(self.asking(q), keys, values, before)[0]).to(v.dtype)

    def _now(self, k: Tensor, v: Tensor, without: Tensor, index: Index) -> tuple[Keys, Tensor, Tensor]:
        """Keys as seen from the last of S tokens, their values, and what these leave of all before (B, H).

        Args:
            k: (B, H, S, D + F).
            v: (B, H, S, V).
            without: those that do not count, (B, S) bool.
            index: where the tokens stand.
        """
        values = with_ones(self.wide(v)).masked_fill(without[:, None, :, None], 0.0)
        faded = self.fading(k).masked_fill(without[:, None], 0.0).sum(-1)
        keys = self.heard(self.among(k, index))
        scale = (keys.scale + faded[..., None]).to(values.dtype)
        return Keys(keys.features, scale).without(without), values, faded


@dataclass(eq=False)
class Remembered(LayerMemory):
    """What one layer keeps of all tokens of an episode.

    Args:
        sums: over their keys and values.
        episode: (B,) int64, which one; `EMPTY` for none yet.
    """

    sums: Sums
    episode: Tensor

    def rows(self, rows: Tensor) -> "Remembered":
        """See `LayerMemory`."""
        return Remembered(Sums(*(part[rows] for part in self.sums)), self.episode[rows])

    def before(self, index: Index, faded: Tensor) -> Sums:
        """What the next token (B, 1) sees of it, leaving ``e^faded`` (B, H); of another episode, nothing."""
        episode = torch.where(index.episode == EMPTY, self.episode[:, None], index.episode)[:, 0]
        other = (episode != self.episode)[:, None]
        self.episode = episode
        total, scale, energy = self.sums
        scale = (scale + faded).to(scale.dtype).masked_fill(other, LOWEST)
        gone = other[..., None, None]
        return Sums(total.masked_fill(gone, 0.0), scale, energy.masked_fill(gone, 0.0))


def is_one_stretch(relation: Relation) -> bool:
    """Whether there are many tokens, and each sees all others of its row, or its past.

    So it is with rule `Full` and one episode in each row, beside empty slots. Where what is ahead is hidden,
    positions have to count up, and all of the last keys to ask: some of them read pair by pair.
    """
    many = relation.query.shape[1] * relation.key.shape[1] > SMALL
    if not many or relation.tables is not None or list(relation.rules) != [Full()]:
        return False
    return has_one_episode(relation) and (relation.aligned or not relation.causal)


def has_one_episode(relation: Relation) -> bool:
    """Whether all tokens of a row are of one episode."""
    episode = relation.key.concatenate(relation.query).episode
    return bool(((episode == EMPTY) | (episode == episode.amax(1, keepdim=True))).all())


def latest(index: Index) -> Tensor:
    """(B,): the episode of the last token of each row; `EMPTY` where there is none."""
    place = torch.arange(index.shape[1] + 1, device=index.episode.device)
    filled = F.pad(index.episode != EMPTY, (1, 0))
    last = (filled * place).amax(1, keepdim=True)
    return F.pad(index.episode, (1, 0), value=EMPTY).gather(1, last)[:, 0]


def pieces(length: int, size: int) -> list[int]:
    """``length`` cut into pieces of a size, the last one maybe smaller."""
    return [min(size, length - start) for start in range(0, length, size)]
