"""Attention in which queries and keys share a projection."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention import Attention, Projected
from rlxf.attention.kernels.base import Kernel, Linear
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import Position


class SharedAttention(Attention):
    """A token's key is its query, brought to length sqrt(D); qkv (2 C, C) holds q and v.

    So scores ``q_i . k_j / sqrt(D)`` are ``q_i . q_j / |q_j|``, as in the authors' code.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2, "Shared-QK".
    """

    def __init__(self, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float):
        super().__init__(width, heads, position, kernel, dropout)
        self.qkv = orthogonal_linear(width, width, matrices=2)

    def project(self, x: Tensor, linear: Linear = F.linear) -> Projected:
        """See `Attention`: queries, of which `as_key` makes keys, values, and what is noted of queries."""
        q, v = self.split(linear(x, self.qkv.weight, self.qkv.bias))
        notes = self.kernel.query_notes(q)
        return (q, v) if notes is None else (q, v, notes)

    def as_key(self, k: Tensor) -> Tensor:
        """See `Attention`."""
        return F.rms_norm(k, (self.size,), eps=1e-6)

    def _among_themselves(self, x: Tensor) -> tuple[Tensor, Projected]:
        q, v, *notes = self.project(x)
        return torch.cat([q, *notes], dim=-1), (q, v, *notes)
