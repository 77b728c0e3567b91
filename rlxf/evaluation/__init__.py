"""Evaluation of agents: returns with confidence intervals, reports, tables, TensorBoard scalars, videos."""

from typing import TYPE_CHECKING

from rlxf.utils.lazy_names import lazy_attributes, modules_by_name

if TYPE_CHECKING:  # so that editors and type checkers know the lazy names
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

_MODULES = modules_by_name(
    {
        "rlxf.evaluation.callback": ("EvaluationCallback",),
        "rlxf.evaluation.episodes": ("evaluate",),
        "rlxf.evaluation.report": ("Report", "TargetSweep", "compare"),
        "rlxf.evaluation.validation": ("BestValidationCallback",),
        "rlxf.evaluation.video": ("VideoCallback",),
    }
)

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = lazy_attributes(globals(), _MODULES)
