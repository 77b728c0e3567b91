"""Playback of the agent of a run: the choice of a render mode, text frames, and recorded images."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv

from rlxf.cli.output import print_out
from rlxf.cli.reports import default_target_returns
from rlxf.cli.runs import AGENTS, GTRXL, OFFLINE_AGENTS, Agent, agent_name, load_agent, make_env
from rlxf.envs import make
from rlxf.envs.gym_api import reset_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.sb3_vec_env import make_sync_vec_env
from rlxf.envs.specs import spec_of
from rlxf.evaluation.environment import warn_of_missing_statistics
from rlxf.evaluation.report import Report
from rlxf.evaluation.rollout import EpisodeCounter, accumulated_score, play, quotas
from rlxf.evaluation.video import DISPLAYS, FPS
from rlxf.training import RunFolder, read_archive
from rlxf.training.file_contents import describe, missing_path_advice

CREATION = ("vectorization_mode", "render_mode")
"""Arguments in a spec that depend on how its environment was created."""
HUMAN, TEXT, IMAGES = "human", "ansi", "rgb_array"


@dataclass(frozen=True)
class CheckpointRun(RunFolder):
    """Checkpoint file that is used like the final checkpoint of a run.

    Args:
        file: the file.
    """

    file: Path

    @classmethod
    def of_file(cls, file: Path) -> "CheckpointRun":
        """Read the name of the agent in a checkpoint file.

        Raises:
            ValueError: if the file is not valid, or contains no agent that acts.
            OSError: if the file cannot be read.
        """
        archive = read_archive(file)
        document = archive.documents.get("agent")
        name = document.get("name") if isinstance(document, dict) else None
        acting = {AGENTS[key].__name__: key for key in (GTRXL, *OFFLINE_AGENTS)}
        if not isinstance(name, str) or name not in acting:
            raise ValueError(f"{file} contains {describe(archive)}; give a file of {', '.join(acting)}")
        return cls(file.parent, {"agent": acting[name]}, file)

    @property
    def final_checkpoint(self) -> Path:
        """Path of the file."""
        return self.file


def open_run(path: Path, checkpoint: str, env: str | None) -> RunFolder:
    """Open the folder of a run, or a checkpoint file with the id of its environment.

    Args:
        path: the folder or the file.
        checkpoint: checkpoint of the run; "last" for a file.
        env: Gymnasium id, which a file needs.

    Raises:
        ValueError: if the options do not fit a file, or it contains no agent that acts.
        OSError: if the path does not exist or cannot be read.
    """
    if not path.is_file():
        if not path.exists():
            raise FileNotFoundError(
                f"there is no run folder {path} and no checkpoint file of this name"
                f"{missing_path_advice(path)}"
            )
        return RunFolder.open(path)
    if checkpoint != "last":
        raise ValueError(f"--checkpoint applies to the folder of a run, and {path} is a file")
    if env is None:
        raise ValueError(f"{path} is a file without the settings of its run: pass --env ID")
    return CheckpointRun.of_file(path)


@dataclass(frozen=True)
class Task:
    """Environment of a run that can be created with a render mode.

    Args:
        spec: Gymnasium spec, with all arguments of the run.
        extended: arguments of `rlxf.envs.make.make_env` that extend the observations.
        modes: render modes that the environment supports.
        fps: its frames per second.
    """

    spec: EnvSpec
    extended: dict[str, Any]
    modes: tuple[str, ...]
    fps: float

    @classmethod
    def of_run(cls, run: RunFolder, env: str | None, env_kwargs: dict[str, Any], trust: bool) -> "Task":
        """Return the task of a run; arguments and errors are those of `rlxf.cli.runs.make_env`.

        Raises:
            ValueError: also if the environment was not created from a Gymnasium id.
        """
        with closing(make_env(run, env, env_kwargs, 1, trust)) as probe:
            spec = spec_of(probe)
            metadata = probe.get_attr("metadata", 0)[0]
        if spec is None:
            raise ValueError(f"the environment of {run.path} has no Gymnasium id: pass --env")
        online = agent_name(run) == GTRXL
        names = ("previous_reward", "previous_transition")
        extended = {name: online and bool(run.config.get(name, False)) for name in names}
        modes = tuple(metadata.get("render_modes") or ())
        return cls(spec_without_probe(spec), extended, modes, metadata.get("render_fps") or FPS)

    def make(self, mode: str | None) -> gymnasium.Env:
        """Create the environment with a render mode."""
        return make.make_env(self.spec, {} if mode is None else {"render_mode": mode}, **self.extended)

    def mode(self, requested: Any) -> str | None:
        """Return the render mode to show.

        Args:
            requested: one of "human", "ansi" and "rgb_array"; None for a window if there is a display, else
                text, else images, or None if the environment supports nothing of these.

        Raises:
            ValueError: if the environment does not support the requested mode.
        """
        if requested is None:
            return self._best_mode()
        allowed = [mode for mode in (HUMAN, TEXT, IMAGES) if mode in self.modes]
        if requested not in allowed:
            supported = ", ".join(allowed) or "none"
            raise ValueError(f"render_mode must be one of {supported} for {self.spec.id}, got {requested!r}")
        return str(requested)

    def _best_mode(self) -> str | None:
        wanted = (*([HUMAN] if has_display() else []), TEXT, IMAGES)
        return next((mode for mode in wanted if mode in self.modes), None)


def spec_without_probe(spec: EnvSpec) -> EnvSpec:
    """Return the spec of a single environment, with the wrappers of its registration only.

    A probe also has those of `rlxf.envs.make_vec_env`, and those that its entry point creates.
    """
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in CREATION}
    registered = gymnasium.registry.get(spec.id)
    wrappers = () if registered is None else registered.additional_wrappers
    return replace(spec, kwargs=kwargs, additional_wrappers=wrappers)


def has_display() -> bool:
    """Return whether windows can be shown: on Linux, if the environment names a display."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in DISPLAYS)


