"""Routing attention: tokens attend to tokens of their cluster."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.kernels.base import PairwiseKernel, check_full_pattern, check_key_heads
from rlxf.attention.kernels.bucket_attention import (
    BucketAttention,
    ComparePositions,
    check_bucket_numbers,
    count_shared_rounds,
)
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, TokenIndex, gather_slots
from rlxf.utils.checks import check_between, check_int, check_not_negative, check_seed


@dataclass(frozen=True)
class Routing(PairwiseKernel):
    r"""Softmax among the keys whose cluster is the query's.

    Each head has n centroids mu of length 1. A query or key x, before positions change it, belongs to the
    cluster ``c(x) = argmax_c mu_c . x / |x|``. Then

    ``o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j`` over j in ``S_i = {j: c(k_j) = c(q_i), j <= i}``

    in a causal transformer; in a bidirectional one without the condition ``j <= i``. The output of a query
    without visible keys in its cluster is 0.

    Centroids follow a running k-means. A training pass with gradient accumulates the sum of
    ``x / |x|`` over all queries and keys of each cluster. The next update moves the centroids:
    ``decay mu + (1 - decay) sum / |sum|``, normalized to length 1. A cluster without tokens does not move.
    Between updates all passes use the same centroids, so acting matches training. The loss gets
    ``commitment mean (x / |x| - mu_c(x))^2``, once for each pass of each layer, as in public
    implementations.

    The paper's formula defines this S_i, but the paper computes clusters of equal size: each consists of the
    w queries and the w keys that are nearest to its centroid. Later tokens then determine which keys an
    earlier token attends to. This form therefore requires ``causal=False``; ``window`` selects it. The output
    of a query in several clusters is the mean of its outputs in them; that of a query in no cluster is 0.

    Tokens are sorted by cluster if there are many pairs, the pattern is `Full`, positions add nothing to
    scores and there is no dropout; otherwise all pairs are computed.

    Source: Roy et al. 2021, arXiv:2003.05997, section 4.1.

    Args:
        clusters: n; the paper uses about sqrt(L) for L tokens.
        window: w, number of queries and of keys of each cluster; None for clusters of any size.
        decay: decay of the centroids; 0.999 as in the paper.
        commitment: coefficient of the distance to the centroids in the loss; 1e-4 as in public
            implementations, absent in the paper.
        seed: seed of the initial centroids, which are random directions: the same in all layers, different in
            all heads.

    Raises:
        TypeError: if clusters, window or seed is not an integer.
        ValueError: if clusters or window is less than 1, decay is not in [0, 1), commitment is negative or
            not finite, or seed is less than 0; in a pass, if the dtype does not represent all numbers of
            clusters.
    """

    paper: ClassVar[str] = "Roy et al. 2021, arXiv:2003.05997"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L^2 / clusters pairs"
    clusters: int = 8
    window: int | None = None
    decay: float = 0.999
    commitment: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("Routing clusters", self.clusters)
        check_seed("Routing seed", self.seed)
        if self.window is not None:
            check_int("Routing window", self.window)
        check_between("Routing decay", self.decay, 0, 1, inclusive="left")
        check_not_negative("Routing commitment", self.commitment)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless clusters of equal size may be chosen from the whole sequence."""
        check_key_heads(self, choices)
        if self.window is not None:
            check_full_pattern(self, "window", choices)

    @property
    def token_loss_option(self) -> str | None:
        return "commitment" if self.commitment > 0 else None

    def check_processes(self, count: int) -> None:
        if count > 1:
            raise ValueError(
                f"{self} updates its centroids from the tokens of one process, but this training has "
                f"{count}: use another kernel, or start without torchrun"
            )

    def build(self, width: int, heads: int) -> "RoutingAttention":
        kind = RoutingAttention if self.window is None else BalancedRoutingAttention
        return kind(self, heads, width // heads)


class RoutingAttention(BucketAttention):
    """Module of `Routing` in one layer; ``centroids`` (H, n, D) have length 1."""

    def __init__(self, spec: Routing, heads: int, size: int):
        super().__init__(rounds=1)
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)
        drawn = torch.randn(heads, spec.clusters, size, generator=generator)
        self.register_buffer("centroids", F.normalize(drawn, dim=-1))
        self.register_buffer("sums", torch.zeros_like(drawn), persistent=False)
        self.centroids: Tensor
        self.sums: Tensor
        self._query_clusters: tuple[Tensor, Tensor] | None = None
        self._key_clusters: tuple[Tensor, Tensor] | None = None
        self.penalty_weight = spec.commitment

    def projected_query_extras(self, q: Tensor) -> Tensor:
        """Return the cluster of each query (B, H, T, D): (B, H, T, 1)."""
        extras, clusters = self.assign_clusters(q)
        self._query_clusters = (q, clusters) if self._learning else None
        return extras

    def projected_key_extras(self, k: Tensor) -> Tensor:
        """Return the cluster of each key; see `projected_query_extras`."""
        extras, clusters = self.assign_clusters(k)
        self._key_clusters = (k, clusters) if self._learning else None
        return extras

    def assign_clusters(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extra features of queries or keys (B, H, T, D), and their clusters c(x), (B, H, T).

        The length of x does not affect its cluster.
        """
        check_bucket_numbers(self.spec, self.spec.clusters - 1, x.dtype)
        clusters = self.similarity(x.detach()).argmax(-1)
        return clusters[..., None].to(x.dtype), clusters

    def similarity(self, x: Tensor) -> Tensor:
        """Return ``mu_c . x`` of x (B, H, T, D): (B, H, T, n)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.centroids.to(wide).transpose(1, 2)

    def counts(self, query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask) -> Tensor:
        return count_shared_rounds(query_buckets, key_buckets) * mask.allowed_by_head

    def compare_positions(self, mask: AttentionMask) -> ComparePositions:
        """Return the comparison: all tokens, or all but later ones in a causal transformer."""
        return torch.ge if mask.causal else _all_pairs

    def transform_in_context(self, q: Tensor, k: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Accumulate cluster sums and the commitment loss in a training pass with gradient."""
        if self._query_clusters is not None and self._key_clusters is not None:
            both = ((*self._query_clusters, mask.query), (*self._key_clusters, mask.key))
            terms = [self._accumulate(x, clusters, index.episode != EMPTY) for x, clusters, index in both]
            error, number = (torch.stack(parts).sum() for parts in zip(*terms, strict=True))
            if self.spec.commitment:
                self.penalty_terms.append(error / number.clamp(min=1))
        self._query_clusters = self._key_clusters = None
        return q, k

    def _accumulate(self, x: Tensor, clusters: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
        """Add x (B, H, T, D), normalized to length 1, to the sums of its clusters.

        Args:
            x: queries or keys (B, H, T, D).
            clusters: their clusters (B, H, T).
            filled: tokens, as opposed to empty slots, (B, T) bool.

        Returns:
            The sum of ``(x / |x| - mu)^2``, and the number of its terms.
        """
        heads, count, size = self.centroids.shape
        x = torch.where(filled[:, None, :, None], F.normalize(x, dim=-1), 0.0)
        rows = (clusters + count * torch.arange(heads, device=x.device)[:, None]).flatten()
        self.sums.view(-1, size).index_add_(0, rows, x.detach().flatten(0, 2).to(self.sums.dtype))
        nearest = F.embedding(rows, self.centroids.flatten(0, 1)).view_as(x)
        errors = torch.where(filled[:, None, :, None], x - nearest, 0.0).square()
        return errors.sum(), filled.sum() * heads * size

    @property
    def _learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the centroids towards the tokens that their clusters got since the last update."""
        decay = self.spec.decay
        nonempty = self.sums.norm(dim=-1, keepdim=True) > 0
        moved = decay * self.centroids + (1 - decay) * F.normalize(self.sums, dim=-1)
        self.centroids.copy_(torch.where(nonempty, F.normalize(moved, dim=-1), self.centroids))
        self.sums.zero_()

    def skip_update(self) -> None:
        self.sums.zero_()


def _all_pairs(query: Tensor, key: Tensor) -> Tensor:
    """Return True for each pair of tokens."""
    return (query >= 0) & (key >= 0)


class BalancedRoutingAttention(RoutingAttention):
    """Module of `Routing` with ``window`` in one layer: time and memory grow with n w^2 pairs."""

    def __init__(self, spec: Routing, heads: int, size: int):
        super().__init__(spec, heads, size)
        self.rounds = spec.clusters

    def assign_clusters(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the similarities of queries or keys to the centroids, (B, H, T, n), and their clusters."""
        similarity = self.similarity(F.normalize(x.detach(), dim=-1))
        return similarity.to(x.dtype), similarity.argmax(-1)

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return False: clusters are chosen from whole rows."""
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        query_slots, key_slots, weights = self._by_cluster(q, k, bias, mask)
        outputs = weights @ gather_slots(v, key_slots)
        slots = query_slots.flatten(2)[..., None].expand(-1, -1, -1, v.shape[-1])
        return v.new_zeros(*q.shape[:3], v.shape[-1]).scatter_add(2, slots, outputs.flatten(2, 3))

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        query_slots, key_slots, weights = self._by_cluster(q, k, bias, mask)
        pairs = query_slots[..., :, None] * k.shape[2] + key_slots[..., None, :]
        all_weights = weights.new_zeros(*q.shape[:2], q.shape[2] * k.shape[2])
        return all_weights.scatter_add(2, pairs.flatten(2), weights.flatten(2)).unflatten(2, (q.shape[2], -1))

    def _by_cluster(
        self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the tokens of each cluster and compute their weights.

        Returns:
            The slots of the queries (B, H, n, W) and of the keys (B, H, n, V) of each cluster, and the weight
            of each key in the mean over the query's clusters, (B, H, n, W, V): 0 for masked pairs.
        """
        if mask.query_slice is not None:
            raise ValueError(
                f"{self.spec} requires the outputs of all queries of a pass, got a selection of queries"
            )
        (q, q_similarity), (k, k_similarity) = self.split(q), self.split(k)
        query_slots, query_episodes = self._nearest_tokens(q_similarity, mask.query)
        key_slots, key_episodes = self._nearest_tokens(k_similarity, mask.key)
        allowed = query_episodes[..., :, None] == key_episodes[..., None, :]
        allowed &= (query_episodes != EMPTY)[..., None]
        queries, keys = gather_slots(q * q.shape[-1] ** -0.5, query_slots), gather_slots(k, key_slots)
        scores = queries @ keys.transpose(-1, -2)
        if bias is not None:
            scores = scores + _gather_pairs(bias.expand(*q.shape[:3], k.shape[2]), query_slots, key_slots)
        fully_masked = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~allowed & ~fully_masked, -torch.inf)
        weights = scores.softmax(-1).masked_fill(fully_masked, 0.0)
        cluster_weight = _cluster_weight(query_slots, ~fully_masked[..., 0], q.shape[2], q.dtype)
        return query_slots, key_slots, drop_some(weights * cluster_weight[..., None], self.active_dropout)

    def _nearest_tokens(self, similarity: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Select the w tokens of each episode that are nearest to each centroid, by similarity (B, H, T, n).

        Returns:
            Their slots (B, H, n, W) and their episodes; `EMPTY` for padding.
        """
        assert self.spec.window is not None
        _, heads, length, clusters = similarity.shape
        episode = index.episode[:, None, :, None].expand_as(similarity)
        nearest = similarity.argsort(dim=2, descending=True, stable=True)
        order = episode.gather(2, nearest).argsort(dim=2, stable=True)
        slots = nearest.gather(2, order)
        sorted_episodes = index.episode.sort(dim=1).values
        start = torch.searchsorted(sorted_episodes, sorted_episodes)
        number = torch.arange(length, device=similarity.device) - start
        picked = (number < self.spec.window) & (sorted_episodes != EMPTY)
        size = max(1, int(picked.sum(1).max()))
        first = picked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :size]
        episodes = torch.where(picked, sorted_episodes, EMPTY).gather(1, first)
        slots = slots.gather(2, first[:, None, :, None].expand(-1, heads, -1, clusters))
        return slots.transpose(2, 3), episodes[:, None, None].expand(-1, heads, clusters, -1)


def _gather_pairs(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Gather x (B, H, Tq, Tk) at slots (B, H, n, W) and (B, H, n, V): (B, H, n, W, V)."""
    pairs = queries[..., :, None] * x.shape[-1] + keys[..., None, :]
    return x.flatten(2).gather(2, pairs.flatten(2)).view_as(pairs)


def _cluster_weight(slots: Tensor, has_keys: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """Return 1 / number of clusters in which queries at slots (B, H, n, W) attend to a key."""
    flat = slots.flatten(2)
    counts = torch.zeros(*flat.shape[:2], queries, dtype=dtype, device=flat.device)
    counts = counts.scatter_add(2, flat, has_keys.flatten(2).to(dtype))
    return counts.clamp(min=1).reciprocal().gather(2, flat).view(slots.shape)
