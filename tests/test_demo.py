"""Tests of the demo: its files, and its exit status for untrained agents."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import minari
import numpy as np
import pytest
from demonstration import decision_transformer, gtrxl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.data import ReferenceScores
from rlxf.evaluation import Report, TargetSweep
from rlxf.training import RunFolder
from scripts import demo

DOCUMENTED = {
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
    """Return exit status, folder and output of a demo with a single update of each agent."""
    path = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "EPISODES": 4,
            "TARGET_EPISODES": 2,
            "RECORDED_EPISODES": 64,
            "STAGES": 2,
        }.items():
            patch.setattr(demo, name, value)
        patch.setenv("MINARI_DATASETS_PATH", "")  # the demo sets it; restore it after the test
        patch.setenv("RLXF_CACHE", "")
        with redirect_stdout(io.StringIO()) as shown:
            status = demo.main(demo.Demo(steps=4096, updates=1, run=path))
        return status, path, shown.getvalue()


def events_in(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.thorough
def test_untrained_agent_fails(untrained):
    assert untrained[0] == 1


def test_progress_shows_the_mean_return(untrained):
    assert re.search(r"steps 4,096/4,096 \| return \S+ \|", untrained[2])
    assert re.search(r"updates 1/1 \| loss \S+ \|", untrained[2])


def test_the_normalized_score_is_explained():
    scale = ReferenceScores(0.1, 0.9, "a random policy and an expert")
    report = Report(np.array([0.5, 0.5]), np.array([51, 51]), None, scale)
    sweep = TargetSweep({1.0: report})
    table = demo.table({"GTrXL": report}, sweep, demo.Demo(), 1.0)
    assert "normalized score" in [column.header for column in table.columns]
    caption = " ".join(table.caption.split())
    assert "normalized score: 0 is a return of 0.1, 100 one of 0.9 (a random policy and an expert)" in caption
    assert "4,000 updates" in caption


def test_events_contain_the_documented_tags(untrained):
    events = events_in(untrained[1] / "gtrxl")
    assert set(events.Tags()["scalars"]) >= DOCUMENTED
    assert set(events.Tags()["images"]) == {"attention/maps", "eval/video"}
    assert "weights/layer_1/attention" in events.Tags()["histograms"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_events_contain_the_target_returns(untrained):
    events = events_in(untrained[1] / "decision_transformer")
    expected = {f"eval/target_{target:g}/return_mean" for target in decision_transformer.TARGETS}
    assert set(events.Tags()["scalars"]) >= expected | {"eval/mean_reward"}


def test_run_folders_and_figures(untrained):
    first, second = (RunFolder.open(untrained[1] / name) for name in ("gtrxl", "decision_transformer"))
    assert GTrXLPPO.load(first.final_checkpoint).num_timesteps == 4096
    assert DecisionTransformer.load(second.final_checkpoint).num_timesteps == 1
    assert len(gtrxl.logged(first.path, "rollout/ep_rew_mean")[0]) == 2
    for name in ("curve.png", "target_returns.png"):
        assert (untrained[1] / name).read_bytes().startswith(b"\x89PNG")


def test_each_checkpoint_is_recorded_with_each_share_of_random_actions(untrained, monkeypatch):
    stages = gtrxl.load_stages(RunFolder.open(untrained[1] / "gtrxl"))
    assert [agent.num_timesteps for agent in stages] == [4096, 2048]
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(untrained[1] / "datasets"))
    dataset = minari.load_dataset(decision_transformer.DATASET)
    assert dataset.total_episodes == 64
    played = dataset.storage.metadata["description"].split("; ")
    assert len(played) == len(stages) * len(decision_transformer.RANDOM_SHARES)


def test_first_quarter_of_training_is_not_recorded(untrained):
    longer = RunFolder(untrained[1] / "gtrxl", {"total_timesteps": 4 * 4096})
    assert [agent.num_timesteps for agent in gtrxl.load_stages(longer)] == [4096]


def test_existing_folder_is_not_used():
    names = [path.name for path, _ in zip(demo.numbered(Path("runs/demo")), range(3), strict=False)]
    assert names == ["demo", "demo-2", "demo-3"]


def learned(successes):
    """Return a report of 20 episodes."""
    success = np.arange(20) < successes
    return Report(success.astype(float), np.full(20, 51), success)


def achieved(*returns):
    """Return a sweep over the targets of the demo, with equal returns in all episodes of a target."""
    reports = (Report(np.full(4, value), np.full(4, 51)) for value in returns)
    return TargetSweep(dict(zip(decision_transformer.TARGETS, reports, strict=True)))


@pytest.mark.parametrize(("successes", "status"), [(19, 0), (18, 1)])
def test_success_threshold_is_95_percent(successes, status):
    assert demo.verdict(learned(successes), achieved(*decision_transformer.TARGETS)) == status


@pytest.mark.parametrize(("off", "status"), [(0.09, 0), (-0.09, 0), (0.11, 1), (-0.11, 1)])
@pytest.mark.parametrize("number", range(len(decision_transformer.TARGETS)))
def test_tolerance_of_each_target(number, off, status):
    returns = [target + off * (i == number) for i, target in enumerate(decision_transformer.TARGETS)]
    assert demo.verdict(learned(20), achieved(*returns)) == status


class Recorder:
    """Mock agent whose memory is the indices of environments; it records the states that it receives."""

    def __init__(self):
        self.states = []

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.states.append(state)
        return observation, Indices([0, 1, 2])


class Indices(list):
    def rows(self, rows):
        return Indices(self[row] for row in rows.tolist())


def test_memory_is_exchanged_once_per_episode():
    recorder, state = Recorder(), None
    exchanged = gtrxl.Exchanged(recorder)
    for step in range(2 * 51):
        _, state = exchanged.predict(np.zeros(3), state, np.full(3, step % 51 == 0))
    assert [step for step, memory in enumerate(recorder.states) if memory is None] == [0, 51]
    assert [step for step, memory in enumerate(recorder.states) if memory == [2, 0, 1]] == [25, 76]
