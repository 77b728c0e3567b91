"""Tests of the benchmark of the implementation details of DecisionTransformer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import ablation_runs, offline_ablation
from benchmarks.offline_ablation import CHANGES, DETAILS, FullWindows, OfflineAblation, Task
from benchmarks.result_cache import read_runs

from rlxf import collect, evaluate
from rlxf.data import ReferenceScores, load_trajectories
from tests.sources import ROOT

PENDULUM = "pendulum/random-v0"


@pytest.fixture
def pendulum(minari_root):
    """Four random episodes of Pendulum-v1."""
    collect(None, "Pendulum-v1", PENDULUM, episodes=4, n_envs=2)
    return load_trajectories(PENDULUM)


def features_of(agent):
    """Return what a change can affect: settings, modules, windows, weights and buffers."""
    settings = {key: str(value) for key, value in vars(agent.config).items()}
    modules = [type(module) for module in agent.policy.modules()]
    tensors = [value.tolist() for value in agent.policy.state_dict().values()]
    return settings, modules, type(agent.policy.windows(agent._data())), tensors


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_gives_another_agent_that_trains(name, pendulum):
    agents = [CHANGES[each].agent(pendulum, 0) for each in (name, "nothing")]
    own, default = map(features_of, agents)
    assert (own == default) == (name == "nothing")
    agents[0].learn(2)


def test_agents_without_returns_ignore_the_target(pendulum):
    agent = CHANGES["no returns"].agent(pendulum, 0).learn(3)
    report = evaluate(agent, episodes=2, target_returns=[-1500.0, -100.0])
    first, second = report.reports.values()
    assert first.returns.tolist() == second.returns.tolist()


def test_full_windows_end_before_their_episode(pendulum):
    windows = FullWindows(pendulum, length=30)
    drawn = windows.draw(1_000, torch.Generator().manual_seed(0)).numpy()
    within = drawn % 200
    assert within.max() == 170
    assert windows.starting_at(drawn).mask.all()
    long = FullWindows(pendulum, length=300).draw(50, torch.Generator().manual_seed(0)).numpy()
    assert np.isin(long, pendulum.offsets[:-1]).all()


@pytest.mark.usefixtures("benchmarks_in_process")
def test_runs_are_scored_by_the_reference_scores(pendulum, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offline_ablation, "TASKS", {"random": Task(PENDULUM, -900.0)})
    scored = replace(pendulum, reference_scores=ReferenceScores(-5000.0, -4999.0, "a test"))
    monkeypatch.setattr(offline_ablation, "load_trajectories", lambda dataset: scored)
    names = ("nothing", "conditioning=MaxReturn()")
    bench = OfflineAblation(("random",), names, 1, updates=5, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    runs = [ablation_runs.Run(**run) for run in read_runs(bench.output).values()]
    assert [run.change for run in runs] == list(names)
    assert all([step for step, _ in run.curve] == [1, 2, 3, 4, 5] for run in runs)
    assert all(score > 100 for run in runs for _, score in run.curve)  # thousands of ranges of 1
    assert "random: mean score" in capsys.readouterr().out


def test_unknown_changes_are_refused():
    with pytest.raises(ValueError, match="changes must be among"):
        OfflineAblation(changes=("no gradient",))


def test_details_are_those_of_the_page():
    page = (ROOT / "docs/explanation/implementation-details-decision-transformer.md").read_text("utf-8")
    assert all(f"\n| {detail} | **" in page for detail in DETAILS.values() if detail)
