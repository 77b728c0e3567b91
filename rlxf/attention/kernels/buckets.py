"""Base of softmax attention within hash or cluster buckets, `LSH` and `Routing`."""

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
"""Number of query-key pairs from which tokens are sorted by bucket instead of computing all pairs."""

Meets = Callable[[Tensor, Tensor], Tensor]
"""Comparison of the positions of a query and a key of its bucket: True if the query may see the key."""


class BucketAverage(SoftmaxAverage):
    """``o_i = sum_j n_ij exp(s_ij) v_j / sum_j n_ij exp(s_ij)``, where key j counts n_ij times.

    The output is 0 if no key counts. The buckets of a token, one for each of R rounds, are appended to the
    features of its query and key.

    Time and memory grow with the pairs that share a bucket if the pattern is `Full`, sequences are long, and
    there is neither a bias nor dropout. Otherwise they grow with all pairs. The result is the same.

    Args:
        rounds: R.
    """

    def __init__(self, rounds: int):
        super().__init__()
        self.rounds = rounds

    @abstractmethod
    def counts(self, query_buckets: Tensor, key_buckets: Tensor, relation: Relation) -> Tensor:
        """Return n, (B, H, Tq, Tk), of the buckets (B, H, Tq, R) and (B, H, Tk, R); 0 for masked pairs."""

    @abstractmethod
    def meets(self, relation: Relation) -> Meets:
        """Return the comparison of positions that decides which keys of its bucket a query sees."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        if bias is None and not dropout and self.sorts(relation):
            return self.among_buckets(*self.split(q), *self.split(k), v, relation)
        return averaged(self.weights(q, k, bias, relation, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        (q, query_buckets), (k, key_buckets) = self.split(q), self.split(k)
        counts = self.counts(query_buckets, key_buckets, relation)
        fully_masked = ~(counts > 0).any(-1, keepdim=True)
        log_counts = (counts + fully_masked.to(counts.dtype)).to(q.dtype).log()
        bias = log_counts if bias is None else bias + log_counts
        return super().weights(q, k, bias, relation, dropout).masked_fill(fully_masked, 0.0)

    def shares(self, relation: Relation) -> tuple[Share, ...] | None:
        """Return the groups of queries; None where tokens are sorted and keys are not gathered."""
        return None if self.sorts(relation) else relation.shares

    def sorts(self, relation: Relation) -> bool:
        """Return whether to sort tokens by their buckets."""
        pairs = relation.query.shape[1] * relation.key.shape[1]
        return pairs >= SORTED_FROM and all(isinstance(rule, Full) for rule in relation.rules)

    def among_buckets(
        self, q: Tensor, query_buckets: Tensor, k: Tensor, key_buckets: Tensor, v: Tensor, relation: Relation
    ) -> Tensor:
        """Compute `forward` by sorting tokens: (B, H, Tq, V)."""
        return self.found(q, query_buckets, k, key_buckets, v, relation)[0]

    def found(
        self, q: Tensor, query_buckets: Tensor, k: Tensor, key_buckets: Tensor, v: Tensor, relation: Relation
    ) -> tuple[Tensor, Tensor]:
        """Attend within buckets: (B, H, Tq, V), and whether a query has visible keys, (B, H, Tq, 1)."""
        queries, keys = Tokens(query_buckets, relation.query), Tokens(key_buckets, relation.key)
        parts = parts_of_buckets(queries, keys, relation.causal, self.meets(relation))
        return softmax_over_parts(q, k, v, parts)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x into features (B, H, T, D) and buckets (B, H, T, R)."""
        return x[..., : -self.rounds], x[..., -self.rounds :]


def shared_rounds(query_buckets: Tensor, key_buckets: Tensor) -> Tensor:
    """Return the number of rounds in which query and key share a bucket, (B, H, Tq, Tk) int64."""
    rounds = zip(query_buckets.unbind(-1), key_buckets.unbind(-1), strict=True)
    return torch.stack([a[..., :, None] == b[..., None, :] for a, b in rounds]).sum(0)
