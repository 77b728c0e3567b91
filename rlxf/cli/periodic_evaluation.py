"""Interval of the evaluations during training, and report of the best one."""

from rlxf.training import RunFolder, read_archive
from rlxf.training.checkpoints import BESIDE

EVALUATION = "evaluation"
"""Name of the evaluation callback in the state saved with each checkpoint."""
SHARE = 10
"""Default number of evaluations in a training."""


def interval(requested: int | None, total: int, least: int = 1) -> int:
    """Return the number of steps or updates between two evaluations; 0 for no evaluation.

    Args:
        requested: the requested interval; None for a tenth of the training.
        total: steps or updates of the training.
        least: minimum of the default, e.g. the steps of a rollout: weights do not change in between.
    """
    return max(-(-total // SHARE), least) if requested is None else requested


def describe_best(run: RunFolder, unit: str) -> str:
    """Return one line with the best evaluation and the path of its checkpoint; "" if there is none.

    Args:
        run: run with the last checkpoint of its training.
        unit: unit of progress, "step" or "update".

    Raises:
        FileNotFoundError: if there is no intact checkpoint.
    """
    state = read_archive(run.checkpoints.newest()).documents.get(BESIDE, {}).get(EVALUATION)
    if not run.best.is_file() or state is None or state["best"] is None:
        return ""
    return (
        f"best evaluation during training: mean return {state['best']:.4g} at {unit} {state['best_step']:,}, "
        f"saved in {run.best}"
    )
