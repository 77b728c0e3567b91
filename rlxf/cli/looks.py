"""The options that say what TensorBoard shows beside curves."""

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
    """What TensorBoard shows of the inside of an agent. The costs are small: two hundredths of the time."""

    attention_maps_every: Count | None = 100
    """Rollouts from one picture of where each layer and head looks to the next; None for no picture."""
    memory_every: Count | None = 10
    """Rollouts from one measurement of what is taken of memory to the next; None for no measurement."""
    histograms_every: Count | None = 20
    """Rollouts from histograms of weights, gradients, advantages ... to the next ones; None for none."""
    videos: bool = True
    """Film an episode at each evaluation, by default every tenth of the training, if the environment draws
    pictures."""

    def check(self) -> None:
        """Raise ValueError unless each number is None or at least 1."""
        check_counts(self, "attention_maps_every", "memory_every", "histograms_every")

    @contextmanager
    def callbacks(self, task: Task, every_steps: int) -> "Iterator[list[BaseCallback]]":
        """What looks while the agent learns; a film every ``every_steps`` steps."""
        from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback

        chosen: list[tuple[Callable[[int], BaseCallback], int | None]] = [
            (AttentionMapCallback, self.attention_maps_every),
            (MemoryCallback, self.memory_every),
            (HistogramCallback, self.histograms_every),
        ]
        looks = [callback(every) for callback, every in chosen if every is not None]
        if not self.videos:
            yield looks
            return
        with filmed(task, every_steps) as films:
            yield looks + films


@contextmanager
def filmed(task: Task, every_steps: int) -> "Iterator[list[BaseCallback]]":
    """What films the task; nothing, and a line that says why, where it gives no pictures."""
    from rlxf.envs.make import make_env
    from rlxf.evaluation import VideoCallback

    kwargs = task.env_kwargs | {"render_mode": "rgb_array"}
    films: list[BaseCallback] = []
    with ExitStack() as opened:
        try:
            env = make_env(task.env, kwargs, **task.shown)
            opened.callback(env.close)
            films.append(VideoCallback(env, every_steps))
        except Exception as error:  # drivers, displays, packages that are not there: no reason not to train
            show(" ".join(f"no videos: {task.env} gives no pictures: {error}".split()))
        yield films
