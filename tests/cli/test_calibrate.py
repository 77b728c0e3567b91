"""Tests of ``rlxf calibrate``: changes of the run, and errors."""

import inspect
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.common.calibration import Calibration
from rlxf.cli import main
from rlxf.cli.commands.calibrate import Calibrate, _describe
from rlxf.training import read_archive
from tests.cli.running import change_config, refused, train
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

CALM = ["--core.depth", "calm", "--core.depth.confidence", "classifier", "--core.layers", "2"]
EASY = ["--alpha", "0.9", "--delta", "0.9"]
"""Risk level at which every threshold passes."""


def threshold(path, agent=GTrXLPPO):
    return float(agent.load(path, device="cpu").policy.transformer.depth.threshold)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("options", [[], ["--normalize-observations"]], ids=["raw", "normalized"])
def test_calibration_changes_only_the_threshold(options, capsys):
    train("--run", "maze", *CALM, *options)
    before = read_archive("maze/checkpoint.zip")
    main(["calibrate", "maze", "--episodes", "6", "--n-envs", "2", *EASY])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Last checkpoint, step 64" in shown
    assert "threshold 0 is saved in maze/checkpoint.zip" in shown
    assert threshold("maze/checkpoint.zip") == 0.0
    after = read_archive("maze/checkpoint.zip")
    assert after.documents == before.documents
    changed = {
        name
        for group, tensors in before.tensors.items()
        for name, tensor in tensors.items()
        if not tensor.equal(after.tensors[group][name])
    }
    assert changed == {"transformer.depth.threshold"}


@pytest.mark.thorough
def test_evaluation_uses_the_threshold():
    train("--run", "maze", *CALM)
    main(["calibrate", "maze", "--episodes", "6", *EASY])
    main(["evaluate", "maze", "--episodes", "2", "--n-envs", "2", "--no-progress-bar"])
    events = EventAccumulator("maze").Reload()
    assert events.Scalars("evaluation/mean_depth")[-1].value == 1.0


def test_early_exit_stays_off_if_no_threshold_passes(capsys):
    train("--run", "maze", *CALM)
    main(["calibrate", "maze", "--episodes", "2", "--alpha", "0.01", "--delta", "0.01"])
    assert "no threshold passes, so early exit stays off" in capsys.readouterr().out
    assert threshold("maze/checkpoint.zip") == math.inf


@pytest.fixture
def offline(minari_root):
    """Folder of a run of a Decision Transformer with a best checkpoint."""
    record_cartpole()
    settings = shlex.split(
        "--run dt --updates 3 --episodes 2 --evaluate-every 2 --context-length 4 --batch-size 4"
        " --core.width 16 --core.heads 2 --no-progress-bar"
    )
    main(["train", "dt", "--dataset", ID, *settings, *CALM])
    return "dt"


@pytest.mark.parametrize("data", [[], ["--dataset", ID]], ids=["training data", "given"])
def test_decision_transformer_is_calibrated_on_data(offline, data, capsys):
    main(["calibrate", offline, *EASY, *data])
    shown = capsys.readouterr().out
    for name, heading in (("checkpoint", "Last checkpoint, update 3"), ("best", "Best checkpoint, update 2")):
        assert heading in shown
        assert threshold(f"dt/{name}.zip", DecisionTransformer) == 0.0


def test_errors_are_one_line(offline, finished, capsys):
    train("--run", "lasting", *CALM, "--persist-memory-across-episodes")
    train("--run", "adaptive", "--core.depth", "depth-adaptive", "--core.layers", "2")
    for args, message in (
        ([str(finished)], "has a threshold to calibrate, this one has depth=Fixed()"),
        (["adaptive"], "has a threshold to calibrate, this one has depth=DepthAdaptive("),
        (["lasting"], "with persist_memory_across_episodes=True each episode depends on the previous ones"),
        ([offline, "--alpha", "1"], "alpha must be above 0 and below 1, got 1"),
        ([offline, "--delta", "nan"], "delta must be finite, got nan"),
        (["lasting", "--episodes", "0"], "episodes must be at least 1, got 0"),
        ([offline, "--episodes", "9"], "--episodes applies to GTrXLPPO only, got 9"),
        ([offline, "--dataset", "test/none-v0"], "test/none-v0"),
        (["lasting", "--dataset", ID], f"--dataset applies to Decision Transformers only, got {ID}"),
        (["nowhere"], "there is no run folder nowhere"),
    ):
        assert message in refused(capsys, "calibrate", *args)


def test_a_context_of_whole_episodes_is_refused_in_one_line(minari_root, capsys):
    record_cartpole()
    options = shlex.split("--updates 2 --episodes 0 --context-length 4 --batch-size 4 --no-progress-bar")
    core = shlex.split(
        "--context episode --core.width 8 --core.layers 2 --core.depth calm --core.recurrence gru"
    )
    main(["train", "dt", "--dataset", ID, "--run", "whole", *options, *core])
    assert "context='episode'" in refused(capsys, "calibrate", "whole")


def test_the_dataset_of_the_run_is_checked(offline, capsys):
    for dataset in (5, [5], [], None):
        change_config(Path(offline), dataset=dataset)
        assert "which must be a list of Minari ids; correct it" in refused(capsys, "calibrate", offline)
    main(["calibrate", offline, *EASY, "--dataset", ID])


def test_default_risk_equals_that_of_the_python_api():
    options = Calibrate.__dataclass_fields__
    for agent in (GTrXLPPO, DecisionTransformer):
        parameters = inspect.signature(agent.calibrate).parameters
        assert [options[name].default for name in ("alpha", "delta")] == [
            parameters[name].default for name in ("alpha", "delta")
        ]


@pytest.mark.parametrize(("depth", "reported"), [((2.0, 2.0), True), ((2.0, 1.5), False), ((2.0,), False)])
def test_thresholds_without_savings_are_reported(depth, reported):
    """With two layers, a CALM that compares consecutive layers exits after the second at the earliest."""
    thresholds = (1.0, 0.5)[: len(depth)]
    calibration = Calibration(thresholds, np.zeros(len(depth)), np.array(depth), np.ones(len(depth), bool))
    message = _describe(calibration, Path("a.zip"))
    assert ("all thresholds exit after 2 passes, so early exit saves no computation" in message) == reported


def test_several_processes_are_rejected(capfd):
    assert on_ranks(2, lambda: main(["calibrate", "run"])) == ["SystemExit: 2"] * 2
    assert "rlxf calibrate supports a single process, got 2" in capfd.readouterr().err
