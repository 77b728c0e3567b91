"""Evaluation of agents: returns with confidence intervals, reports, tables, TensorBoard scalars, videos."""

from rlxf.evaluation.callback import EvaluationCallback
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.report import Report, TargetSweep, compare
from rlxf.evaluation.video import VideoCallback

__all__ = ["EvaluationCallback", "Report", "TargetSweep", "VideoCallback", "compare", "evaluate"]
