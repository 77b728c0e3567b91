"""Adaptive computation time: the number of passes is learned for each token."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.depth.base import ConfidenceFn, DepthController, DepthCounter, unequal_passes_error
from rlxf.attention.depth.constant import Universal
from rlxf.attention.technique import LayerPasses, PendingTerms
from rlxf.attention.token_index import may_contain_true
from rlxf.utils.checks import check_between, check_finite_number, check_not_negative


@dataclass(frozen=True)
class ACT(Universal):
    r"""`Universal` transformer with adaptive computation time: each token learns its number of passes.

    ``p_n = sigma(w . s_n + b)`` with s_n the input of the token in pass n. It halts at

        ``N = min{n : p_1 + ... + p_n >= 1 - epsilon}``, or at the last pass,

    with the remainder ``R = 1 - (p_1 + ... + p_(N-1))``. Its output is ``sum_n w_n h_n`` over n = 1 ... N,
    with h_n the output of pass n, ``w_n = p_n`` and ``w_N = R``: the weights sum to 1. The state of a halted
    token is copied to later passes, where other tokens still attend to it. The loss gets
    ``ponder_cost mean(N + R)`` over all tokens, whether or not their outputs are requested. While acting,
    passes end when the tokens whose outputs are requested have halted.

    The Universal Transformer's published code differs: halted states change, and outputs are averaged
    differently.

    Source: Graves 2016, arXiv:1603.08983, section 2.1; Dehghani et al. 2019, arXiv:1807.03819, section 2.2.

    Args:
        ponder_cost: tau, cost of each additional pass of a token.
        epsilon: tolerance of the halting sum; 0.01 as in the paper. It allows a token to halt after one pass.
        bias: initial b. With 1, as in the published code, p is near 0.7 and tokens halt after two passes.

    Raises:
        TypeError: if an option is not a number.
        ValueError: if ponder_cost is negative, epsilon is not between 0 and 1, or an option is not finite.
    """

    paper: ClassVar[str] = "Graves 2016, arXiv:1603.08983"
    cost: ClassVar[str] = "L, with fewer passes"
    ponder_cost: float = 0.01
    epsilon: float = 0.01
    bias: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative("ponder_cost", self.ponder_cost)
        check_between("epsilon", self.epsilon, 0, 1, inclusive="neither")
        check_finite_number("bias", self.bias)

    def check_equal_passes(self, use: object) -> None:
        raise unequal_passes_error(self, use)

    def build(self, width: int, passes: int) -> "ACTController":
        return ACTController(self, width)


class ACTController(DepthController):
    """Controller of the passes of `ACT`; ``w`` (C) and ``b`` compute the halting probability."""

    def __init__(self, spec: ACT, width: int):
        super().__init__()
        self.spec = spec
        self.w = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.b = nn.Parameter(torch.tensor(float(spec.bias)))
        self._ponder: list[Tensor] = PendingTerms()
        self._mean_depth: Tensor | None = None
        self._taken = DepthCounter()

    def forward(self, x: Tensor, passes: LayerPasses) -> Tensor:
        halting = HaltingState(passes.filled, self.spec.epsilon, x.dtype)
        y = self._run_passes(x, passes, halting, lambda running: running)
        self._record(halting, passes.filled)
        return y

    @torch.no_grad()
    def early_exit(self, x: Tensor, passes: LayerPasses, confidence_fn: ConfidenceFn | None) -> Tensor:
        """Run passes until the tokens whose outputs are requested have halted, and count their passes."""
        halting = HaltingState(passes.filled, self.spec.epsilon, x.dtype)
        y = self._run_passes(x, passes, halting, passes.select_outputs)
        self._taken.add(
            passes.select_outputs(halting.count).sum(), passes.select_outputs(passes.filled).sum()
        )
        return y

    def _run_passes(
        self, x: Tensor, passes: LayerPasses, halting: "HaltingState", select: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run passes as long as a token of those that ``select`` returns is running; return the outputs."""
        y = torch.zeros_like(passes.select_outputs(x))
        for number in range(passes.count):
            inputs = passes.start_pass(number, x)
            if not may_contain_true(select(halting.running)):
                passes.skip(number, inputs)
                continue
            running = halting.running
            last = number == passes.count - 1
            weight = halting.step((passes.attention_input(inputs) @ self.w + self.b).sigmoid(), last)
            after = passes.run(number, inputs)
            y = y + passes.select_outputs(weight)[..., None] * (
                after if last else passes.select_outputs(after)
            )
            x = x if last else torch.where(running[..., None], after, x)
        return y

    def penalty(self) -> Tensor | None:
        """Return ``ponder_cost mean(N + R)`` of the last forward pass with gradient."""
        ponder, self._ponder = self._ponder, PendingTerms()
        return self.spec.ponder_cost * ponder[0] if ponder else None

    def mean_depth(self) -> Tensor | None:
        """Return the mean N of the last `forward`."""
        return self._mean_depth

    def pop_mean_acting_depth(self) -> Tensor | None:
        return self._taken.pop_mean()

    def _record(self, halting: "HaltingState", filled: Tensor) -> None:
        tokens = filled.sum().clamp(min=1)
        self._mean_depth = halting.count.sum() / tokens
        steps = [(halting.count + halting.remainder).sum() / tokens] if torch.is_grad_enabled() else []
        self._ponder = PendingTerms(steps)


class HaltingState:
    """Halting state: which tokens continue, and the weights of their passes.

    Args:
        filled: mask of tokens, as opposed to empty slots, (B, T) bool.
        epsilon: tolerance of an `ACT`.
        dtype: dtype of p.
    """

    def __init__(self, filled: Tensor, epsilon: float, dtype: torch.dtype):
        self.running = filled
        self.epsilon = epsilon
        self.total = torch.zeros(filled.shape, dtype=dtype, device=filled.device)
        self.count = self.total.to(torch.promote_types(dtype, torch.float32))  # bfloat16 is exact up to 256
        self.remainder = torch.zeros_like(self.total)

    def step(self, p: Tensor, last: bool) -> Tensor:
        """Return the weights (B, T) of the next pass for halting probabilities p (B, T).

        In the last pass all tokens halt.
        """
        remaining = 1 - self.total
        halts = self.running & ((self.total + p >= 1 - self.epsilon) | last)
        weight = torch.where(halts, remaining, p) * self.running
        self.remainder = torch.where(halts, remaining, self.remainder)
        self.total, self.count = self.total + weight, self.count + self.running
        self.running = self.running & ~halts
        return weight
