"""What agents whose tokens may leave early have in common."""

from typing import Any

from gymnasium import spaces

from rlxf.attention import CALM
from rlxf.attention.depth.base import Depth


def check_choices(depth: Depth, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError if a depth asks how likely choices are, and actions are numbers."""
    if isinstance(depth, CALM) and depth.confidence == "softmax" and isinstance(action_space, spaces.Box):
        raise ValueError(
            f"{depth} asks how far the likeliest choice is ahead, and actions are {action_space}; "
            f"use confidence='state' or 'classifier'"
        )
