"""FLOATER: position vectors on the trajectory of a learned differential equation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.positions.base import Position, PositionEmbedding, last_position
from rlxf.utils.checks import check_between, check_int

MAX_STEP = 100.0
"""Largest step; with longer ones, position vectors soon overflow float32."""

INITIAL_SCALE = 0.1
"""Initial scale of W_2 and b_2."""


@dataclass(frozen=True)
class Floater(Position):
    r"""``x_t += p(t dt)``, where p solves ``dp/ds = h(s, p)``: ``p(s') = p(s) + integral of h``.

    ``h(s, p) = W_2 [ReLU(W_1 [p, s] + b_1), s] + b_2``; h and p(0) are learned. The number of positions is
    unlimited: each follows from the previous one. As the norm of p is unbounded, components that W_2 W_1
    amplifies grow with each position. W_2 and b_2 therefore start a tenth as large as those of
    `torch.nn.Linear`. The vector of position 10,000 is then some tens of times as large as a token, instead
    of 1e10 times.

    While learning, the gradient of a segment flows through all positions, so the cost grows with its last
    position and is sequential. Acting steps continue from the last computed position.

    The solver is the Runge-Kutta method of order 4 with fixed steps, in Kutta's 3/8 form, as in the authors'
    code. torchdiffeq provides it too, but ten lines are simpler than a dependency of the core. The paper adds
    p to the input of every layer, with a separate p(0); here it is added once, to the input of the first
    layer.

    Source: Liu et al. 2020, arXiv:2003.09229, section 3.

    Args:
        step: dt, integration interval from one position to the next; 0.01 as in the authors' code.
        substeps: number of solver steps in that interval.

    Raises:
        TypeError: if step is not a number, or substeps is not an integer.
        ValueError: if step is not positive or is more than 100, or substeps is less than 1.
    """

    paper: ClassVar[str] = "Liu et al. 2020, arXiv:2003.09229"
    cost: ClassVar[str] = "L sequential steps"
    step: float = 0.01
    substeps: int = 1

    def __post_init__(self) -> None:
        check_between("Floater step", self.step, 0, MAX_STEP, inclusive="right")
        check_int("Floater substeps", self.substeps)

    def check_unlimited(self) -> None:
        """Raise ValueError, since the solver runs from position 0 to the last one."""
        raise ValueError(f"{self} becomes slower with them")

    def check_without_attention(self) -> None:
        """Do nothing: the position is added to the tokens."""

    def build_embedding(self, width: int, heads: int) -> "FloaterEmbedding":
        return FloaterEmbedding(self, width)


class FloaterEmbedding(PositionEmbedding):
    """Module of `Floater`: p(0) (C,), W_1 and W_2 (C, C + 1)."""

    def __init__(self, spec: Floater, width: int):
        super().__init__()
        self.spec = spec
        self.start = nn.Parameter(torch.randn(width) * 0.02)
        self.inner = nn.Linear(width + 1, width)
        self.outer = nn.Linear(width + 1, width)
        with torch.no_grad():
            self.outer.weight.mul_(INITIAL_SCALE)
            self.outer.bias.mul_(INITIAL_SCALE)
        self._last: Trajectory | None = None

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        length = last_position(position) + 1
        learning = torch.is_grad_enabled()
        points = self.extend(self.start[None], length) if learning else self._cached_flow(length)
        return x + nn.functional.embedding(position, points)

    def extend(self, points: Tensor, length: int) -> Tensor:
        """Extend p (N, C) of positions 0 ... N - 1 to at least ``length`` positions."""
        trajectory = [points[-1]]
        for t in range(len(points) - 1, length - 1):
            trajectory.append(self.advance(t * self.spec.step, trajectory[-1]))
        return torch.cat([points, torch.stack(trajectory[1:])]) if trajectory[1:] else points

    def _cached_flow(self, length: int) -> Tensor:
        """Compute `extend` without gradient, from the last position computed with the current weights."""
        last = self._last
        if last is None or not last.is_current(self.parameters()):
            last = Trajectory([weight.detach().clone() for weight in self.parameters()], self.start[None])
        self._last = Trajectory(last.weights, self.extend(last.points, length))
        return self._last.points

    def advance(self, s: float, p: Tensor) -> Tensor:
        """Integrate p (..., C) from s to ``s + step``."""
        size = self.spec.step / self.spec.substeps
        for number in range(self.spec.substeps):
            p = p + size * self._slope(s + number * size, p, size)
        return p

    def _slope(self, s: float, p: Tensor, size: float) -> Tensor:
        """Return the mean slope of p over a step of the solver, by Kutta's 3/8 rule."""
        first = self.h(s, p)
        second = self.h(s + size / 3, p + size / 3 * first)
        third = self.h(s + size * 2 / 3, p + size * (second - first / 3))
        fourth = self.h(s + size, p + size * (first - second + third))
        return (first + 3 * (second + third) + fourth) / 8

    def h(self, s: float, p: Tensor) -> Tensor:
        """Return the slope (..., C) of p (..., C) at s."""
        now = p.new_full((*p.shape[:-1], 1), s)
        hidden = self.inner(torch.cat([p, now], dim=-1)).relu()
        return self.outer(torch.cat([hidden, now], dim=-1))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points p (N, C) of positions 0 ... N - 1, and the weights they were computed with."""

    weights: list[Tensor]
    points: Tensor

    def is_current(self, weights: Iterable[Tensor]) -> bool:
        """Return whether the trajectory was computed with these weights."""
        return all(
            a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(self.weights, weights, strict=True)
        )
