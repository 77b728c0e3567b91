"""Tests of ``rlxf pack``."""

import ast
import json
import runpy
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.shared_commands import training_command_line
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


def test_a_copy_of_the_best_checkpoint_remains_the_best_one(finished, capsys):
    main(["pack", str(finished), "a", "--checkpoint", "best"])
    main(["pack", "a", "b"])
    main(["pack", str(finished), "c"])
    main(["pack", "c", "d"])
    for folder, name in (("a", "best"), ("b", "best"), ("c", "last"), ("d", "last")):
        assert (
            f"`checkpoint.zip` is the {name} checkpoint of its run" in Path(folder, "README.md").read_text()
        )
        capsys.readouterr()
        main(["evaluate", folder, "--episodes", "2", "--no-progress-bar"])
        assert f"{name.title()} checkpoint, step" in capsys.readouterr().out
    assert not Path("d/shared.json").exists()
    message = refused(capsys, "pack", "a", "e", "--checkpoint", "best")
    assert (
        "a has no best.zip: its checkpoint.zip is the best checkpoint; use it with --checkpoint last"
        in message
    )


@pytest.mark.parametrize(
    "content", ['{"checkpoint": "best.zip"}', '{"checkpoint": ["best"]}', "{}", "[]", "{"]
)
@pytest.mark.parametrize("command", [["pack", "copy", "maze"], ["evaluate", "copy", "--episodes", "2"]])
def test_a_damaged_name_of_the_checkpoint_is_refused(finished, capsys, content, command):
    shutil.copytree(finished, "copy")
    Path("copy/shared.json").write_text(content)
    assert "copy/shared.json" in refused(capsys, *command)


def command_of(folder):
    """Return the words of the command in the card of a folder."""
    block = Path(folder, "README.md").read_text().partition("## Training")[2]
    return shlex.split(block.partition("```bash\n")[2].partition("\n```")[0].replace("\\\n", " "))


def test_the_card_of_a_student_has_its_teacher_and_the_command_of_the_distillation(tmp_path):
    train("--run", "maze")
    options = ["--steps", "32", "--layers", "1", "--temperature", "1.5", "--actor", "teacher"]
    main(["distill", "maze", "--run", "student", *options, "--no-progress-bar", "--trust"])
    main(["pack", "student", "small"])
    assert "distilled from the agent of the run `maze`" in Path("small/README.md").read_text()
    rlxf, *words = command_of("small")
    assert rlxf == "rlxf"
    assert not {"--seed", "--hidden-coef"} & {*words}, "options with their default are left out"
    main([*words, "--run", "again", "--no-progress-bar"])
    for name in ("config.json", "checkpoint.zip"):
        assert Path("again", name).read_bytes() == Path("student", name).read_bytes()
    main(["distill", str(tmp_path / "maze"), "--run", "other", *options, "--no-progress-bar", "--trust"])
    main(["pack", "other", "hidden"])
    assert str(tmp_path) not in Path("hidden/README.md").read_text()
    assert command_of("hidden")[:3] == ["rlxf", "distill", "maze"]


@pytest.mark.parametrize(
    "changes", [{"teacher": 3}, {"teacher": "a\n```"}, {"steps": "x"}, {"core": {}}, {"core": {"width": []}}]
)
def test_the_command_of_a_damaged_student_is_unknown(changes):
    config = {"agent": "gtrxl", "env": "CartPole-v1", "env_kwargs": {}, "teacher": "maze", "steps": 3}
    config |= {"temperature": 2.0, "hidden_coef": 1.0, "actor": "student", "seed": 0, "device": "auto"}
    config |= {"core": {"width": 8, "layers": 1, "heads": 1}}
    assert training_command_line(RunFolder(Path("run"), config)).startswith("rlxf distill maze ")
    assert training_command_line(RunFolder(Path("run"), config | changes)) is None


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
