"""Rules of the T-Maze as lookup tables, shared by `TMaze` and `TMazeVector`."""

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

PenaltyRule = Literal["schedule", "step"]
Cells = int | NDArray[np.int64]
MAX_CORRIDOR_LENGTH = 1_000_000
"""Limit of memory: the tables take about 60 bytes for each cell."""
RIGHT, UP, LEFT, DOWN = range(4)


@dataclass(frozen=True)
class TMazeRules:
    r"""Corridor with an oracle at its west end and a junction with two arms at its east end.

    ::

        O--S- ... -J    O oracle, at column 0        active:  S is one column east of O
                   |    J junction, at column S + L  passive: S is O
                           with one arm above it (+1) and one below (-1)

    The goal is one of the arms, drawn with equal probability. The oracle shows it at the first visit only.
    An episode lasts exactly T steps, the length of the shortest path from the start over the oracle to the
    goal. The rewards are

        ``r_t = penalty * [step t was idle]``  for t < T,
        ``r_T = [the agent is in the goal's arm]``.

    The argument penalty_rule defines which steps are idle:

    - "schedule" (the paper's): steps after which ``column < t - S``, so the agent lags the shortest path. It
      cannot catch up: after the first wrong step, all actions get the same penalty. An untrained agent
      therefore learns from only one or two steps of each episode.
    - "step": steps that lead neither east nor to the hint. Each step has an informative reward.

    The best return is 1 under both rules, for the same path. Without memory of the hint, the success rate
    is at most 0.5.

    Source: Ni et al. 2023, arXiv:2307.03864, Passive and Active T-Maze.

    Args:
        corridor_length: L, steps from the start to the junction; at least 1.
        active: if False, the agent starts on the oracle (T = L + 1). If True, the oracle is one step west of
            the start (T = L + 3), so the agent must fetch the hint first.
        penalty: reward of each idle step; at most 0. None means -1 / (T - 1), the paper's value: the
            penalties of a passive agent that never moves sum to -1.
        penalty_rule: definition of idle steps, "schedule" or "step".

    Raises:
        ValueError: if corridor_length is not an integer from 1 to 1,000,000, penalty is above 0 or not
            finite, or penalty_rule is unknown.
    """

    corridor_length: int = 50
    active: bool = False
    penalty: float | None = None
    penalty_rule: PenaltyRule = "schedule"

    def __post_init__(self) -> None:
        if not _is_positive_integer(self.corridor_length):
            raise ValueError(f"corridor_length must be an integer >= 1, got {self.corridor_length!r}")
        if self.corridor_length > MAX_CORRIDOR_LENGTH:
            raise ValueError(
                f"corridor_length must be at most {MAX_CORRIDOR_LENGTH:,}, got {self.corridor_length!r}"
            )
        if self.penalty is not None and not -math.inf < self.penalty <= 0:
            raise ValueError(f"penalty must be finite and at most 0, got {self.penalty!r}")
        if self.penalty_rule not in get_args(PenaltyRule):
            raise ValueError(
                f"penalty_rule must be one of {get_args(PenaltyRule)}, got {self.penalty_rule!r}"
            )

    @property
    def start(self) -> int:
        """Column S of the start, which is also its distance from the oracle: 0 or 1."""
        return int(self.active)

    @property
    def junction(self) -> int:
        """Column of the junction."""
        return self.start + self.corridor_length

    @property
    def horizon(self) -> int:
        """Number of steps T of every episode."""
        return self.corridor_length + 2 * self.start + 1

    @cached_property
    def step_penalty(self) -> float:
        """Reward of an idle step."""
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
        """Next cell for each cell and action, (cells, 4); a move into a wall has no effect."""
        junction, upper, lower = self.junction, self.junction + 1, self.junction + 2
        moves = np.tile(np.arange(lower + 1)[:, None], (1, 4))
        moves[:junction, RIGHT] += 1
        moves[1 : junction + 1, LEFT] -= 1
        moves[junction, [UP, DOWN]] = upper, lower
        moves[upper, DOWN] = moves[lower, UP] = junction
        return moves

    @cached_property
    def sights(self) -> NDArray[np.float32]:
        """Observation in each cell without the hint, (cells, 2): [at the junction or in an arm, arm]."""
        return np.stack([self.columns == self.junction, self.arms], axis=1).astype(np.float32)

    def idle(
        self, before: Cells, after: Cells, time: int, hint_due: bool | NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return whether a step is penalised, for one environment or for (N,) environments.

        Args:
            before: cells before the step.
            after: cells after the step.
            time: number of steps of the episode, including this step.
            hint_due: whether the hint was not yet shown before the step.
        """
        if self.penalty_rule == "schedule":
            return self.columns[after] < time - self.start
        fetches_hint = np.logical_and(hint_due, np.equal(after, 0))
        return (self.columns[after] <= self.columns[before]) & ~fetches_hint


def _is_positive_integer(value: object) -> bool:
    try:
        return operator.index(value) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False
