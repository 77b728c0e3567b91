"""Tests of ``rlxf pack``."""

import ast
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.shared_runs import make_env_expression, python_literal
from rlxf.training import RunFolder
from tests.cli.running import TASK, TINY, refused, returns_of, train
from tests.datasets import ID, record_cartpole


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


NORMALIZED = ["--normalize-observations", "--normalize-rewards", "--previous-reward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["train", "gtrxl", *TASK, *TINY, *NORMALIZED],
        ["train", "dt", "--dataset", ID, "--updates", "2", "--core.width", "8", "--episodes", "2"],
        ["train", "bc", "--dataset", ID, "--updates", "2", "--episodes", "2"],
    ],
    ids=["normalized", "conditioned", "cloned"],
)
def test_the_program_of_a_card_runs(minari_root, words):
    record_cartpole()
    main([*words, "--run", "runs/own", "--no-progress-bar"])
    main(["pack", "runs/own", "own"])
    program = Path("own/README.md").read_text().partition("```python\n")[2].partition("```")[0]
    Path("program.py").write_text(program.replace("range(1000)", "range(40)"))
    env = runpy.run_path("program.py")["env"]
    assert not getattr(env, "training", False)
    spec = env.get_attr("spec")[0]
    assert spec.id == ("CartPole-v1" if ID in words else "rlxf/TMaze-v0")
    assert spec.kwargs.get("corridor_length") == (None if ID in words else 3)


@pytest.mark.parametrize("value", [{"a": [1, None, True, {"b": -0.5}]}, 'it\'s "x"\\\n', "\U0001f600", {}])
def test_literals_of_python(value):
    assert ast.literal_eval(python_literal(value)) == value
    assert python_literal({"a": "b"}) == '{"a": "b"}'


@pytest.mark.parametrize("kwargs", [[1], "abc", 5])
def test_a_damaged_run_has_a_card_without_an_environment(kwargs):
    run = RunFolder(Path("run"), {"env": "CartPole-v1", "env_kwargs": kwargs})
    assert make_env_expression(run, None) is None


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
    message = refused(capsys, "resume", "maze", "--total-timesteps", "999999")
    assert "begin a new run with rlxf train gtrxl --config maze --pretrained maze --run NEW" in message


def test_the_card_does_not_contain_the_absolute_path(finished, tmp_path):
    main(["pack", str(finished), str(tmp_path / "shared" / "maze")])
    card = (tmp_path / "shared" / "maze" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "rlxf evaluate maze" in card


def test_a_checkpoint_that_changed_after_its_evaluation_has_no_results(finished, capsys):
    shutil.copytree(finished, "run")
    agent = GTrXLPPO.load("run/checkpoint.zip", device="cpu")
    agent.num_timesteps += 1
    agent.save("run/checkpoint.zip")
    main(["pack", "run", "packed"])
    assert "run/checkpoint.zip changed after its evaluation" in capsys.readouterr().err
    assert "The agent was not evaluated" in Path("packed/README.md").read_text()
    main(["pack", "run", "best", "--checkpoint", "best"])
    assert "The agent was not evaluated" not in Path("best/README.md").read_text()
    Path("run/evaluation.json").unlink()
    capsys.readouterr()
    main(["pack", "run", "unknown"])
    assert "changed after its evaluation" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoint.zip", "evaluation.json"])
def test_damaged_run_leaves_no_folder(finished, capsys, name):
    main(["pack", str(finished), "copy"])
    Path("copy", name).write_bytes(b"{]")
    refused(capsys, "pack", "copy", "maze")
    assert not Path("maze").exists()
