"""Returns of an agent with their uncertainty, as a report, a table and TensorBoard scalars."""

from rlxf.evaluation.callback import EvaluationCallback
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.report import Report

__all__ = ["EvaluationCallback", "Report", "evaluate"]
