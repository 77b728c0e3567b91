"""Masked pre-training of transformers on trajectories."""

from rlxf.agents.pretraining.learner import MaskedPretraining

__all__ = ["MaskedPretraining"]
