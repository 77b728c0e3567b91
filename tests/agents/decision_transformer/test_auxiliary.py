"""Tests of auxiliary losses: formula, padding, observations of all kinds, files and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import (
    ElasticHistory,
    MaximumEntropy,
    MaxReturn,
    QRegularized,
    SampledReturn,
)
from rlxf.agents.decision_transformer.auxiliary import next_step_error
from rlxf.attention import CALM, DepthAdaptive
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    OBSERVATIONS,
    replayed,
    small_agent,
    some_trajectories,
)
from tests.ranks import on_ranks

BOTH = {"state_loss_weight": 0.5, "return_loss_weight": 2.0}


def slow_error(predictions, values, mask):
    """Return the error of the docstring by a loop over rows and steps."""
    total, real = 0.0, 0
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            real += int(mask[row, t])
            if t + 1 < mask.shape[1] and mask[row, t] and mask[row, t + 1]:
                total += ((predictions[row, t] - values[row, t + 1]) ** 2).mean().item()
    return total / real


def test_errors_are_those_of_the_next_real_step():
    generator = torch.Generator().manual_seed(0)
    predictions, values = (torch.randn(4, 6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    first = torch.tensor([0, 2, 4, 5])
    mask = torch.arange(6) >= first[:, None]
    mask[1, -1] = False  # windows of whole episodes have padding on both sides
    expected = slow_error(predictions, values, mask)
    assert next_step_error(predictions, values, mask).item() == pytest.approx(expected, rel=1e-12)


def test_padding_has_no_effect_even_if_it_is_not_finite():
    predictions, values = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[False, True, True, True]] * 2)
    expected = next_step_error(predictions, values, mask)
    predictions[:, 0], values[:, 0] = float("nan"), float("inf")
    assert torch.equal(next_step_error(predictions, values, mask), expected)


@pytest.mark.parametrize("core", ["published", "memory", "Gated DeltaNet"])
@pytest.mark.parametrize("weights", [BOTH, {"state_loss_weight": 0.5}, {"return_loss_weight": 2.0}], ids=str)
def test_the_loss_has_the_weighted_errors_of_both_predictions(core, weights):
    agent = small_agent(core=CORES[core], **weights)
    model, data = agent.policy.eval(), agent.trajectories
    batch = agent.windows(data).starting_at([0, 7, 9, 14, 20])
    first, heads = model.burn_in_steps, model.auxiliary.nets
    y = model.outputs(model.steps(batch), slice(None))
    actions = y[:, 2::3]
    observations = (batch.observations - torch.tensor(data.observation_mean)) / torch.tensor(
        data.observation_std
    )
    mask, expected = batch.mask[:, first:], {}
    if "state_loss_weight" in weights:
        expected["state_loss"] = slow_error(heads["state_loss"](actions), observations[:, first:], mask)
    if "return_loss_weight" in weights:
        returns = batch.return_to_go[:, first:, None] / agent.return_scale
        expected["return_loss"] = slow_error(heads["return_loss"](actions), returns, mask)
    total = model.validation_losses(batch)["loss"].item()
    total += sum(weights[f"{name}_weight"] * error for name, error in expected.items())
    parts = {name: value.item() for name, value in model.losses(batch).items()}
    assert parts == pytest.approx(expected | {"loss": total}, rel=1e-5)


@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_all_observations_can_be_predicted(observations):
    data = some_trajectories(OBSERVATIONS[observations])
    agent = small_agent(data, **BOTH).learn(2)
    assert set(agent._update.metrics()) == {"loss", "state_loss", "return_loss", "grad_norm"}
    head = agent.policy.auxiliary.nets["state_loss"]
    assert head.out_features == np.prod(data.observations.shape[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"context": "episode", "core": CORES["GTrXL"]},
        {"objective": MaximumEntropy()},
        {"objective": QRegularized(hidden_sizes=(8,))},
        {"core": CORES["Mamba-2 below attention"]},
    ],
    ids=str,
)
def test_auxiliary_losses_train_the_transformer(options):
    agent = small_agent(**options, **BOTH)
    parts = agent.policy.losses(agent.windows(agent.trajectories).starting_at([0, 4, 15]))
    for name in ("state_loss", "return_loss"):
        gradients = torch.autograd.grad(
            parts[name], [*agent.policy.transformer.parameters()], retain_graph=True, allow_unused=True
        )
        assert any(g is not None and (g != 0).any() for g in gradients), name


@pytest.mark.parametrize("conditioning", [MaxReturn(), SampledReturn(bins=5), ElasticHistory()], ids=repr)
def test_the_state_is_predicted_next_to_predicted_returns(conditioning):
    agent = small_agent(conditioning=conditioning, state_loss_weight=1.0).learn(2)
    assert {"state_loss", "return_loss"} <= set(agent._update.metrics())
    assert [*agent.policy.auxiliary.nets] == ["state_loss"]


def test_a_predictable_state_is_learned():
    steps = np.arange(28, dtype=np.float32)
    observations = np.stack([steps % 2, 1 - steps % 2, steps % 2], axis=1)
    data = some_trajectories(
        observations=observations, observation_mean=observations.mean(0), observation_std=observations.std(0)
    )
    agent = small_agent(data, state_loss_weight=1.0, learning_rate=1e-2, warmup_updates=0)
    agent.learn(60)
    errors = agent._update.metrics()["state_loss"]
    assert errors[-1] < 0.1 * errors[0]


def test_weights_of_zero_make_no_head(tmp_path):
    plain, zero = small_agent(), small_agent(state_loss_weight=0, return_loss_weight=0.0)
    for name, agent in (("plain", plain), ("zero", zero)):
        agent.learn(2).save(tmp_path / name)
    assert (tmp_path / "plain.zip").read_bytes() == (tmp_path / "zero.zip").read_bytes()
    assert zero.policy.auxiliary is None


def test_heads_do_not_affect_acting_and_are_stored(tmp_path):
    data = some_trajectories()
    agent = small_agent(data, **BOTH).learn(3)
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    assert (loaded.state_loss_weight, loaded.return_loss_weight) == (0.5, 2.0)
    chosen = replayed(agent, data)
    np.testing.assert_array_equal(replayed(loaded, data), chosen)
    with torch.no_grad():
        for parameter in loaded.policy.auxiliary.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(replayed(loaded, data), chosen)


def test_a_student_with_heads_is_distilled():
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    student = small_agent(data, **BOTH)
    before = [value.clone() for value in student.policy.auxiliary.parameters()]
    student.distill(small_agent(data, seed=5), 2)
    assert all(map(torch.equal, before, student.policy.auxiliary.parameters()))


EARLY = replace(CORES["published"], depth=DepthAdaptive())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_loss_weight": -1}, ValueError, "state_loss_weight must be a finite number of .* got -1"),
        ({"return_loss_weight": float("nan")}, ValueError, "return_loss_weight must be .* got nan"),
        ({"state_loss_weight": "1"}, TypeError, "state_loss_weight must be a finite number of .* got '1'"),
        (
            {"state_loss_weight": 1, "context_length": 1},
            ValueError,
            "state_loss_weight=1 predicts the next step of a window; use context_length of at least 2",
        ),
        (
            {"return_loss_weight": 0.5, "conditioning": MaxReturn()},
            ValueError,
            r"return_loss_weight=0.5 predicts the return, but so does conditioning=MaxReturn\(.*\); use",
        ),
        (
            {"state_loss_weight": 1, "core": EARLY},
            ValueError,
            "state_loss_weight=1 needs outputs of one depth, but DepthAdaptive",
        ),
        (
            {"return_loss_weight": 1, "core": replace(EARLY, depth=CALM())},
            ValueError,
            "return_loss_weight=1 needs outputs of one depth, but CALM",
        ),
    ],
    ids=str,
)
def test_unsuitable_choices_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        small_agent(**options)


def learned():
    agent = small_agent(core=CORES["memory"], learning_rate=1e-3, **BOTH)
    for group in agent.optimizer.param_groups:
        group["eps"] = 1e-3  # prevents large steps for gradients of rounding errors
    agent.learn(4)
    metrics = {name: values.tolist() for name, values in agent._update.metrics().items()}
    return metrics, {name: value.numpy().copy() for name, value in agent.policy.state_dict().items()}


def test_two_processes_give_the_results_of_one():
    metrics, weights = learned()
    for other_metrics, other_weights in on_ranks(2, learned):
        assert other_metrics == {name: pytest.approx(values, rel=1e-4) for name, values in metrics.items()}
        for name, value in weights.items():
            np.testing.assert_allclose(other_weights[name], value, rtol=0, atol=1e-6, err_msg=name)
