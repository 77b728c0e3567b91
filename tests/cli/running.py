"""Helpers that run commands in tests."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

from rlxf import GTrXLPPO, evaluate
from rlxf.cli import main
from rlxf.envs import make_vec_env

TINY = shlex.split(
    "--n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 --n-epochs 2 --core.memory.length 4"
    " --core.width 8 --core.heads 2 --total-timesteps 64 --episodes 3 --no-progress-bar"
    " --attention-maps-every None --no-videos --evaluate-every 0"
)
TASK = ["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}']


def train(*args: str) -> None:
    """Train for two rollouts on a T-Maze with a corridor of 3."""
    main(["train", "gtrxl", *TASK, *TINY, *args])


def die(*_: object) -> NoReturn:
    """Simulate the death of the process."""
    raise SystemError("gone")


@contextmanager
def death_expected(save: Callable[..., object] = lambda *_: None) -> Iterator[None]:
    """Expect that the body calls `die`; a killed process saves nothing.

    Args:
        save: replaces the function that saves the agent at the end of a training.
    """
    with patch("rlxf.cli.training_session.save_agent", save), pytest.raises(SystemError):
        yield


def change_config(run: Path, **changes) -> None:
    """Replace values in the ``config.json`` of a run; None removes a value."""
    file = run / "config.json"
    kept = {name: each for name, each in json.loads(file.read_text()).items() if name not in changes}
    file.write_text(json.dumps(kept | {name: each for name, each in changes.items() if each is not None}))


def refused(capsys, *args: str) -> str:
    """Return the one-line error message of a command that exits with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(list(args))
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.err.startswith("rlxf: ")
    assert captured.err.count("\n") == 1
    return captured.err


def wrong_usage(capsys, *args: str) -> str:
    """Return the error message for invalid arguments, without its frame and line breaks."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(args))
    assert exit_info.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def returns_of(checkpoint):
    """Return the returns of some episodes of an agent on a T-Maze with a corridor of 3."""
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 3})
    return evaluate(GTrXLPPO.load(checkpoint, env=env), episodes=6, deterministic=False).returns
