"""Metrics of attention on memory."""

from dataclasses import replace

import pytest
import torch

from rlxf.agents.gtrxl.callbacks import MemoryCallback
from rlxf.agents.gtrxl.callbacks.metrics import mean_attention_distance, memory_attention_share
from rlxf.attention import Add, Softmax
from tests.agents.gtrxl.callbacks.logged import ROLLOUT, events, learner
from tests.agents.gtrxl.worlds import GOES_ON, scripts, small_core

USE = {f"memory/layer_{n}/{name}" for n in (1, 2) for name in ("attention_on_memory", "attended_distance")}
GATES = {f"memory/layer_{n}/{name}_gate" for n in (1, 2) for name in ("attention", "feed_forward")}


def by_hand(weights, distance, memory) -> tuple[float, float]:
    total = on_memory = back = 0.0
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, weights.shape)).tolist():
        weight = float(weights[b, h, i, j])
        total += weight
        on_memory += weight * (j < memory)
        back += weight * int(distance[b, i, j])
    return on_memory / total, back / total


@pytest.mark.parametrize("total", [1.0, 0.4], ids=["softmax", "softmax1"])
def test_share_and_distance_are_means_over_attention(total):
    generator = torch.Generator().manual_seed(0)
    weights = total * torch.rand(2, 3, 4, 9, generator=generator, dtype=torch.float64).softmax(-1)
    weights[0, :, 1] = 0.0  # a filler row
    distance = torch.arange(4)[:, None] + 5 - torch.arange(9)
    actual = memory_attention_share(weights), mean_attention_distance(weights, distance.expand(2, 4, 9))
    assert actual == pytest.approx(by_hand(weights, distance.expand(2, 4, 9), memory=5))


def test_metrics_of_each_layer_are_logged(tmp_path):
    endless = scripts([[GOES_ON] * 100] * 3)
    agent = learner(tmp_path, env=endless)
    agent.learn(3 * ROLLOUT, MemoryCallback(every=1))
    log = events(tmp_path)
    assert set(log.Tags()["scalars"]) >= USE | GATES | {"memory/filled"}
    for tag in USE | GATES:
        values = [event.value for event in log.Scalars(tag)]
        assert [event.step for event in log.Scalars(tag)] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
        reach = agent.core.memory.length if "distance" in tag else 1
        assert all(0 < value < reach for value in values)


def test_one_step_episodes_have_no_attention_on_memory(tmp_path):
    agent = learner(tmp_path, env=scripts([[1]] * 3))
    agent.learn(ROLLOUT, MemoryCallback())
    log = events(tmp_path)
    for tag in USE:
        assert log.Scalars(tag)[0].value == 0


@pytest.mark.parametrize(
    "core",
    [small_core(residual=Add()), replace(small_core(residual=Add()), kernel=Softmax(softmax1=True))],
    ids=["ungated", "softmax1"],
)
def test_no_gate_metrics_without_gru_gates(tmp_path, core):
    agent = learner(tmp_path, core=core)
    agent.learn(ROLLOUT, MemoryCallback())
    actual = set(events(tmp_path).Tags()["scalars"])
    assert actual >= USE
    assert not actual & GATES


def test_metrics_are_in_other_log_formats(tmp_path):
    learner(tmp_path, formats=("csv",)).learn(ROLLOUT, MemoryCallback())
    assert set((tmp_path / "progress.csv").read_text().splitlines()[0].split(",")) >= USE | GATES
