"""``rlxf play``: show the agent of a run acting in its environment."""

import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from rlxf.cli.options import check_counts, check_options_not_negative, json_object, options
from rlxf.cli.output import print_out
from rlxf.cli.playback_command import PlaybackCommand

if TYPE_CHECKING:
    import gymnasium
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.cli.playback import Task
    from rlxf.evaluation import Report

SLOWEST, FASTEST = 0.01, 1000
"""Range of frames per second. A GIF stores at most 655 seconds for a frame."""


@options
class Play(PlaybackCommand):
    """Show the agent of a run, or of a checkpoint file, acting in its environment, and print its returns.

    With a display, the environment opens a window if it can. Otherwise its states are printed as text, or
    written as an animated GIF. '{"render_mode": "rgb_array"}' among the arguments of the environment selects
    the GIF, and "ansi" the text.

    Example: rlxf play runs/gtrxl-rlxf-TMaze-v0-0
    """

    episodes: int = 1
    """Number of episodes."""
    fps: float | None = None
    """Frames per second of text on a terminal and of the GIF. None means those of the environment."""

    def prepare(self) -> Callable[[], None]:
        """Open the run, make its environment, and return the playback to run."""
        from rlxf.cli.playback import Task, open_run, prepare_agent
        from rlxf.cli.reports import select_checkpoints

        check_counts(self, "episodes")
        check_options_not_negative(self, "seed")
        if self.fps is not None and not SLOWEST <= self.fps <= FASTEST:
            raise ValueError(f"--fps must be from {SLOWEST} to {FASTEST:,}, got {self.fps:g}")
        run = open_run(self.run, self.checkpoint, self.env)
        kwargs = dict(json_object(self.env_kwargs))
        (checkpoint,) = select_checkpoints(run, self.checkpoint).values()
        mode = kwargs.pop("render_mode", None)
        task = Task.of_run(run, self.env, kwargs, self.trust)
        env = self._view(task, task.mode(mode))
        agent, vec_env = prepare_agent(run, checkpoint, env, self.device)
        return partial(self._play, agent, vec_env, env, task)

    def _play(self, agent: Any, vec_env: "VecEnv", env: Any, task: "Task") -> None:
        from rlxf.cli.playback import play_episodes
        from rlxf.evaluation.video import FrameRecorder

        with closing(vec_env):
            play_episodes(agent, vec_env, self.episodes, self.seed, _print_last)
        if isinstance(env, FrameRecorder):
            self._write(env, task.fps)
        elif env.render_mode is None:
            print_out(f"{task.spec.id} has no render mode that can be shown here, so only returns are shown")

    def _view(self, task: "Task", mode: str | None) -> "gymnasium.Env[Any, Any]":
        """Return the environment with its frames printed or recorded."""
        from rlxf.cli.playback import IMAGES, TEXT, TextFrames
        from rlxf.evaluation.video import MAX_STEPS, FrameRecorder

        env = task.make(mode)
        if mode == TEXT:
            return TextFrames(env, 1 / (self.fps or task.fps) if sys.stdout.isatty() else 0)
        return FrameRecorder(env, MAX_STEPS) if mode == IMAGES else env

    def _write(self, recorder: Any, fps: float) -> None:
        from rlxf.evaluation.video import MAX_STEPS
        from rlxf.utils.files import write_file
        from rlxf.utils.gif import encode_gif

        path = self.run.with_suffix(".gif") if self.run.is_file() else self.run / "play.gif"
        frames = recorder.frames(self.episodes)
        write_file(path, encode_gif(frames, self.fps or fps))
        limit = " (the limit)" if len(frames) >= MAX_STEPS else ""
        print_out(f"{len(frames):,} frames{limit} are written to {path}")


def _print_last(report: "Report") -> None:
    number = report.episodes
    length = int(report.lengths[-1])
    print_out(f"episode {number}: return {report.returns[-1]:.6g} in {length} steps")
