"""Options of TensorBoard figures, videos and periodic evaluations."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlxf.cli.argument_checks import Count, check_counts
from rlxf.cli.options.env_options import EnvOptions
from rlxf.cli.output import print_out
from rlxf.training import RunFolder, read_archive
from rlxf.training.checkpoints import STATEFUL_DOCUMENT

if TYPE_CHECKING:
    from stable_baselines3.common.callbacks import BaseCallback


@dataclass(frozen=True, kw_only=True)
class TensorBoardOptions:
    """Options of additional TensorBoard output. With the defaults it takes about 2% of the training time."""

    attention_maps_every: Count | None = 100
    """Number of rollouts between images of the attention of each layer and head. None turns them off."""
    memory_every: Count | None = 10
    """Number of rollouts between measurements of the attention to memory. None turns them off."""
    histograms_every: Count | None = 20
    """Number of rollouts between histograms, e.g. of weights and gradients. None turns them off."""
    videos: bool = True
    """Record a video of an episode at each evaluation, if the environment renders images."""

    def check(self) -> None:
        """Raise ValueError unless each number is None or at least 1."""
        check_counts(self, "attention_maps_every", "memory_every", "histograms_every")

    @contextmanager
    def callbacks(self, task: EnvOptions, every_steps: int) -> "Iterator[list[BaseCallback]]":
        """Yield the callbacks for these options; a video is recorded every ``every_steps`` steps."""
        from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback

        chosen: list[tuple[Callable[[int], BaseCallback], int | None]] = [
            (AttentionMapCallback, self.attention_maps_every),
            (MemoryCallback, self.memory_every),
            (HistogramCallback, self.histograms_every),
        ]
        callbacks = [callback(every) for callback, every in chosen if every is not None]
        if not self.videos:
            yield callbacks
            return
        with make_video_callbacks(task, every_steps) as video_callbacks:
            yield callbacks + video_callbacks


@contextmanager
def make_video_callbacks(task: EnvOptions, every_steps: int) -> "Iterator[list[BaseCallback]]":
    """Yield the callback that records videos of the task.

    If the environment cannot render images, print the reason and yield no callback.
    """
    from rlxf.envs.make import make_env
    from rlxf.evaluation import VideoCallback

    kwargs = task.env_kwargs | {"render_mode": "rgb_array"}
    callbacks: list[BaseCallback] = []
    with ExitStack() as stack:
        try:
            env = make_env(task.env, kwargs, **task.shown)
            stack.callback(env.close)
            callbacks.append(VideoCallback(env, every_steps))
        except Exception as error:  # training does not need videos: a driver or package may be missing
            print_out(" ".join(f"no videos: {task.env} cannot render images: {error}".split()))
        yield callbacks


EVALUATION = "evaluation"
"""Name of the evaluation callback in the state saved with each checkpoint."""
DEFAULT_EVALUATIONS = 10
"""Default number of evaluations during training."""


def interval(requested: int | None, total: int, least: int = 1) -> int:
    """Return the number of steps or updates between two evaluations; 0 for no evaluation.

    Args:
        requested: the requested interval; None for a tenth of the training.
        total: steps or updates of the training.
        least: minimum of the default, e.g. the steps of a rollout: weights do not change in between.
    """
    return max(-(-total // DEFAULT_EVALUATIONS), least) if requested is None else requested


def describe_best(run: RunFolder, unit: str) -> str:
    """Return one line with the best evaluation and the path of its checkpoint; "" if there is none.

    Args:
        run: run with the last checkpoint of its training.
        unit: unit of progress, "step" or "update".

    Raises:
        FileNotFoundError: if there is no intact checkpoint.
    """
    state = read_archive(run.checkpoints.newest()).documents.get(STATEFUL_DOCUMENT, {}).get(EVALUATION)
    if not run.best.is_file() or state is None or state["best"] is None:
        return ""
    return (
        f"best evaluation during training: mean return {state['best']:.4g} at {unit} {state['best_step']:,}, "
        f"saved in {run.best}"
    )
