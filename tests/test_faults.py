"""Tests of the fault injection of `scripts/bench.py faults`, with few cases."""

from dataclasses import replace

import pytest
import torch
from benchmarks.broken_envs import BrokenEnvs
from benchmarks.damaged_files import altered, cut_while_written, mutated
from benchmarks.hostile_files import hostile
from benchmarks.killed_commands import COMMANDS, differences, killed_commands
from benchmarks.killed_runs import AGENTS, killed_runs, same
from benchmarks.random_settings import random_settings
from torch.utils.tensorboard import SummaryWriter

from rlxf.training import RunFolder

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


@pytest.mark.first_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_killed_runs_equal_an_uninterrupted_run(tmp_path, name):
    result = killed_runs(name, 1, 0, tmp_path)
    assert result.kills >= 1
    assert result.equal == result.runs > 0


@pytest.mark.first_cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_killed_at_their_end_equal_an_uninterrupted_run(tmp_path, name):
    """The comparison includes files, rows of the log and points of TensorBoard."""
    result = killed_commands(name, 6, 0, tmp_path, only_final=True)
    assert result.failures == {}
    assert result.runs == 6
    assert result.kills > 3  # a run may have fewer operations than the counted one


def test_differences_of_runs_are_detected(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for each in (one, other):
        logger = RunFolder.create(each, {}).make_logger()
        logger.record("loss", 1.0)
        logger.record("time/fps", 3.0 + (each == one))
        logger.dump(5)
        logger.close()
        (each / "checkpoint.zip").write_bytes(b"weights")
    assert differences(one, other) == []
    (other / "checkpoint.zip").write_bytes(b"others")
    with SummaryWriter(str(other)) as writer:
        writer.add_scalar("loss", 1.0, 5)
    with open(other / "progress.csv", "a") as file:
        file.write("1.0,3.0\n")
    assert differences(one, other) == ["checkpoint.zip", "rows", "points"]


def test_differences_of_agents_are_detected(tmp_path):
    agent = AGENTS["GTrXLPPO"][0]()
    agent.save(tmp_path / "one.zip")
    agent.save(tmp_path / "same.zip")
    with torch.no_grad():
        next(agent.policy.parameters()).flatten()[0] += 1e-6
    agent.save(tmp_path / "other.zip")
    assert same(tmp_path / "one.zip", tmp_path / "same.zip")
    assert not same(tmp_path / "one.zip", tmp_path / "other.zip")


@pytest.mark.thorough
def test_killed_writers_leave_the_previous_checkpoint(tmp_path):
    result = cut_while_written(8, 1, tmp_path)
    assert (result.whole, result.wrong) == (8, 0)


def test_altered_files_are_rejected_and_the_previous_one_is_used(tmp_path):
    result = altered(40, 1, tmp_path)
    assert (result.refused, result.missed()) == (40, [])


def test_mutated_files_run_no_code(tmp_path):
    result = mutated(60, 1, tmp_path)
    assert (result.refused, result.missed()) == (60, [])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", AGENTS)
def test_malicious_files_run_no_code_and_need_little_memory(tmp_path, name):
    result = hostile(name, 40, 1, tmp_path)
    assert result.refused + result.whole == result.cases > 30
    assert result.missed() == []


@pytest.mark.parametrize("name", AGENTS)
def test_random_settings_are_trained_or_rejected_at_once(name):
    result = random_settings(name, 20, 2)
    assert result.wrong == 0
    assert result.trained > 0
    assert result.refused > 0


def test_lost_steps_of_a_hanging_environment_are_counted():
    result = BrokenEnvs(n_envs=4, workers=4, n_steps=64, seconds=0.1, every=0.1, timeout=0.3).trained("hangs")
    assert result.restarts > 0
    assert result.lost_steps == result.reported_lost > 0
    assert result.missed() == []
    assert replace(result, reported_lost=result.reported_lost + 1, share=0.79).missed() == [
        f"{result.lost_steps} lost steps, {result.reported_lost + 1} of them reported",
        "the other environments kept 79% of their throughput",
    ]
