"""Adaptive computation time: each token decides when it has been thought about enough."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number, check_not_negative
from rlxf.attention.depth.base import Judge, Passes, Processor, Taken
from rlxf.attention.depth.universal import Universal


@dataclass(frozen=True)
class ACT(Universal):
    r"""A `Universal` transformer whose tokens halt, each after passes of its own number.

    ``p_n = sigma(w . s_n + b)`` with s_n, what a token enters pass n with. It halts at

        ``N = min{n : p_1 + ... + p_n >= 1 - epsilon}``, or at the last pass,

    with the remainder ``R = 1 - (p_1 + ... + p_(N-1))``. Its output is ``sum_n w_n h_n`` over n = 1 ... N,
    with h_n what pass n gave, ``w_n = p_n`` and ``w_N = R``: the weights add up to 1. The state of a token
    that has halted is copied to later passes, where others still see it. The loss gets
    ``ponder_cost mean(N + R)`` over all tokens, whether their outputs are asked for or not. Acting, passes
    end when those have halted whose outputs are.

    The Universal Transformer's published code differs: it lets halted states change, and averages otherwise.

    Source: Graves 2016, arXiv:1603.08983, section 2.1; Dehghani et al. 2019, arXiv:1807.03819, section 2.2.

    Args:
        ponder_cost: tau, what one more pass of a token costs.
        epsilon: how near to 1 the sum of p has to come; 0.01 as in the paper. It lets a token halt after one
            pass.
        bias: b at the start. At 1, as in the published code, p is near 0.7 and tokens halt after two passes.

    Raises:
        TypeError: if one is no number.
        ValueError: if ponder_cost is negative, epsilon not between 0 and 1, or one is not finite.
    """

    paper: ClassVar[str] = "Graves 2016, arXiv:1603.08983"
    cost: ClassVar[str] = "L, for fewer passes"
    ponder_cost: float = 0.01
    epsilon: float = 0.01
    bias: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative("ponder_cost", self.ponder_cost)
        for name in ("epsilon", "bias"):
            check_finite_number(name, getattr(self, name))
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must lie between 0 and 1, got {self.epsilon}")

    def build(self, width: int, passes: int) -> "Pondering":
        """See `Depth`."""
        return Pondering(self, width)


class Pondering(Processor):
    """The passes of an `ACT`; ``w`` (C) and ``b`` decide who halts."""

    def __init__(self, spec: ACT, width: int):
        super().__init__()
        self.spec = spec
        self.w = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.b = nn.Parameter(torch.tensor(float(spec.bias)))
        self._ponder: Tensor | None = None
        self._count: tuple[Tensor, Tensor] | None = None
        self._taken = Taken()

    def forward(self, x: Tensor, passes: Passes) -> Tensor:
        """See `Processor`."""
        halting = Halting(passes.filled, self.spec.epsilon, x.dtype)
        y = self._go(x, passes, halting, lambda running: running)
        self._note(halting, passes.filled)
        return y

    @torch.no_grad()
    def early(self, x: Tensor, passes: Passes, judge: Judge | None) -> Tensor:
        """See `Processor`: tokens go on as long as one of those that ask; their passes are counted."""
        halting = Halting(passes.filled, self.spec.epsilon, x.dtype)
        y = self._go(x, passes, halting, passes.asking)
        self._taken.add(passes.asking(halting.count).sum(), passes.asking(passes.filled).sum())
        return y

    def _go(
        self, x: Tensor, passes: Passes, halting: "Halting", waited: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Outputs of those that ask; ``waited`` picks the tokens that passes are taken for."""
        y = torch.zeros_like(passes.asking(x))
        for number in range(passes.count):
            entered = passes.enter(number, x)
            if not waited(halting.running).any():
                passes.leave_out(number, entered)
                continue
            running, last = halting.running, number == passes.count - 1
            weight = halting.weigh((passes.read(entered) @ self.w + self.b).sigmoid(), last)
            after = passes.run(number, entered)
            y = y + passes.asking(weight)[..., None] * (after if last else passes.asking(after))
            x = x if last else torch.where(running[..., None], after, x)
        return y

    def penalty(self) -> Tensor | None:
        """See `Processor`: ``ponder_cost mean(N + R)``."""
        ponder, self._ponder = self._ponder, None
        return None if ponder is None else self.spec.ponder_cost * ponder

    def mean_depth(self) -> Tensor | None:
        """See `Processor`: mean N."""
        if self._count is None:
            return None
        passes, tokens = self._count
        return passes / tokens.clamp(min=1)

    def acting_depth(self) -> Tensor | None:
        """See `Processor`."""
        return self._taken.mean()

    def _note(self, halting: "Halting", filled: Tensor) -> None:
        tokens = filled.sum()
        self._count = halting.count.sum(), tokens
        if torch.is_grad_enabled():
            self._ponder = (halting.count + halting.remainder).sum() / tokens.clamp(min=1)


class Halting:
    """Which tokens go on, and with what weight each of their passes counts.

    Args:
        filled: (B, T) bool, the tokens that there are; no others go on.
        epsilon: that of an `ACT`.
        dtype: of p.
    """

    def __init__(self, filled: Tensor, epsilon: float, dtype: torch.dtype):
        self.running = filled
        self.epsilon = epsilon
        self.total = torch.zeros(filled.shape, dtype=dtype, device=filled.device)
        self.count = self.total.to(torch.promote_types(dtype, torch.float32))  # bfloat16 counts to 256
        self.remainder = torch.zeros_like(self.total)

    def weigh(self, p: Tensor, last: bool) -> Tensor:
        """Weights (B, T) of the next pass, in which tokens halt with p (B, T); all of them in the last."""
        left = 1 - self.total
        ends = self.running & ((self.total + p >= 1 - self.epsilon) | last)
        weight = torch.where(ends, left, p) * self.running
        self.remainder = torch.where(ends, left, self.remainder)
        self.total, self.count = self.total + weight, self.count + self.running
        self.running = self.running & ~ends
        return weight
