"""Shared-QK attention: queries and keys share a projection."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention import Attention, Projected
from rlxf.attention.init import orthogonal_linear
from rlxf.attention.kernels.base import Kernel, LinearFn
from rlxf.attention.positions.base import Position


class SharedQKAttention(Attention):
    """Attention whose keys are its queries, scaled to length sqrt(D); ``qkv`` (2 C, C) projects q and v.

    Scores ``q_i . k_j / sqrt(D)`` are therefore ``q_i . q_j / |q_j|``, as in the authors' code.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2, "Shared-QK".
    """

    def __init__(self, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float):
        super().__init__(width, heads, position, kernel, dropout)
        self.qkv = orthogonal_linear(width, width, matrices=2)

    def project(self, x: Tensor, linear: LinearFn = F.linear) -> Projected:
        """Project queries, values and extra query features; `as_key` converts the queries to keys."""
        q, v = self.split(linear(x, self.qkv.weight, self.qkv.bias))
        extras = self.kernel.projected_query_extras(q)
        return (q, v) if extras is None else (q, v, extras)

    def as_key(self, k: Tensor) -> Tensor:
        """Scale queries to length sqrt(D)."""
        return F.rms_norm(k, (self.size,), eps=1e-6)

    def _project_jointly(self, x: Tensor) -> tuple[Tensor, Projected]:
        q, v, *extras = self.project(x)
        return torch.cat([q, *extras], dim=-1), (q, v, *extras)
