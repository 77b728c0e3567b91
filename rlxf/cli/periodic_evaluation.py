"""Evaluations during training: their interval, and the report on the best one."""

from rlxf.training import RunFolder, read_archive
from rlxf.training.checkpoints import BESIDE

EVALUATION = "evaluation"
"""Name of the evaluation in the state that is saved with each checkpoint."""
SHARE = 10
"""Number of evaluations in a training by default."""


def interval(asked: int | None, total: int, least: int = 1) -> int:
    """Return the steps or updates between two evaluations; 0 for no evaluation.

    Args:
        asked: the requested interval; None for a tenth of the training.
        total: steps or updates of the training.
        least: minimum; within fewer, the weights do not change after the previous evaluation.
    """
    return max(-(-total // SHARE), least) if asked is None else asked


def describe_best(run: RunFolder, unit: str) -> str:
    """Return one line on the best evaluation and the path of its agent; "" if there was none.

    Args:
        run: with the checkpoint that its training ended with.
        unit: unit of progress, "step" or "update".

    Raises:
        FileNotFoundError: if there is no whole checkpoint.
    """
    state = read_archive(run.checkpoints.newest()).documents.get(BESIDE, {}).get(EVALUATION)
    if not run.best.is_file() or state is None or state["best"] is None:
        return ""
    return (
        f"best evaluation during training: mean return {state['best']:.4g} at {unit} {state['best_step']:,}, "
        f"kept in {run.best}"
    )
