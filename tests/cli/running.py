"""How the tests of commands call them."""

import shlex

import pytest

from rlxf.cli import main

TINY = shlex.split(
    "--n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 --core.memory.length 4"
    " --core.width 8 --core.heads 2 --total-timesteps 64 --episodes 3 --no-progress-bar"
    " --attention-maps-every None --no-videos --evaluate-every 0"
)
TASK = ["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}']


def train(*args: str) -> None:
    """A run of two rollouts on a T-Maze with a corridor of 3."""
    main(["train", "gtrxl", *TASK, *TINY, *args])


def refused(capsys, *args: str) -> str:
    """What is printed when the command leaves with 2: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main(list(args))
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.err.startswith("rlxf: ")
    assert captured.err.count("\n") == 1
    return captured.err


def wrong_usage(capsys, *args: str) -> str:
    """What is printed, its frame and line breaks taken off, when the arguments cannot be read."""
    with pytest.raises(SystemExit) as leaving:
        main(list(args))
    assert leaving.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())
