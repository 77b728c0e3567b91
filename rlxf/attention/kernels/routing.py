"""Routing attention: tokens see those of their cluster."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.checks import check_finite_number, check_not_negative, check_seed, check_whole
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.base import PairwiseKernel, check_whole_sequence
from rlxf.attention.kernels.buckets import BucketAverage, Meets, shared_rounds
from rlxf.attention.relation import Relation
from rlxf.attention.technique import Choices


@dataclass(frozen=True)
class Routing(PairwiseKernel):
    r"""Softmax among the keys whose cluster is the query's.

    Each head has n centroids mu of length 1. A query or key x, before positions change it, belongs to the
    cluster ``c(x) = argmax_c mu_c . x / |x|``. Then

    ``o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j`` over j in ``S_i = {j: c(k_j) = c(q_i), j <= i}``

    in a causal transformer; in another, j may be any. A query whose cluster holds no key that it may see
    gets 0.

    Centroids are a running k-means. Passes that are learned from note the sum of ``x / |x|`` over all
    queries and keys of each cluster. The update that follows moves the centroids: ``decay mu + (1 - decay)
    sum / |sum|``, brought back to length 1. A cluster that got nothing stays. Between updates all passes
    see the same centroids, so acting equals learning. The loss gets ``commitment mean (x / |x| -
    mu_c(x))^2`` for each layer, as often as it is passed, as in public code.

    That S_i is the paper's formula. What it computes are clusters of even size: each takes the w queries and
    the w keys that are nearest to it. Then later tokens decide whom an earlier one sees; so it is for
    ``causal=False`` and had with ``window``. A query in several clusters gets the mean of what it finds in
    them, one in none gets 0.

    Tokens are sorted by their clusters where pairs are many, the pattern is `Full`, positions add nothing to
    scores and nothing is dropped out; otherwise all pairs are weighed.

    Source: Roy et al. 2021, arXiv:2003.05997, section 4.1.

    Args:
        clusters: n; the paper takes about sqrt(L) for L tokens.
        window: w, queries and keys of each cluster; None for clusters as they are.
        decay: of the centroids; 0.999 as in the paper.
        commitment: weight of the distance to the centroids in the loss; 1e-4 as in public code, the paper has
            none.
        seed: of the first centroids, which are random directions: the same in all layers, others in each
            head.

    Raises:
        TypeError: if clusters, window or seed is no whole number.
        ValueError: if clusters or window is less than 1, decay is not in [0, 1), commitment is negative or
            not finite, or seed is less than 0.
    """

    paper: ClassVar[str] = "Roy et al. 2021, arXiv:2003.05997"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L^2 / clusters pairs"
    clusters: int = 8
    window: int | None = None
    decay: float = 0.999
    commitment: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("Routing clusters", self.clusters)
        check_seed("Routing seed", self.seed)
        if self.window is not None:
            check_whole("Routing window", self.window)
        check_finite_number("Routing decay", self.decay)
        check_not_negative("Routing commitment", self.commitment)
        if not 0 <= self.decay < 1:
            raise ValueError(f"Routing decay must be in [0, 1), got {self.decay}")

    def check(self, choices: Choices) -> None:
        """See `Kernel`: even clusters look at the whole sequence."""
        if self.window is not None:
            check_whole_sequence(self, "window", choices)

    @property
    def prices_tokens(self) -> bool:
        """See `Kernel`."""
        return self.commitment > 0

    def build(self, width: int, heads: int) -> "RoutingAverage":
        """See `Kernel`."""
        kind = RoutingAverage if self.window is None else BalancedRouting
        return kind(self, heads, width // heads)


class RoutingAverage(BucketAverage):
    """A `Routing` in one layer; ``centroids`` (H, n, D) have length 1."""

    def __init__(self, spec: Routing, heads: int, size: int):
        super().__init__(rounds=1)
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)
        drawn = torch.randn(heads, spec.clusters, size, generator=generator)
        self.register_buffer("centroids", F.normalize(drawn, dim=-1))
        self.register_buffer("sums", torch.zeros_like(drawn), persistent=False)
        self.centroids: Tensor
        self.sums: Tensor
        self._asked: tuple[Tensor, Tensor] | None = None
        self._heard: tuple[Tensor, Tensor] | None = None
        self._distances: list[Tensor] = []

    def query_notes(self, q: Tensor) -> Tensor:
        """The cluster of each query (B, H, T, D): (B, H, T, 1)."""
        notes, clusters = self.read(q)
        self._asked = (q, clusters) if self._learning else None
        return notes

    def key_notes(self, k: Tensor) -> Tensor:
        """The cluster of each key, as `query_notes`."""
        notes, clusters = self.read(k)
        self._heard = (k, clusters) if self._learning else None
        return notes

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is noted of queries or keys (B, H, T, D), and their clusters (B, H, T) int64."""
        clusters = self.clusters(x)
        return clusters[..., None].to(x.dtype), clusters

    @torch.no_grad()
    def clusters(self, x: Tensor) -> Tensor:
        """c(x) of x (B, H, T, D), whatever its length: (B, H, T) int64."""
        return self.similarity(x).argmax(-1)

    def similarity(self, x: Tensor) -> Tensor:
        """``mu_c . x`` of x (B, H, T, D): (B, H, T, n)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.centroids.to(wide).transpose(1, 2)

    def counts(self, of_queries: Tensor, of_keys: Tensor, relation: Relation) -> Tensor:
        """See `BucketAverage`."""
        return shared_rounds(of_queries, of_keys) * relation.allowed_by_head

    def meets(self, relation: Relation) -> Meets:
        """All, or those that are not ahead."""
        return torch.ge if relation.causal else _all_meet

    def meet(self, q: Tensor, k: Tensor, relation: Relation) -> tuple[Tensor, Tensor]:
        """Note what clusters get in a pass that is to be learned from."""
        if self._asked is not None and self._heard is not None:
            both = ((*self._asked, relation.query), (*self._heard, relation.key))
            found = [self._note(x, clusters, index.episode != EMPTY) for x, clusters, index in both]
            error, number = (torch.stack(parts).sum() for parts in zip(*found, strict=True))
            if self.spec.prices_tokens:
                self._distances.append(error / number.clamp(min=1))
        self._asked = self._heard = None
        return q, k

    def _note(self, x: Tensor, clusters: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
        """Add x (B, H, T, D), brought to length 1, to the sums of its clusters (B, H, T) where ``filled``
        (B, T).

        Returns:
            The sum of ``(x / |x| - mu)^2``, and how many numbers that is over.
        """
        heads, many, size = self.centroids.shape
        x = torch.where(filled[:, None, :, None], F.normalize(x, dim=-1), 0.0)
        rows = (clusters + many * torch.arange(heads, device=x.device)[:, None]).flatten()
        self.sums.view(-1, size).index_add_(0, rows, x.detach().flatten(0, 2).to(self.sums.dtype))
        nearest = F.embedding(rows, self.centroids.flatten(0, 1)).view_as(x)
        errors = torch.where(filled[:, None, :, None], x - nearest, 0.0).square()
        return errors.sum(), filled.sum() * heads * size

    @property
    def _learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def begin_pass(self) -> None:
        """See `LayerKernel`."""
        self._distances = []

    def penalty(self) -> Tensor | None:
        """See `LayerKernel`. Asked again without a new pass, there is none."""
        distances, self._distances = self._distances, []
        return self.spec.commitment * torch.stack(distances).sum() if distances else None

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the centroids to what their clusters got since the last update."""
        decay, got = self.spec.decay, self.sums.norm(dim=-1, keepdim=True) > 0
        moved = decay * self.centroids + (1 - decay) * F.normalize(self.sums, dim=-1)
        self.centroids.copy_(torch.where(got, F.normalize(moved, dim=-1), self.centroids))
        self.sums.zero_()

    def skip_update(self) -> None:
        """See `LayerKernel`."""
        self.sums.zero_()