class TextFrames(gymnasium.Wrapper):
    """Wrapper that prints the text of each state, including the last one of an episode.

    The first state of an episode is printed before its first step, because a ``VecEnv`` resets the
    environment immediately after an episode.

    Args:
        env: environment created with ``render_mode="ansi"``.
        seconds: pause after each frame.
    """

    def __init__(self, env: gymnasium.Env, seconds: float):
        super().__init__(env)
        self._seconds = seconds
        self._first: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment and keep the text of its first state."""
        result = reset_env(self.env, seed, options)
        self._first = self.render()
        return result

    def step(self, action: Any) -> Any:
        """Step the environment and print the text of its state."""
        if self._first is not None:
            self._show(self._first)
            self._first = None
        result = super().step(action)
        self._show(self.render())
        return result

    def _show(self, text: Any) -> None:
        print_out(str(text).rstrip("\n"))
        time.sleep(self._seconds)


def prepare_agent(run: RunFolder, checkpoint: Path, env: gymnasium.Env, device: Any) -> tuple[Agent, VecEnv]:
    """Load the agent of a run to act in one environment, normalized and conditioned as by ``rlxf evaluate``.

    Returns:
        The agent, and the environment for it, which the caller closes.

    Raises:
        ValueError, OSError: if agent and environment do not match, or a file is missing or damaged.
    """
    vec_env = make_sync_vec_env([lambda: env])
    agent: Any = load_agent(run, vec_env, checkpoint, device)
    if agent_name(run) == GTRXL:
        vec_env = agent.get_env()
    elif (targets := default_target_returns([agent], ())) is not None:
        vec_env = ReturnToGo(vec_env, targets[0])
    warn_of_missing_statistics(agent, vec_env)
    return agent, vec_env


def play_episodes(
    agent: Any, env: VecEnv, episodes: int, seed: int, on_episode: Callable[[Report], object] = lambda _: None
) -> Report:
    """Play whole episodes in one environment with the most likely actions.

    Args:
        agent: object with SB3's ``predict``.
        env: one environment.
        episodes: number of episodes.
        seed: seed of the environment.
        on_episode: function that is called after each episode, with the report so far.
    """
    env.seed(seed)
    counter = EpisodeCounter(quotas(episodes, 1), accumulated_score)
    steps = play(agent, env, deterministic=True)
    while counter.count < episodes:
        before = counter.count
        counter.add(*next(steps))
        if counter.count > before:
            on_episode(counter.report())
    return counter.report()
