"""Attention in which queries and keys share a projection."""

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
        """See `Attention`. Queries stand for keys: `as_key` makes them so."""
        own = self.split(linear(x, self.qkv.weight, self.qkv.bias))
        return *own, *self._key_marks(x, linear)

    def as_key(self, k: Tensor) -> Tensor:
        """See `Attention`."""
        return F.rms_norm(k, (self.size,), eps=1e-6)

    def _among_themselves(self, x: Tensor) -> tuple[Tensor, Projected]:
        own = self.project(x)
        return self._marked(own[0], x), own
