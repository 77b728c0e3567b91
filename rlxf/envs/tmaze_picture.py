"""Rendering of a T-Maze as text and as pixels."""

import numpy as np
from numpy.typing import NDArray

from rlxf.envs.tmaze_rules import TMazeRules

PIXELS = 8
WALL, FLOOR, ORACLE, GOAL, AGENT = (40, 40, 40), (230, 230, 230), (90, 140, 220), (90, 180, 90), (220, 80, 60)


def as_text(rules: TMazeRules, cell: int, goal: int) -> str:
    """Render three lines of L + S + 1 characters: O oracle, G goal, A agent, ``.`` floor."""
    grid = np.full((3, rules.junction + 1), " ")
    grid[1], grid[[0, 2], -1] = ".", "."
    grid[1, 0], grid[1 - goal, -1] = "O", "G"
    grid[_position(rules, cell)] = "A"
    return "\n".join("".join(row) for row in grid)


def as_pixels(rules: TMazeRules, cell: int, goal: int) -> NDArray[np.uint8]:
    """Render an RGB image, uint8 (3 * 8, (L + S + 1) * 8, 3)."""
    grid = np.full((3, rules.junction + 1, 3), WALL, dtype=np.uint8)
    grid[1], grid[[0, 2], -1] = FLOOR, FLOOR
    grid[1, 0], grid[1 - goal, -1] = ORACLE, GOAL
    grid[_position(rules, cell)] = AGENT
    return grid.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


def _position(rules: TMazeRules, cell: int) -> tuple[int, int]:
    return 1 - int(rules.arms[cell]), int(rules.columns[cell])
