"""T5 relative position bias: one learned number per (head, bucket of distance)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwisePosition, PositionEmbedding
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class T5Bias(PairwisePosition):
    r"""``s_ij += b[h, bucket(i - j)]``. Each small distance has its own bucket; large ones share buckets.

    With n buckets and e = n // 2, distance d falls in bucket d if d < e, else in
    ``e + (n - e) * log(d / e) / log(D_max / e)``, at most n - 1. In a bidirectional transformer keys before
    and after the query get n / 2 buckets each. All layers share b.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1 and the authors' code. T5 omits the scale
    ``1 / sqrt(head size)``; we keep it: to load weights of T5, multiply those of q by ``sqrt(head size)``.

    Args:
        buckets: number of buckets n; even.
        max_distance: distance D_max, in tokens, from which all keys share the last bucket.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if buckets is odd or less than 4, or max_distance <= buckets // 2.
    """

    paper: ClassVar[str] = "Raffel et al. 2020, arXiv:1910.10683"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_buckets("T5Bias", self.buckets, self.max_distance)

    def build_embedding(self, width: int, heads: int) -> "T5BiasTable":
        return T5BiasTable(self, heads)

    def bucket(self, distance: Tensor, causal: bool) -> Tensor:
        """Return the bucket of each distance i - j.

        In a causal transformer later keys, which are masked, get bucket 0.
        """
        if causal:
            return one_sided_buckets(distance.clamp(min=0), self.buckets, self.max_distance)
        return two_sided_buckets(distance, self.buckets, self.max_distance)


def check_buckets(technique: str, buckets: int, max_distance: int) -> None:
    """Raise unless the numbers of buckets and distances are in range.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if buckets is odd or less than 4, or max_distance <= buckets // 2.
    """
    check_int(f"{technique} buckets", buckets, least=4)
    check_int(f"{technique} max_distance", max_distance)
    if buckets % 2:
        raise ValueError(f"{technique} buckets must be even, got {buckets}")
    if max_distance <= buckets // 2:
        raise ValueError(f"{technique} max_distance must exceed {buckets // 2}, got {max_distance}")


def one_sided_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance; distances are at least 0."""
    exact = buckets // 2
    ratio = math.log(max_distance / exact)
    far = (distance.clamp(min=exact).float() / exact).log() / ratio * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)


def two_sided_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance; the upper half is for keys after the query."""
    side = buckets // 2
    return one_sided_buckets(distance.abs(), side, max_distance) + side * (distance < 0)


class T5BiasTable(PositionEmbedding):
    """Learned table b (n, H) of a `T5Bias`, for all layers."""

    def __init__(self, spec: T5Bias, heads: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.buckets, heads))

    def table(self, distances: Tensor, causal: bool) -> Tensor:
        """Return the bias (H, R) of distances (R,)."""
        return self.weight[self.spec.bucket(distances, causal)].T

    def bias(self, mask: AttentionMask) -> Tensor:
        assert mask.relative.shared is not None
        return mask.relative.lookup(mask.relative.shared)
