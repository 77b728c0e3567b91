"""Pre-training on trajectories: what is hidden is told from what stands around it."""

from rlxf.agents.pretraining.learner import MaskedPretraining

__all__ = ["MaskedPretraining"]
