"""Tests of ``rlxf pack``."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlxf import GTrXLPPO, evaluate
from rlxf.cli import main
from rlxf.envs import make_vec_env
from tests.cli.running import refused, train


def returns_of(checkpoint):
    """Return the returns of some episodes of an agent."""
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 3})
    return evaluate(GTrXLPPO.load(checkpoint, env=env), episodes=6, deterministic=False).returns


def test_packed_agent_has_the_returns_of_the_run(finished, capsys):
    main(["pack", str(finished), "shared/maze", "--commit", "0123abc"])
    assert "are written to shared/maze" in capsys.readouterr().out
    folder = Path("shared/maze")
    assert {each.name for each in folder.iterdir()} == {
        *("README.md", "checkpoint.zip", "config.json", "evaluation.json")
    }
    size = (folder / "checkpoint.zip").stat().st_size
    assert size < 0.5 * (finished / "checkpoint.zip").stat().st_size
    np.testing.assert_array_equal(
        returns_of(folder / "checkpoint.zip"), returns_of(finished / "checkpoint.zip")
    )
    card = (folder / "README.md").read_text()
    assert "(commit 0123abc)" in card
    report = json.loads((finished / "evaluation.json").read_text())["last"]
    assert f"{report['mean']:.4g} ± {report['std']:.2g}" in card


def test_packed_agent_is_played_and_evaluated(finished, capsys):
    main(["pack", str(finished), "maze", "--checkpoint", "best"])
    main(["play", "maze"])
    main(["evaluate", "maze", "--episodes", "2", "--no-progress-bar"])
    shown = capsys.readouterr().out
    assert "episode 1: return" in shown
    assert "Evaluation over 2 episodes" in shown


def test_statistics_are_those_of_the_checkpoint():
    train("--run", "runs/own", "--normalize-observations", "--core.layers", "1", "--episodes", "2")
    main(["pack", "runs/own", "own"])
    assert Path("own/normalizer.zip").read_bytes() == Path("runs/own/normalizer.zip").read_bytes()


def test_existing_folder_is_kept(finished, capsys):
    Path("maze").mkdir()
    Path("maze/own.txt").write_text("own")
    assert "maze exists" in refused(capsys, "pack", str(finished), "maze")
    assert [each.name for each in Path("maze").iterdir()] == ["own.txt"]


def test_folder_that_is_no_run_is_refused(capsys):
    Path("empty").mkdir()
    refused(capsys, "pack", "empty", "maze")
    assert not Path("maze").exists()


def test_packed_agent_cannot_be_resumed(finished, capsys):
    main(["pack", str(finished), "maze"])
    assert refused(capsys, "resume", "maze")


@pytest.mark.parametrize("name", ["checkpoint.zip", "evaluation.json"])
def test_damaged_run_leaves_no_folder(finished, capsys, name):
    main(["pack", str(finished), "copy"])
    Path("copy", name).write_bytes(b"{]")
    refused(capsys, "pack", "copy", "maze")
    assert not Path("maze").exists()
