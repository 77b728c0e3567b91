"""``rlxf calibrate``: what it leaves in a run, and what is refused."""

import inspect
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.calibration import Calibration
from rlxf.cli import main
from rlxf.cli.calibrate import Calibrate, _told
from rlxf.training import read_archive
from tests.cli.running import refused, train
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

CALM = ["--core.depth", "calm", "--core.depth.confidence", "classifier", "--core.layers", "2"]
EASY = ["--alpha", "0.9", "--delta", "0.9"]
"""A promise that any agent keeps."""


def threshold(path, agent=GTrXLPPO):
    return float(agent.load(path, device="cpu").policy.transformer.depth.threshold)


@pytest.mark.parametrize("seen", [[], ["--normalize-observations"]], ids=["raw", "normalised"])
def test_a_run_gets_its_threshold_and_stays_as_it_was_else(seen, capsys):
    train("--run", "maze", *CALM, *seen)
    before = read_archive("maze/checkpoint.zip")
    main(["calibrate", "maze", "--episodes", "6", "--n-envs", "2", *EASY])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Last checkpoint, step 64" in shown
    assert "threshold 0, saved: maze/checkpoint.zip" in shown
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


def test_evaluations_play_so():
    train("--run", "maze", *CALM)
    main(["calibrate", "maze", "--episodes", "6", *EASY])
    main(["evaluate", "maze", "--episodes", "2", "--n-envs", "2", "--no-progress-bar"])
    events = EventAccumulator("maze/evaluation").Reload()
    assert events.Scalars("eval/mean_depth")[-1].value == 1.0


def test_a_promise_that_cannot_be_kept_lets_nobody_leave(capsys):
    train("--run", "maze", *CALM)
    main(["calibrate", "maze", "--episodes", "2", "--alpha", "0.01", "--delta", "0.01"])
    assert "no threshold keeps the promise" in capsys.readouterr().out
    assert threshold("maze/checkpoint.zip") == math.inf


@pytest.fixture
def offline(minari_root):
    """The folder of a Decision Transformer's run, with a best checkpoint."""
    record_cartpole()
    settings = shlex.split(
        "--run dt --updates 3 --episodes 2 --evaluate-every 2 --context-length 4 --batch-size 4"
        " --core.width 16 --core.heads 2 --no-progress-bar"
    )
    main(["train", "dt", "--dataset", ID, *settings, *CALM])
    return "dt"


@pytest.mark.parametrize("data", [[], ["--dataset", ID]], ids=["its own", "given"])
def test_a_decision_transformer_reads_data(offline, data, capsys):
    main(["calibrate", offline, *EASY, *data])
    shown = capsys.readouterr().out
    for name, heading in (("checkpoint", "Last checkpoint, step 3"), ("best", "Best checkpoint, step 2")):
        assert heading in shown
        assert threshold(f"dt/{name}.zip", DecisionTransformer) == 0.0


def test_what_is_refused_is_told_in_one_line(offline, finished, capsys):
    train("--run", "lasting", *CALM, "--across-episodes")
    train("--run", "adaptive", "--core.depth", "depth-adaptive", "--core.layers", "2")
    for args, message in (
        ([str(finished)], "has a threshold to calibrate, this one has depth=Fixed()"),
        (["adaptive"], "has a threshold to calibrate, this one has depth=DepthAdaptive("),
        (["lasting"], "with across_episodes=True each episode depends on the previous ones"),
        ([offline, "--alpha", "1"], "alpha must lie between 0 and 1, got 1"),
        ([offline, "--delta", "nan"], "delta must be finite, got nan"),
        (["lasting", "--episodes", "0"], "episodes must be at least 1, got 0"),
        ([offline, "--episodes", "9"], "episodes are played by a GTrXLPPO, got 9"),
        ([offline, "--dataset", "test/none-v0"], "test/none-v0"),
        (["lasting", "--dataset", ID], f"datasets are read by a Decision Transformer, got {ID}"),
        (["nowhere"], "there is no run folder nowhere"),
    ):
        assert message in refused(capsys, "calibrate", *args)


def test_what_is_promised_is_as_in_python():
    options = Calibrate.__dataclass_fields__
    for agent in (GTrXLPPO, DecisionTransformer):
        given = inspect.signature(agent.calibrate).parameters
        assert [options[name].default for name in ("alpha", "delta")] == [
            given[name].default for name in ("alpha", "delta")
        ]


@pytest.mark.parametrize(("depth", "told"), [((2.0, 2.0), True), ((2.0, 1.5), False), ((2.0,), False)])
def test_thresholds_that_save_alike_are_told(depth, told):
    """As where CALM compares from the second pass on, and there are two."""
    thresholds = (1.0, 0.5)[: len(depth)]
    found = Calibration(thresholds, np.zeros(len(depth)), np.array(depth), np.ones(len(depth), bool))
    assert ("each threshold takes 2 passes, so none saves more" in _told(found, Path("a.zip"))) == told


def test_several_processes_are_refused_in_one_line(capfd):
    assert on_ranks(2, lambda: main(["calibrate", "run"])) == ["SystemExit: 2"] * 2
    assert "rlxf calibrate supports a single process, got 2" in capfd.readouterr().err
