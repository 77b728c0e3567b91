"""``rlxf evaluate``."""

import inspect
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import evaluate
from rlxf.cli import main
from rlxf.cli.evaluate import Evaluate
from tests.cli.running import refused


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
