"""Histograms contain the values that their tags name."""

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.gtrxl.callbacks import HistogramCallback
from rlxf.agents.gtrxl.callbacks.metrics import SAMPLE, parameter_groups, subsample
from tests.agents.gtrxl.callbacks.logged import ROLLOUT, events, learner
from tests.agents.gtrxl.worlds import next_step_scripts, shifted


class Notes(BaseCallback):
    """Copy weights, gradients and rollout data when histograms are recorded."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        groups, buffer = parameter_groups(self.model.policy), self.model.rollout_buffer
        real = buffer.weight == 1
        self.copies = {
            f"rollout/{name}": getattr(buffer, name)[real] for name in ("advantages", "values", "actions")
        }
        for group, parameters in groups.items():
            self.copies[f"weights/{group}"] = flat([p.detach() for p in parameters])
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.copies[f"gradients/{group}"] = flat(gradients)


def flat(parts) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts]).clone()


def same(histogram, numbers: torch.Tensor) -> None:
    values = numbers.flatten().double().numpy()
    assert histogram.num == len(values)
    copies = (histogram.min, histogram.max, histogram.sum, histogram.sum_squares)
    expected = (values.min(), values.max(), values.sum(), (values**2).sum())
    np.testing.assert_allclose(copies, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rollouts", [1, 2])
def test_histograms_match_weights_gradients_and_rollout(tmp_path, rollouts):
    agent, notes = learner(tmp_path, n_epochs=1), Notes()
    agent.learn(rollouts * ROLLOUT, [notes, HistogramCallback(every=1)])
    log = events(tmp_path)
    assert set(log.Tags()["histograms"]) == set(notes.copies)
    assert any(tag.startswith("gradients/") for tag in notes.copies) == (rollouts == 2)
    for tag, numbers in notes.copies.items():
        last = log.Histograms(tag)[-1]
        assert last.step == rollouts * ROLLOUT
        same(last.histogram_value, numbers)


def test_filler_rows_are_excluded(tmp_path):
    agent = learner(tmp_path, env=next_step_scripts(shifted(3)))
    agent.learn(ROLLOUT, HistogramCallback())
    real = int(agent.rollout_buffer.weight.sum())
    assert real < ROLLOUT
    log = events(tmp_path)
    assert log.Histograms("rollout/values")[0].histogram_value.num == real


def test_nonfinite_values_are_left_out(tmp_path):
    agent = learner(tmp_path)
    callback = HistogramCallback()
    agent.learn(2 * ROLLOUT, callback)
    agent.policy.value_net.weight.grad[0, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    agent.policy.value_net.bias.grad[:] = torch.nan
    agent.policy.transformer.norm.weight.grad[:] = torch.nan
    agent.policy.transformer.norm.bias.grad[:] = torch.nan
    callback.record()
    agent.logger.dump(10**6)
    log = events(tmp_path)
    last = log.Histograms("gradients/value_head")[-1]
    assert (last.step, last.histogram_value.num) == (10**6, 16 - 3)
    assert log.Histograms("gradients/final_norm")[-1].step < 10**6


def test_other_log_formats_have_no_histograms(tmp_path):
    agent = learner(tmp_path, formats=("tensorboard", "csv", "json", "log"))
    agent.learn(ROLLOUT, HistogramCallback())
    for name in ("progress.csv", "progress.json", "log.txt"):
        text = (tmp_path / name).read_text()
        assert "fps" in text
        assert "weights" not in text


def test_without_tensorboard_nothing_is_recorded(tmp_path):
    agent, callback = learner(tmp_path, formats=("csv",)), HistogramCallback()
    agent.learn(ROLLOUT, callback)
    callback.record()
    assert not [tag for tag in agent.logger.name_to_value if tag.startswith(("weights", "rollout"))]


@pytest.mark.parametrize("size", [1, 10, SAMPLE - 1, SAMPLE, SAMPLE + 1, 3 * SAMPLE + 7])
def test_sample_is_evenly_spaced(size):
    numbers = torch.arange(size).view(1, size)
    taken = subsample([numbers[:, : size // 3], numbers[:, size // 3 :]], SAMPLE)
    assert len(taken) <= SAMPLE
    assert len(taken) >= min(size, SAMPLE // 2)
    assert taken[0] == 0
    assert len(set(taken.diff().tolist())) <= 1
