"""Evaluations while an agent trains: how often, and what is said of the best one."""

from rlxf.training import RunFolder, read_archive
from rlxf.training.checkpoints import BESIDE

EVALUATION = "evaluation"
"""Name of the evaluation among what is saved with each checkpoint."""
SHARE = 10
"""Evaluations in a training, unless another interval is asked for."""


def interval(asked: int | None, total: int, least: int = 1) -> int:
    """Steps or updates from one evaluation to the next; 0 for no evaluation.

    Args:
        asked: as asked for; None for a tenth of the training.
        total: steps or updates of the training.
        least: fewer than so many change nothing: the weights are those of the evaluation before.
    """
    return max(-(-total // SHARE), least) if asked is None else asked


def best_told(run: RunFolder, unit: str) -> str:
    """One line on the best evaluation of a training and where that agent is; "" if there was none.

    Args:
        run: with the checkpoint that its training ended with.
        unit: what is counted, "step" or "update".

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
