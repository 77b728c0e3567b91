"""Softmax attention among tokens that share a bucket: what LSH and Routing have in common."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from rlxf.attention.kernels.merged_softmax import softmax_over_parts
from rlxf.attention.kernels.same_bucket import Tokens, parts_of_buckets
from rlxf.attention.kernels.softmax import SoftmaxAverage, averaged
from rlxf.attention.patterns.full import Full
from rlxf.attention.relation import Relation, Share

SORTED_FROM = 1 << 17
"""So many pairs of query and key, and all are no longer computed: tokens are sorted by their buckets."""

Meets = Callable[[Tensor, Tensor], Tensor]
"""Whether a query may see a key of its bucket, by where the two stand: ``torch.ge`` and the like."""


class BucketAverage(SoftmaxAverage):
    """``o_i = sum_j n_ij exp(s_ij) v_j / sum_j n_ij exp(s_ij)``: key j counts n_ij times. 0 if none counts.

    The buckets of a token, one for each of R rounds, stand behind the features of its query and key.

    Where the pattern is `Full`, sequences are long and nothing is added to the scores or dropped, time and
    memory grow with the pairs that share a bucket; else with all pairs. The result is the same.

    Args:
        rounds: R.
    """

    def __init__(self, rounds: int):
        super().__init__()
        self.rounds = rounds

    @abstractmethod
    def counts(self, of_queries: Tensor, of_keys: Tensor, relation: Relation) -> Tensor:
        """n, (B, H, Tq, Tk), 0 where not allowed, of the buckets (B, H, Tq, R) and (B, H, Tk, R)."""

    @abstractmethod
    def meets(self, relation: Relation) -> Meets:
        """Who sees whom inside a bucket."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`."""
        if bias is None and not dropout and self.sorts(relation):
            return self.among_buckets(*self.split(q), *self.split(k), v, relation)
        return averaged(self.weights(q, k, bias, relation, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerPairwise`."""
        (q, of_queries), (k, of_keys) = self.split(q), self.split(k)
        counts = self.counts(of_queries, of_keys, relation)
        blind = ~(counts > 0).any(-1, keepdim=True)
        added = (counts + blind.to(counts.dtype)).to(q.dtype).log()
        bias = added if bias is None else bias + added
        return super().weights(q, k, bias, relation, dropout).masked_fill(blind, 0.0)

    def shares(self, relation: Relation) -> tuple[Share, ...] | None:
        """See `LayerKernel`. Tokens that are sorted are not gathered."""
        return None if self.sorts(relation) else relation.shares

    def sorts(self, relation: Relation) -> bool:
        """Whether to sort tokens by their buckets."""
        pairs = relation.query.shape[1] * relation.key.shape[1]
        return pairs >= SORTED_FROM and all(isinstance(rule, Full) for rule in relation.rules)

    def among_buckets(
        self, q: Tensor, of_queries: Tensor, k: Tensor, of_keys: Tensor, v: Tensor, relation: Relation
    ) -> Tensor:
        """`forward` by sorted tokens: (B, H, Tq, V)."""
        return self.found(q, of_queries, k, of_keys, v, relation)[0]

    def found(
        self, q: Tensor, of_queries: Tensor, k: Tensor, of_keys: Tensor, v: Tensor, relation: Relation
    ) -> tuple[Tensor, Tensor]:
        """What queries find in their buckets, (B, H, Tq, V), and whether there is anything, (B, H, Tq, 1)."""
        asking, heard = Tokens(of_queries, relation.query), Tokens(of_keys, relation.key)
        parts = parts_of_buckets(asking, heard, relation.causal, self.meets(relation))
        return softmax_over_parts(q, k, v, parts)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, H, T, D) and buckets (B, H, T, R)."""
        return x[..., : -self.rounds], x[..., -self.rounds :]


def shared_rounds(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """In how many rounds query and key share a bucket, (B, H, Tq, Tk) int64."""
    rounds = zip(of_queries.unbind(-1), of_keys.unbind(-1), strict=True)
    return torch.stack([a[..., :, None] == b[..., None, :] for a, b in rounds]).sum(0)
