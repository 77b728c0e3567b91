"""FLOATER: positions that flow, each from the one before, along a learned differential equation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number, check_whole
from rlxf.attention.positions.base import Embedding, Position

MOST_STEP = 100.0
"""With longer ones, positions soon flow out of float32."""

CALM = 0.1
"""What W_2 and b_2 are scaled by at first."""


@dataclass(frozen=True)
class Floater(Position):
    r"""``x_t += p(t dt)``, where p solves ``dp/ds = h(s, p)``: ``p(s') = p(s) + integral of h``.

    ``h(s, p) = W_2 [ReLU(W_1 [p, s] + b_1), s] + b_2``; h and p(0) are learned. No position is the last:
    each follows from the one before. But nothing holds p, and what W_2 W_1 stretches grows with each of them.
    So W_2 and b_2 start a tenth as large as those of `torch.nn.Linear`: position 10,000 then is some tens
    of times as large as a token, and would be 1e10 times otherwise.

    A segment is learned from with the gradient through all positions, so its cost grows with the last one in
    it, one after the other; steps that act go on from where they were.

    The solver is Runge and Kutta's of order 4 with fixed steps, in Kutta's 3/8 form, as in the
    authors' code. torchdiffeq has it too, for the price of a dependency of the core for ten lines. The paper
    adds p to the input of every layer, with p(0) of its own; here it is added once, at the bottom.

    Source: Liu et al. 2020, arXiv:2003.09229, section 3.

    Args:
        step: dt, how far the flow goes from one position to the next; 0.01 as in the authors' code.
        substeps: steps of the solver on that way.

    Raises:
        TypeError: if step is no number, or substeps no whole number.
        ValueError: if step is not above 0 or is more than 100, or substeps is less than 1.
    """

    paper: ClassVar[str] = "Liu et al. 2020, arXiv:2003.09229"
    cost: ClassVar[str] = "L, one by one"
    step: float = 0.01
    substeps: int = 1

    def __post_init__(self) -> None:
        check_finite_number("Floater step", self.step)
        check_whole("Floater substeps", self.substeps)
        if self.step <= 0:
            raise ValueError(f"Floater step must be above 0, got {self.step}")
        if self.step > MOST_STEP:
            raise ValueError(f"Floater step must be at most {MOST_STEP}, got {self.step}")

    def build_embedding(self, width: int, heads: int) -> "FloaterEmbedding":
        return FloaterEmbedding(self, width)


class FloaterEmbedding(Embedding):
    """p(0) (C,), W_1 and W_2 (C, C + 1) of a `Floater`."""

    def __init__(self, spec: Floater, width: int):
        super().__init__()
        self.spec = spec
        self.start = nn.Parameter(torch.randn(width) * 0.02)
        self.inner = nn.Linear(width + 1, width)
        self.outer = nn.Linear(width + 1, width)
        with torch.no_grad():
            self.outer.weight.mul_(CALM)
            self.outer.bias.mul_(CALM)
        self._last: Trajectory | None = None

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x (B, T, C), position (B, T) -> (B, T, C)."""
        length = int(position.max()) + 1
        points = self.flow(self.start[None], length) if torch.is_grad_enabled() else self._known(length)
        return x + nn.functional.embedding(position, points)

    def flow(self, points: Tensor, length: int) -> Tensor:
        """p (N, C) of positions 0 ... N - 1 -> that of at least ``length`` positions."""
        made = [points[-1]]
        for t in range(len(points) - 1, length - 1):
            made.append(self.advance(t * self.spec.step, made[-1]))
        return torch.cat([points, torch.stack(made[1:])]) if made[1:] else points

    def _known(self, length: int) -> Tensor:
        """`flow` without gradient, from the last position that the present weights have reached."""
        last = self._last
        if last is None or not last.made_by(self.parameters()):
            last = Trajectory([weight.detach().clone() for weight in self.parameters()], self.start[None])
        self._last = Trajectory(last.weights, self.flow(last.points, length))
        return self._last.points

    def advance(self, s: float, p: Tensor) -> Tensor:
        """p (..., C) at s -> p at ``s + step``."""
        size = self.spec.step / self.spec.substeps
        for number in range(self.spec.substeps):
            p = p + size * self._slope(s + number * size, p, size)
        return p

    def _slope(self, s: float, p: Tensor, size: float) -> Tensor:
        """The mean slope of p over a step of the solver, by Kutta's 3/8 rule."""
        first = self.h(s, p)
        second = self.h(s + size / 3, p + size / 3 * first)
        third = self.h(s + size * 2 / 3, p + size * (second - first / 3))
        fourth = self.h(s + size, p + size * (first - second + third))
        return (first + 3 * (second + third) + fourth) / 8

    def h(self, s: float, p: Tensor) -> Tensor:
        """p (..., C) at s -> its slope (..., C)."""
        now = p.new_full((*p.shape[:-1], 1), s)
        hidden = self.inner(torch.cat([p, now], dim=-1)).relu()
        slope: Tensor = self.outer(torch.cat([hidden, now], dim=-1))
        return slope


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points p (N, C) of positions 0 ... N - 1, and the weights that made them."""

    weights: list[Tensor]
    points: Tensor

    def made_by(self, weights: Iterable[Tensor]) -> bool:
        """Whether these weights would make it."""
        return all(same(mine, other) for mine, other in zip(self.weights, weights, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in place, type and every number."""
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
