"""``rlxf attention``: write a page that shows what the agent of a run attends to."""

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlxf.cli.options import check_counts, check_options_not_negative, json_object, options
from rlxf.cli.output import print_out
from rlxf.cli.playback_command import PlaybackCommand

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.agents.inspection import EpisodeInspector
    from rlxf.cli.attention_page.episode import Recording
    from rlxf.cli.attention_page.page import Episode

PAGE = "attention.html"
MAX_WEIGHTS = 4_000_000
"""Largest number of attention weights in a page, about 20 MB of text."""


@options
class AttentionPage(PlaybackCommand):
    """Write a page that shows what the agent of a run attends to.

    The agent plays an episode. The page is one HTML file, which any browser shows without a network. It has
    the frames, actions and rewards of the episode. For the selected step, it shows the attention of each head
    in each layer to the earlier steps, and the gates of the core. The agent is one of "rlxf train gtrxl" or
    "rlxf train dt".

    Example: rlxf attention runs/gtrxl-rlxf-TMaze-v0-0
    """

    max_steps: int = 500
    """Largest number of steps. The page states whether the episode went on.
    It shows fewer steps of cores with many layers and heads, so that its weights take at most about 20 MB."""
    output: Path | None = None
    """Path of the page, which is replaced if it exists. None means attention.html in the run folder, or
    next to the checkpoint file."""

    def prepare(self) -> Callable[[], None]:
        """Load the agent, make its environment, and return the function that writes the page."""
        from rlxf.agents.inspection import episode_inspector
        from rlxf.cli.attention_page.episode import Recording
        from rlxf.cli.playback import Task, open_run, prepare_agent
        from rlxf.cli.reports import select_checkpoints
        from rlxf.cli.runs import TRANSFORMERS, agent_name

        check_counts(self, "max_steps")
        check_options_not_negative(self, "seed")
        kwargs = dict(json_object(self.env_kwargs))
        run = open_run(self.run, self.checkpoint, self.env)
        agent_name(run, TRANSFORMERS)
        (checkpoint,) = select_checkpoints(run, self.checkpoint).values()
        self._check_output()
        kwargs.pop("render_mode", None)
        task = Task.of_run(run, self.env, kwargs, self.trust)
        recording = Recording.of_task(task, self.max_steps)
        agent, vec_env = prepare_agent(run, checkpoint, recording.env, self.device)
        inspector = episode_inspector(agent)
        about = f"{type(agent).__name__} in {task.spec.id}, checkpoint {checkpoint.name}, seed {self.seed}"
        return partial(self._write, inspector, vec_env, recording, about)

    def _check_output(self) -> None:
        """Raise OSError if the page cannot be written to its path."""
        if self._path.is_dir():
            raise IsADirectoryError(f"--output {self._path} is a folder; give the path of a file")
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self._path.parent} for --output {self._path}")

    @property
    def _path(self) -> Path:
        """Path of the page."""
        return self.output or (self.run.parent if self.run.is_file() else self.run) / PAGE

    def _write(
        self, inspector: "EpisodeInspector", vec_env: "VecEnv", recording: "Recording", about: str
    ) -> None:
        from rlxf.cli.attention_page.page import page
        from rlxf.utils.files import write_file

        with closing(vec_env):
            limit = longest_episode(inspector.rows, self.max_steps)
            recording.play(inspector, vec_env, self.seed, limit)
        episode = self._episode(inspector, recording, about)
        write_file(self._path, page(episode).encode())
        steps = f"{len(episode.steps):,} steps"
        written = f"the first {steps} of the episode" if episode.end == "cut" else steps
        print_out(f"{written} are written to {self._path}")

    def _episode(self, inspector: "EpisodeInspector", recording: "Recording", about: str) -> "Episode":
        from rlxf.cli.attention_page.page import Episode

        steps = recording.steps.steps
        total = sum(step.reward for step in steps)
        end = recording.steps.end
        episode = "in the first {} steps" if end == "cut" else f"in {{}} steps, {end}"
        return Episode(
            title=f"Attention of {self.run}",
            summary=f"{about}: return {total:.6g} {episode.format(len(steps))}",
            steps=steps,
            frames=recording.images(),
            attention=inspector.attention(),
            end=end,
        )


def longest_episode(rows: int, limit: int) -> int:
    """Return the largest number of steps T up to ``limit`` with ``rows T (T + 1) / 2`` weights in the budget.

    Args:
        rows: weights of a step over one earlier step, for all layers, heads and tokens.
        limit: largest T.
    """
    return max(1, min(limit, math.isqrt(2 * MAX_WEIGHTS // rows)))
