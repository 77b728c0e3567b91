"""GRU gate: the stream is the state of a gated recurrent unit, and the sublayer output its input."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.init import stacked_orthogonal
from rlxf.attention.residuals.base import BiasedGate, Gate


@dataclass(frozen=True)
class GRUGate(BiasedGate):
    r"""``g(x, y) = (1 - z) * x + z * h``, a gated recurrent unit.
    ``r = sigmoid(W_r y + U_r x)``, ``z = sigmoid(W_z y + U_z x - b)``, ``h = tanh(W_g y + U_g (r * x))``,
    with elementwise ``*``.

    A large initial b makes the layer start near the identity: with b = 2, z is about 0.12.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2, equations 5 to 8.

    Args:
        bias: initial value of b, one learned number for each feature.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "GRU":
        """Return the module."""
        return GRU(self, width)


class GRU(Gate):
    """Module of `GRUGate`.

    W (3 C, C) holds W_r, W_z and W_g; U (2 C, C) holds U_r and U_z; U_g is (C, C), and b is (C,).
    """

    def __init__(self, spec: GRUGate, width: int):
        super().__init__()
        self.w = stacked_orthogonal(3, width, width)
        self.u = stacked_orthogonal(2, width, width)
        self.u_g = stacked_orthogonal(1, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[-1]
        flat_x, flat_y = x.reshape(-1, width), y.reshape(-1, width)
        w_rz, w_g = F.linear(flat_y, self.w).split([2 * width, width], dim=-1)
        r, z = torch.addmm(w_rz, flat_x, self.u.T).chunk(2, dim=-1)
        h = torch.addmm(w_g, r.sigmoid() * flat_x, self.u_g.T).tanh()
        return torch.lerp(flat_x, h, (z - self.b).sigmoid()).view_as(x)

    def update_gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the update gate z of ``forward(x, y)``, (..., C): the replaced fraction of each feature."""
        width = x.shape[-1]
        return (F.linear(y.relu(), self.w[width : 2 * width], -self.b) + x @ self.u[width:].T).sigmoid()
