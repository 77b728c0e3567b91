"""How the tests of commands call them."""

import shlex

import pytest

from rlxf.cli import main

TINY = shlex.split(
    "--n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 --memory-length 4 --width 8 --heads 2"
    " --total-timesteps 64 --episodes 3 --no-progress-bar"
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
