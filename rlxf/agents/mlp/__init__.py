"""Multilayer perceptrons trained offline: behavior cloning, and its return-conditioned form."""

from rlxf.agents.mlp.behavior_cloning import BehaviorCloning
from rlxf.agents.mlp.return_conditioned import ReturnConditionedMLP

__all__ = ["BehaviorCloning", "ReturnConditionedMLP"]
