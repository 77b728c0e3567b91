"""Tests of the metrics that updates keep until the next output of the log."""

import pytest
import torch

from rlxf.agents.offline import optimizer_step
from tests.agents.mlp.worlds import small_mlp


def test_metrics_of_a_training_without_log_are_joined_in_order(monkeypatch):
    monkeypatch.setattr(optimizer_step, "JOINED_VALUES", 4)
    agent, losses = small_mlp("BehaviorCloning"), []

    def remember(variables, _):
        losses.append(variables["self"]._update._metrics["loss"][-1][-1].item())

    agent.learn(11, callback=remember, log_interval=None)
    assert agent._update.metrics()["loss"].tolist() == losses
    assert all(len(values) <= 4 for values in agent._update._metrics.values())
    assert agent._update.pop_metric_means()["loss"] == pytest.approx(torch.tensor(losses).mean().item())
    assert agent._update.metrics() == {}
