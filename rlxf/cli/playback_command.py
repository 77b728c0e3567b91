"""Base of the commands in which the agent of a run plays in one environment and is watched."""

from abc import ABC
from dataclasses import field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Device, Json, Trust, options


@options
class PlaybackCommand(Command, ABC):
    """Command with the options of `rlxf.cli.playback`."""

    run: Positional[Path]
    """Folder of a run, or a checkpoint file of an agent, with --env."""
    checkpoint: Literal["last", "best", "validation"] = "last"
    """Checkpoint of a run: the last one, the best one of the evaluations during training, or the one with the
    lowest validation loss."""
    env: str | None = None
    """Gymnasium id of the environment. None means the environment of the run, or of the training data."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. Without --env they update those of the run."""
    seed: int = 1_000_000
    """Seed of the environment, by default that of "rlxf evaluate"."""
    trust: Trust = False
    device: Device = "auto"
