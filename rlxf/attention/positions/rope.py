"""Rotary positions: queries and keys are rotated by angles proportional to their position."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlxf.attention.positions.base import LayerPosition, Position, check_base, frequencies
from rlxf.attention.technique import SpecView, check_choice, check_finite_number

Scaling = Literal["linear", "ntk"]


@dataclass(frozen=True)
class RoPE(Position):
    r"""Rotate each pair ``(q[2m], q[2m+1])`` by the angle ``t * base^(-2m/D)``; keys alike.

    ``q_i . k_j`` then depends only on i - j. Pairs are adjacent features, as in the paper; Llama pairs m with
    m + D/2, which is equivalent up to a permutation of the features of q and k.

    For sequences f times as long as in training, positions can be scaled. "linear" rotates by ``t / f``.
    "ntk" uses ``base * f^(D / (D - 2))``, which leaves the fastest pair unchanged and slows the slowest pair
    by f. The dynamic form computes f from the current length L, ``f = a L / L_0 - (a - 1)``. It is not
    supported: cached keys were rotated with another base, and each query of a segment would need different
    keys. Use the f of the largest L.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; linear: Chen et al. 2023, arXiv:2306.15595,
    section 2.3; ntk: Peng et al. 2023, arXiv:2309.00071, section 3.1.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.
        scaling: quantity that ``factor`` scales: "linear", the positions; "ntk", the base.
        factor: f, at least 1; 1 for no scaling.

    Raises:
        TypeError: if factor is not a number.
        ValueError: if base is not above 1 or not finite, if factor is less than 1; in a spec, if the width of
            a head is odd, or 2 with "ntk".
    """

    paper: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864"
    base: float = 10000.0
    scaling: Scaling = "linear"
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_base("RoPE", self.base)
        check_finite_number("RoPE factor", self.factor)
        if self.factor < 1:
            raise ValueError(f"RoPE factor must be at least 1, got {self.factor}")
        check_choice("RoPE scaling", self.scaling, get_args(Scaling))

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the features of a head form enough pairs."""
        size = choices.width // choices.heads
        if size % 2:
            raise ValueError(
                f"RoPE needs an even width per head, got {choices.width} / {choices.heads} = {size}"
            )
        if size == 2 and self.scaling == "ntk":
            raise ValueError(
                f"{self} needs more than 2 features per head; decrease heads or use scaling='linear'"
            )

    def build(self, width: int, heads: int) -> "RoPERotation":
        return RoPERotation(self)

    def frequencies(self, size: int, device: torch.device | None = None) -> Tensor:
        """Return the angle between adjacent positions for each pair, (size / 2,) float64."""
        if self.scaling == "linear":
            return frequencies(size, self.base, device) / self.factor
        return frequencies(size, self.base * self.factor ** (size / (size - 2)), device)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x (B, H, T, D) according to position (B, T)."""
        angle = position[:, None, :, None] * self.frequencies(x.shape[-1], x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class RoPERotation(LayerPosition):
    """Module of `RoPE` in one layer: rotates queries and keys."""

    def __init__(self, spec: RoPE):
        super().__init__()
        self.spec = spec

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(q, position)

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(k, position)
