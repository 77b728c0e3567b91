"""The rules of the T-Maze, as tables that one environment and a batch of them share."""

import math
import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

RIGHT, UP, LEFT, DOWN = range(4)


@dataclass(frozen=True)
class TMazeRules:
    r"""A corridor with an oracle at its west end and a junction with two arms at its east end.

    ::

        O--S- ... -J    O oracle, at column 0        active:  S is one column east of O
                   |    J junction, at column S + L  passive: S is O
                           with one arm above it (+1) and one below (-1)

    One arm, drawn with equal chance, is the goal. The oracle shows it at the first visit only. An
    episode lasts exactly T steps, just enough to visit the oracle and walk to the goal, and pays

        ``r_t = penalty * [column after step t < t - S]``  for t < T (behind the best walk),
        ``r_T = [the agent is in the goal's arm]``.

    The best return is 1. Without memory of the hint success is 0.5 at most.

    Source: Ni et al. 2023, arXiv:2307.03864, Passive and Active T-Maze.

    Args:
        corridor_length: L, steps from the start to the junction; at least 1.
        active: False: the agent starts on the oracle (T = L + 1). True: the oracle lies one step
            behind the start (T = L + 3), so the agent must fetch the hint first.
        penalty: reward of each step behind; at most 0. None means -1 / (T - 1), the paper's value: a
            passive agent that never moves pays 1 in all.

    Raises:
        ValueError: if corridor_length is not an integer of at least 1, or penalty is above 0 or not finite.
    """

    corridor_length: int = 50
    active: bool = False
    penalty: float | None = None

    def __post_init__(self) -> None:
        if not _is_positive_integer(self.corridor_length):
            raise ValueError(f"corridor_length must be an integer >= 1, got {self.corridor_length!r}")
        if self.penalty is not None and not -math.inf < self.penalty <= 0:
            raise ValueError(f"penalty must be finite and at most 0, got {self.penalty!r}")

    @property
    def start(self) -> int:
        """Column of the start S, which is also its distance from the oracle: 0 or 1."""
        return int(self.active)

    @property
    def junction(self) -> int:
        """Column of the junction."""
        return self.start + self.corridor_length

    @property
    def horizon(self) -> int:
        """Steps T of every episode."""
        return self.corridor_length + 2 * self.start + 1

    @cached_property
    def step_penalty(self) -> float:
        """Reward of a step that leaves the agent behind the best walk."""
        return -1.0 / (self.horizon - 1) if self.penalty is None else float(self.penalty)

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """Column of each cell, (cells,): the corridor from west to east, the upper arm, the lower arm."""
        return np.append(np.arange(self.junction + 1), [self.junction, self.junction])

    @cached_property
    def arms(self) -> NDArray[np.int64]:
        """Arm of each cell, (cells,): 1 the upper, -1 the lower, 0 none."""
        return np.append(np.zeros(self.junction + 1, dtype=np.int64), [1, -1])

    @cached_property
    def moves(self) -> NDArray[np.int64]:
        """The cell that follows (cell, action), (cells, 4); who walks into a wall stays."""
        junction, upper, lower = self.junction, self.junction + 1, self.junction + 2
        moves = np.tile(np.arange(lower + 1)[:, None], (1, 4))
        moves[:junction, RIGHT] += 1
        moves[1 : junction + 1, LEFT] -= 1
        moves[junction, [UP, DOWN]] = upper, lower
        moves[upper, DOWN] = moves[lower, UP] = junction
        return moves

    @cached_property
    def sights(self) -> NDArray[np.float32]:
        """What is seen in each cell, (cells, 2), the hint aside: [at the junction or in an arm, arm]."""
        return np.stack([self.columns == self.junction, self.arms], axis=1).astype(np.float32)


def _is_positive_integer(value: object) -> bool:
    try:
        return operator.index(value) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False
