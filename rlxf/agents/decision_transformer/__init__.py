"""Decision Transformer: an agent conditioned on a return and trained offline on Minari datasets."""

from rlxf.agents.decision_transformer.conditioning import (
    ElasticHistory,
    HighestValueReturn,
    MaxReturn,
    SampledReturn,
    TargetReturn,
)
from rlxf.agents.decision_transformer.config import KZL, ODT, decision_transformer
from rlxf.agents.decision_transformer.learner import DecisionTransformer
from rlxf.agents.offline.objectives import Imitation, MaximumEntropy, QRegularized

__all__ = [
    "DecisionTransformer",
    "Imitation",
    "MaximumEntropy",
    "QRegularized",
    "TargetReturn",
    "MaxReturn",
    "ElasticHistory",
    "HighestValueReturn",
    "SampledReturn",
    "decision_transformer",
    "KZL",
    "ODT",
]
