"""Residual connections of the Gated Transformer-XL: gates, and TrXL-I without gates."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import TokenFunction, cast, mixed_linear, stacked_orthogonal
from rlxf.attention.residuals.base import Gate, Residual
from rlxf.utils.checks import check_finite_number


@dataclass(frozen=True)
class AddReLU(Residual):
    """``x + ReLU(y)``: the residual connection of TrXL-I, the Gated Transformer-XL without gates.

    With ``norm="pre"`` the stream is an identity map from the input to the output, to which each sublayer
    adds the output of its ReLU.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.1.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "ReLUSum":
        """Return the module; it has no parameters."""
        return ReLUSum()


class ReLUSum(Gate):
    """Module of `AddReLU`: x + ReLU(y)."""

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y; `forward` has already applied the ReLU to y."""
        return x + y


@dataclass(frozen=True)
class BiasedGate(Residual):
    """Base of the gates with a bias b.

    Args:
        bias: initial value of b, one learned number for each feature.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"
    bias: float = 2.0

    def __post_init__(self) -> None:
        check_finite_number("bias", self.bias)

    def initial_bias(self, width: int) -> nn.Parameter:
        """Return b (C,) before training."""
        return nn.Parameter(torch.full((width,), float(self.bias)))


class BiasedLinearGate(Gate):
    """Gate with stacked matrices ``w`` (n C, C) and the bias ``b`` (C,) of a `BiasedGate`."""

    def __init__(self, spec: BiasedGate, width: int, matrices: int = 1):
        super().__init__()
        self.w = stacked_orthogonal(matrices, width, width)
        self.b = spec.initial_bias(width)


@dataclass(frozen=True)
class GRUGate(BiasedGate):
    r"""``g(x, y) = (1 - z) * x + z * h``, a gated recurrent unit.
    ``r = sigmoid(W_r y + U_r x)``, ``z = sigmoid(W_z y + U_z x - b)``, ``h = tanh(W_g y + U_g (r * x))``,
    with elementwise ``*``. y is the output of the sublayer after a ReLU.

    A large initial b makes the layer start near the identity: with b = 2, z is about 0.12.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2, equations 5 to 8.

    Args:
        bias: initial value of b, one learned number for each feature.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    def build(self, width: int, heads: int) -> "GRUGateModule":
        """Return the module."""
        return GRUGateModule(self, width)


class GRUGateModule(Gate):
    """Module of `GRUGate`.

    W (3 C, C) holds W_r, W_z and W_g; U (2 C, C) holds U_r and U_z; U_g is (C, C), and b is (C,).
    """

    def __init__(self, spec: GRUGate, width: int):
        super().__init__()
        self.w = stacked_orthogonal(3, width, width)
        self.u = stacked_orthogonal(2, width, width)
        self.u_g = stacked_orthogonal(1, width, width)
        self.b = spec.initial_bias(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[-1]
        flat_x, flat_y = x.reshape(-1, width), y.reshape(-1, width)
        w_rz, w_g = F.linear(cast(flat_y), cast(self.w)).split([2 * width, width], dim=-1)
        r, z = torch.addmm(w_rz, cast(flat_x), cast(self.u).T).to(x.dtype).chunk(2, dim=-1)
        h = torch.addmm(w_g, cast(r.sigmoid() * flat_x), cast(self.u_g).T).to(x.dtype).tanh()
        return torch.lerp(flat_x, h, (z - self.b).sigmoid().to(x.dtype)).view_as(x)

    def bind(self) -> TokenFunction:
        """Return the gate as a `bound` function."""
        w = self.w
        u = self.u
        u_g = self.u_g
        b = self.b
        sizes = [2 * len(b), len(b)]

        def gate(x: Tensor, y: Tensor) -> Tensor:
            w_rz, w_g = torch.split_with_sizes(F.linear(y.relu(), w), sizes, dim=-1)
            r, z = torch.addmm(w_rz, x, u.T).chunk(2, dim=-1)
            h = torch.addmm(w_g, r.sigmoid() * x, u_g.T).tanh()
            return torch.lerp(x, h, (z - b).sigmoid())

        return gate

    def update_gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the update gate z of ``forward(x, y)``, (..., C): the replaced fraction of each feature."""
        width = x.shape[-1]
        return (F.linear(y.relu(), self.w[width : 2 * width], -self.b) + x @ self.u[width:].T).sigmoid()


@dataclass(frozen=True)
class InputGate(Residual):
    """``g(x, y) = sigmoid(W_g x) * x + y``.

    y is the output of the sublayer after a ReLU. As in the paper, the gate has no bias, since no bias would
    make it the identity.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "InputGateModule":
        """Return the module."""
        return InputGateModule(width)


class InputGateModule(Gate):
    """Module of `InputGate`: W_g (C, C)."""

    def __init__(self, width: int):
        super().__init__()
        self.w = stacked_orthogonal(1, width, width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return mixed_linear(x, self.w).sigmoid() * x + y


@dataclass(frozen=True)
class OutputGate(BiasedGate):
    """``g(x, y) = x + sigmoid(W_g x - b) * y``.

    y is the output of the sublayer after a ReLU.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: initial value of b, one learned number for each feature; with a large value the gate starts near
            the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    def build(self, width: int, heads: int) -> "OutputGateModule":
        """Return the module."""
        return OutputGateModule(self, width)


class OutputGateModule(BiasedLinearGate):
    """Module of `OutputGate`: W_g (C, C) and b (C,)."""

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return x + mixed_linear(x, self.w, -self.b).sigmoid() * y


@dataclass(frozen=True)
class HighwayGate(BiasedGate):
    """``g(x, y) = s * x + (1 - s) * y`` with ``s = sigmoid(W_g x + b)``.

    y is the output of the sublayer after a ReLU.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2, after Srivastava et al. 2015.

    Args:
        bias: initial value of b, one learned number for each feature; with a large value the gate starts near
            the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    def build(self, width: int, heads: int) -> "HighwayGateModule":
        """Return the module."""
        return HighwayGateModule(self, width)


class HighwayGateModule(BiasedLinearGate):
    """Module of `HighwayGate`: W_g (C, C) and b (C,)."""

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        gate = mixed_linear(x, self.w, self.b).sigmoid()
        return torch.lerp(y.to(x.dtype), x, gate.to(x.dtype))  # autocast may give them other dtypes

    def update_gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return 1 - s of ``forward(x, y)``, (..., C): the replaced fraction of each feature."""
        return F.linear(x, -self.w, -self.b).sigmoid()


@dataclass(frozen=True)
class SigTanhGate(BiasedGate):
    """``g(x, y) = x + sigmoid(W_g y - b) * tanh(U_g y)``.

    y is the output of the sublayer after a ReLU.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: initial value of b, one learned number for each feature; with a large value the gate starts near
            the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    def build(self, width: int, heads: int) -> "SigTanhGateModule":
        """Return the module."""
        return SigTanhGateModule(self, width, matrices=2)


class SigTanhGateModule(BiasedLinearGate):
    """Module of `SigTanhGate`: W (2 C, C) holds W_g and U_g; b (C,)."""

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        scale, update = mixed_linear(y, self.w).chunk(2, dim=-1)
        return x + (scale - self.b).sigmoid() * update.tanh()
