"""FIRE: a bias that is a learned function of the distance, relative to the position of the query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition
from rlxf.utils.checks import check_int, check_positive

EPSILON = 1e-6
"""Number that the authors' code adds to the denominator."""


@dataclass(frozen=True)
class FIRE(PairwisePosition):
    r"""``s_ij += f_h(psi(i - j) / psi(max(i, L)))``, with ``psi(x) = log(c x + 1)``.

    f is a network with one hidden layer of ReLUs and one output for each head. Its input lies in [0, 1] at
    every length, so that distances keep their meaning in longer episodes. Each layer learns f, c and the
    threshold L, below which the length has no effect. i counts from the start of the episode, with the tokens
    in memory. The bidirectional form is rlxf's variant: ``psi(|i - j|) / psi(max(i, j, L))``.

    The hidden features of all pairs are computed, so the bias costs ``hidden`` numbers per pair.

    Source: Li et al. 2024, arXiv:2310.04418, section 3.

    Args:
        hidden: hidden features of f.
        threshold: initial L, in tokens.

    Raises:
        TypeError: if hidden is not an integer, or threshold is not a number.
        ValueError: if hidden is less than 1, or threshold is not above 0.
    """

    paper: ClassVar[str] = "Li et al. 2024, arXiv:2310.04418"
    cost: ClassVar[str] = "visible pairs times hidden"
    hidden: int = 32
    threshold: float = 512.0

    def __post_init__(self) -> None:
        check_int("FIRE hidden", self.hidden)
        check_positive("FIRE threshold", self.threshold)

    def build(self, width: int, heads: int) -> "FIREBias":
        return FIREBias(self, heads)


class FIREBias(PairwiseLayerPosition):
    """Module of `FIRE` in one layer: f, c, and ``scale``, the ratio of L and its initial value.

    As in the authors' code, c starts at 0.1 and scale at 1, and both may become negative: their absolute
    values are used.
    """

    def __init__(self, spec: FIRE, heads: int):
        super().__init__()
        self.spec = spec
        self.inner = nn.Linear(1, spec.hidden)
        self.outer = nn.Linear(spec.hidden, heads)
        self.c = nn.Parameter(torch.tensor(0.1))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def pass_table(self, mask: AttentionMask) -> None:
        """Return None: the bias does not depend on the distance alone."""

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the bias (B, H, Tq, Tk)."""
        position = torch.maximum(mask.query.position[:, :, None], mask.key.position[:, None])
        length = torch.maximum(position.to(q.dtype), (self.spec.threshold * self.scale).abs())
        ratio = self.psi(mask.distance.abs()) / (self.psi(length) + EPSILON)
        bias: Tensor = self.outer(self.inner(ratio[..., None]).relu())
        return bias.permute(0, 3, 1, 2)

    def psi(self, x: Tensor) -> Tensor:
        """Return ``log(|c| x + 1)`` for x >= 0."""
        return (self.c.abs() * x).log1p()
