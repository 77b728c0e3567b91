"""Rotary positions: queries and keys turn with their position."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.positions.base import LayerPosition, Position
from rlxf.attention.positions.sinusoidal import check_base, frequencies


@dataclass(frozen=True)
class RoPE(Position):
    r"""Turn each pair ``(q[2m], q[2m+1])`` by the angle ``t * base^(-2m/D)``; keys alike.

    ``q_i . k_j`` then depends on i - j alone. Pairs are neighbours, as in the paper; Llama pairs
    m with m + D/2, which is the same after a permutation of the features of q and k.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.

    Raises:
        ValueError: if base is not above 1 or not finite, or the width of a head is odd.
    """

    paper: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864"
    base: float = 10000.0

    def __post_init__(self) -> None:
        check_base("RoPE", self.base)

    def build(self, width: int, heads: int) -> "RoPERotation":
        if (width // heads) % 2:
            raise ValueError(f"RoPE needs an even width per head, got {width} / {heads} = {width // heads}")
        return RoPERotation(self)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """x (B, H, T, D), position (B, T) -> (B, H, T, D)."""
        angle = position[:, None, :, None] * frequencies(x.shape[-1], self.base, x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class RoPERotation(LayerPosition):
    """Turns the queries and keys of one layer as a `RoPE` says."""

    def __init__(self, spec: RoPE):
        super().__init__()
        self.spec = spec

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(q, position)

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(k, position)
