"""Validation of early exits, shared by all agents."""

from typing import Any

from gymnasium import spaces

from rlxf.attention import CALM
from rlxf.attention.depth.base import Depth


def check_choices(depth: Depth, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError if the exit confidence needs discrete actions and the action space is a Box."""
    if isinstance(depth, CALM) and depth.confidence == "softmax" and isinstance(action_space, spaces.Box):
        raise ValueError(
            f"{depth} compares the probabilities of discrete actions, but the action space is "
            f"{action_space}; use confidence='state' or 'classifier'"
        )