def _all_meet(query: Tensor, key: Tensor) -> Tensor:
    """True for each pair of tokens."""
    return (query >= 0) & (key >= 0)


class BalancedRouting(RoutingAverage):
    """A `Routing` with a ``window`` in one layer: time and memory grow with its clusters, n w^2 pairs."""

    def __init__(self, spec: Routing, heads: int, size: int):
        super().__init__(spec, heads, size)
        self.rounds = spec.clusters

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How near queries or keys (B, H, T, D) are to each centroid, (B, H, T, n), and to which most."""
        near = self.similarity(F.normalize(x.detach(), dim=-1))
        return near.to(x.dtype), near.argmax(-1)

    def shares(self, relation: Relation) -> None:
        """None: clusters pick from whole rows."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`."""
        asking, heard, weights = self._by_cluster(q, k, bias, relation, dropout)
        found = weights @ _at(v, heard)
        slots = asking.flatten(2)[..., None].expand(-1, -1, -1, v.shape[-1])
        return v.new_zeros(*q.shape[:3], v.shape[-1]).scatter_add(2, slots, found.flatten(2, 3))

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerPairwise`."""
        asking, heard, weights = self._by_cluster(q, k, bias, relation, dropout)
        pairs = asking[..., :, None] * k.shape[2] + heard[..., None, :]
        every = weights.new_zeros(*q.shape[:2], q.shape[2] * k.shape[2])
        return every.scatter_add(2, pairs.flatten(2), weights.flatten(2)).unflatten(2, (q.shape[2], -1))

    def _by_cluster(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What each cluster picked and does.

        Returns:
            The slots of its queries (B, H, n, W) and of its keys (B, H, n, V), and what a query takes of each
            key in the mean over its clusters, (B, H, n, W, V): 0 where it does not look.
        """
        if relation.asking is not None:
            raise ValueError(f"{self.spec} picks among all queries of a pass, and only some are asked for")
        (q, near), (k, close) = self.split(q), self.split(k)
        asking, of_queries = self._picked(near, relation.query)
        heard, of_keys = self._picked(close, relation.key)
        meet = of_queries[..., :, None] == of_keys[..., None, :]
        meet &= (of_queries != EMPTY)[..., None]
        scores = _at(q * q.shape[-1] ** -0.5, asking) @ _at(k, heard).transpose(-1, -2)
        if bias is not None:
            scores = scores + _pairs_at(bias.expand(*q.shape[:3], k.shape[2]), asking, heard)
        blind = ~meet.any(-1, keepdim=True)
        weights = scores.masked_fill(~meet & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)
        share = _share(asking, ~blind[..., 0], q.shape[2], q.dtype)
        return asking, heard, drop_some(weights * share[..., None], dropout)

    def _picked(self, near: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """The w tokens of each episode that are nearest to each centroid, ``near`` (B, H, T, n).

        Returns:
            Their slots (B, H, n, W) and their episodes; `EMPTY` for padding.
        """
        window, episode = self.spec.window, index.episode[:, None, :, None].expand_as(near)
        assert window is not None
        nearest = near.argsort(dim=2, descending=True, stable=True)
        order = episode.gather(2, nearest).argsort(dim=2, stable=True)
        slots = nearest.gather(2, order)
        sorted_episodes = index.episode.sort(dim=1).values
        start = torch.searchsorted(sorted_episodes, sorted_episodes)
        number = torch.arange(near.shape[2], device=near.device) - start
        picked = (number < window) & (sorted_episodes != EMPTY)
        most = max(1, int(picked.sum(1).max()))
        first = picked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        episodes = torch.where(picked, sorted_episodes, EMPTY).gather(1, first)
        slots = slots.gather(2, first[:, None, :, None].expand(-1, near.shape[1], -1, near.shape[3]))
        return slots.transpose(2, 3), episodes[:, None, None].expand(-1, near.shape[1], near.shape[3], -1)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, H, T, D) at slots (B, H, n, W): (B, H, n, W, D)."""
    chosen = slots.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, chosen).unflatten(2, slots.shape[2:])


def _pairs_at(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """x (B, H, Tq, Tk) at slots (B, H, n, W) and (B, H, n, V): (B, H, n, W, V)."""
    pairs = queries[..., :, None] * x.shape[-1] + keys[..., None, :]
    return x.flatten(2).gather(2, pairs.flatten(2)).view_as(pairs)


def _share(slots: Tensor, seeing: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """One over the number of clusters that a query sees something in, for queries at slots (B, H, n, W)."""
    flat = slots.flatten(2)
    times = torch.zeros(*flat.shape[:2], queries, dtype=dtype, device=flat.device)
    times = times.scatter_add(2, flat, seeing.flatten(2).to(dtype))
    return times.clamp(min=1).reciprocal().gather(2, flat).view(slots.shape)
