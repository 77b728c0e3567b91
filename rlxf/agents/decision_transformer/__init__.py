"""Decision Transformer: an agent conditioned on a target return and trained offline on Minari datasets."""

from rlxf.agents.decision_transformer.learner import DecisionTransformer
from rlxf.agents.decision_transformer.model import KZL, ODT, decision_transformer
from rlxf.agents.offline.objectives import Imitation, MaximumEntropy

__all__ = ["DecisionTransformer", "Imitation", "MaximumEntropy", "decision_transformer", "KZL", "ODT"]
