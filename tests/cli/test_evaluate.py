"""``rlxf evaluate``."""

import inspect
import json
import re
import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO, evaluate
from rlxf.cli import main
from rlxf.cli.evaluate import Evaluate
from tests.cli.running import refused, train


def test_the_default_seed_of_evaluation_is_that_of_python():
    assert (
        Evaluate.__dataclass_fields__["seed"].default
        == inspect.signature(evaluate).parameters["seed"].default
    )


def test_a_run_is_evaluated_on_its_own_task(finished, capsys):
    main(["evaluate", str(finished), "--episodes", "5", "--no-progress-bar"])
    shown = capsys.readouterr().out
    assert "Evaluation over 5 episodes" in shown
    assert re.search(r"mean episode length +│ 4 ", shown)
    events = EventAccumulator(str(finished / "evaluation")).Reload()
    assert events.Scalars("eval/mean_reward")[-1].step == 64


@pytest.mark.parametrize(
    ("args", "length"),
    [(["--env-kwargs", '{"corridor_length": 8}'], 9), (["--env", "rlxf/TMaze-v0"], 51)],
    ids=["changed", "another"],
)
def test_a_run_is_evaluated_on_another_task(finished, capsys, args, length):
    main(["evaluate", str(finished), "--episodes", "2", "--no-progress-bar", *args])
    assert re.search(rf"mean episode length +│ {length} ", capsys.readouterr().out)


@pytest.mark.parametrize("args", [[], ["--env", "rlxf/TMazeActive-v0"]], ids=["own", "another"])
def test_what_was_added_to_observations_is_added_again(args, capsys):
    train("--run", "with", "--previous-reward", "--no-previous-action")
    agent = GTrXLPPO.load("with/checkpoint.zip")
    assert "previous_reward" in agent.observation_space.spaces
    assert not agent.previous_action
    main(["evaluate", "with", "--episodes", "2", "--no-progress-bar", *args])
    assert "Evaluation over 2 episodes" in capsys.readouterr().out


def test_a_run_of_before_there_was_a_choice_is_evaluated(finished, tmp_path):
    config = json.loads((finished / "config.json").read_text())
    del config["previous_reward"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(finished / "checkpoint.zip", tmp_path)
    main(["evaluate", str(tmp_path), "--episodes", "2", "--no-progress-bar"])


def test_what_is_no_run_is_not_evaluated(capsys, tmp_path):
    assert "nowhere" in refused(capsys, "evaluate", "nowhere")
    assert "config.json" in refused(capsys, "evaluate", str(tmp_path))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--n-envs", "-1"], "n_envs must be at least 1, got -1"),
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1"], "(4,)"),
    ],
)
def test_a_run_is_not_evaluated_on_what_does_not_fit(args, named, finished, capsys):
    assert named in refused(capsys, "evaluate", str(finished), *args)


@pytest.mark.faults
def test_a_broken_checkpoint_is_refused(finished, capsys, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((finished / "config.json").read_bytes())
    (broken / "checkpoint.zip").write_bytes((finished / "checkpoint.zip").read_bytes()[:-100])
    assert "checkpoint.zip" in refused(capsys, "evaluate", str(broken))
