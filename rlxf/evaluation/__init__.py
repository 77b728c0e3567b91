"""Evaluation of agents: returns with confidence intervals, reports, tables, TensorBoard scalars, videos."""

from rlxf.evaluation.callback import EvaluationCallback
from rlxf.evaluation.episodes import evaluate
from rlxf.evaluation.report import Report, TargetSweep, compare
from rlxf.evaluation.validation import BestValidationCallback
from rlxf.evaluation.video import VideoCallback

__all__ = [
    "BestValidationCallback",
    "EvaluationCallback",
    "Report",
    "TargetSweep",
    "VideoCallback",
    "compare",
    "evaluate",
]
