"""Options of the attention maps, memory metrics, histograms and videos in TensorBoard."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlxf.cli.counts import Count, check_counts
from rlxf.cli.screen import show
from rlxf.cli.task import Task

if TYPE_CHECKING:
    from stable_baselines3.common.callbacks import BaseCallback


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Options of additional TensorBoard output. With the defaults it takes about 2 % of the training time."""

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
    def callbacks(self, task: Task, every_steps: int) -> "Iterator[list[BaseCallback]]":
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
        with filmed(task, every_steps) as video_callbacks:
            yield callbacks + video_callbacks


@contextmanager
def filmed(task: Task, every_steps: int) -> "Iterator[list[BaseCallback]]":
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
            show(" ".join(f"no videos: {task.env} cannot render images: {error}".split()))
        yield callbacks
