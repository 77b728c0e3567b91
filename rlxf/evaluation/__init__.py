"""Evaluation of agents: returns with confidence intervals, reports, tables, TensorBoard scalars, videos."""

from typing import TYPE_CHECKING

from rlxf.utils.lazy_names import import_lazily

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

_NAMES = {
    "rlxf.evaluation.callback": ("EvaluationCallback",),
    "rlxf.evaluation.episodes": ("evaluate",),
    "rlxf.evaluation.report": ("Report", "TargetSweep", "compare"),
    "rlxf.evaluation.validation": ("BestValidationCallback",),
    "rlxf.evaluation.video": ("VideoCallback",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> object:
        """Import the public object ``name`` from its module on first use (PEP 562)."""
        return import_lazily(name, _MODULES, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
