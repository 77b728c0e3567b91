"""The demonstration: what it writes, and that it says so when nothing was learned."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from rlxf.evaluation import Report
from rlxf.training import RunFolder
from scripts import demo

PROMISED = {
    "rollout/ep_rew_mean",
    "time/fps",
    "train/policy_gradient_loss",
    "train/value_loss",
    "train/entropy_loss",
    "eval/mean_reward",
    "eval/success_rate",
    "eval/iqm",
    "eval/ci_low",
    "eval/ci_high",
    "memory/filled",
    "memory/layer_1/attention_on_memory",
}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Exit status and folder of a demonstration of one update."""
    path = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "EPISODES", 4)
        patch.setattr(demo, "POINTS", 1)
        return demo.main(demo.Demo(steps=4096, run=path)), path


def test_what_was_not_learned_is_a_failure(untrained):
    assert untrained[0] == 1


def test_the_events_hold_the_promised_tags(untrained):
    events = EventAccumulator(str(untrained[1]))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= PROMISED
    assert set(events.Tags()["images"]) == {"attention/maps", "eval/video"}
    assert "weights/layer_1/attention" in events.Tags()["histograms"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_the_folder_is_a_run_with_a_curve(untrained):
    run = RunFolder.open(untrained[1])
    assert GTrXLPPO.load(run.checkpoint).num_timesteps == 4096
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(demo.logged(run.path, "rollout/ep_rew_mean")[0]) == 2


def test_a_folder_that_exists_is_left_alone(tmp_path):
    options = demo.Demo(run=tmp_path / "demo")
    made = [demo.make_folder(options).path.name for _ in range(3)]
    assert made == ["demo", "demo-2", "demo-3"]


@pytest.mark.parametrize(("successes", "status"), [(19, 0), (18, 1)])
def test_95_percent_are_enough_and_less_is_not(successes, status):
    won = np.arange(20) < successes
    report = Report(won.astype(float), np.full(20, 51), won)
    assert demo.verdict(RunFolder(Path("runs"), {}), report) == status


class Recorder:
    """Stands for an agent; its memory are the mazes' numbers. Keeps what memory it is given."""

    def __init__(self):
        self.given = []

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.given.append(state)
        return observation, Mazes([0, 1, 2])


class Mazes(list):
    def rows(self, rows):
        return Mazes(self[row] for row in rows.tolist())


def test_memories_are_exchanged_once_an_episode():
    recorder, state = Recorder(), None
    exchanged = demo.Exchanged(recorder)
    for step in range(2 * 51):
        _, state = exchanged.predict(np.zeros(3), state, np.full(3, step % 51 == 0))
    assert [step for step, memory in enumerate(recorder.given) if memory is None] == [0, 51]
    assert [step for step, memory in enumerate(recorder.given) if memory == [2, 0, 1]] == [25, 76]
