"""What `scripts/bench.py faults` counts in thousands of cases, in a few: nothing is lost, nothing runs."""

from dataclasses import replace

import pytest
import torch
from benchmarks.broken_envs import BrokenEnvs
from benchmarks.hostile_files import hostile
from benchmarks.hurt_files import altered, cut_while_written, mutated
from benchmarks.killed_commands import COMMANDS, differences, killed_commands
from benchmarks.killed_runs import AGENTS, killed_runs, same
from benchmarks.random_settings import random_settings
from torch.utils.tensorboard import SummaryWriter

from rlxf.training import RunFolder

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_killed_runs_end_with_the_bits_of_one_left_alone(tmp_path, name):
    found = killed_runs(name, 1, 0, tmp_path)
    assert found.kills >= 1
    assert found.equal == found.runs > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_killed_in_their_last_second_end_as_one_left_alone(tmp_path, name):
    """Files, rows of the log and points of TensorBoard."""
    found = killed_commands(name, 12, 0, tmp_path, only_final=True)
    assert found.failures == {}
    assert found.runs == 12
    assert found.kills > 6  # a run may have fewer operations than the one that was counted


def test_runs_with_other_files_rows_or_points_are_told_apart(tmp_path):
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
    assert differences(one, other) == ["checkpoint.zip", "rows", "points in ."]


def test_agents_with_other_bits_are_told_apart(tmp_path):
    agent = AGENTS["GTrXLPPO"][0]()
    agent.save(tmp_path / "one.zip")
    agent.save(tmp_path / "same.zip")
    with torch.no_grad():
        next(agent.policy.parameters()).flatten()[0] += 1e-6
    agent.save(tmp_path / "other.zip")
    assert same(tmp_path / "one.zip", tmp_path / "same.zip")
    assert not same(tmp_path / "one.zip", tmp_path / "other.zip")


def test_writers_that_die_leave_what_was_there(tmp_path):
    found = cut_while_written(8, 1, tmp_path)
    assert (found.whole, found.wrong) == (8, 0)


def test_altered_files_are_named_and_the_one_before_is_used(tmp_path):
    found = altered(40, 1, tmp_path)
    assert (found.refused, found.missed()) == (40, [])


def test_mutated_files_run_nothing(tmp_path):
    found = mutated(60, 1, tmp_path)
    assert (found.refused, found.missed()) == (60, [])


@pytest.mark.parametrize("name", AGENTS)
def test_hostile_files_run_nothing_and_take_no_memory(tmp_path, name):
    found = hostile(name, 40, 1, tmp_path)
    assert found.refused + found.whole == found.cases > 30
    assert found.missed() == []


@pytest.mark.parametrize("name", AGENTS)
def test_any_settings_train_or_are_refused_at_once(name):
    found = random_settings(name, 20, 2)
    assert found.wrong == 0
    assert found.trained > 0
    assert found.refused > 0


def test_steps_of_an_environment_that_hangs_are_counted():
    found = BrokenEnvs(n_envs=4, workers=4, n_steps=64, seconds=0.1, every=0.1, timeout=0.3).trained("hangs")
    assert found.restarts > 0
    assert found.lost_steps == found.told > 0
    assert found.missed() == []
    assert replace(found, told=found.told + 1, share=0.79).missed() == [
        f"{found.lost_steps} steps were counted as lost, {found.told + 1} were",
        "the others kept 79% of their rate",
    ]
