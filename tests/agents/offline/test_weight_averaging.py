"""Tests of averaged weights: formula, acting, files, exact resumption, and other training methods."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from rlxf import BehaviorCloning, DecisionTransformer, ReturnConditionedMLP
from rlxf.agents.decision_transformer import MaximumEntropy, QRegularized
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import CALM, Performer, RoPE, Routing
from rlxf.training import CheckpointError, NumericalError, read_archive, write_archive
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    replayed,
    shown,
    small_agent,
    small_pretraining,
    some_trajectories,
)
from tests.agents.mlp.worlds import small_mlp
from tests.agents.trainings import save_third_update
from tests.ranks import on_ranks

DECAY = 0.8
DROPOUT = CORES["published with dropout"]
MAKERS = {
    "DecisionTransformer": partial(small_agent, core=DROPOUT, learning_rate=1e-2),
    "QRegularized": partial(small_agent, objective=QRegularized(hidden_sizes=(8,)), learning_rate=1e-2),
    "MaximumEntropy": partial(small_agent, objective=MaximumEntropy(), learning_rate=1e-2),
    "Performer": partial(small_agent, core=replace(DROPOUT, kernel=Performer(redraw=2), position=RoPE())),
    "Routing": partial(small_agent, core=replace(DROPOUT, kernel=Routing(2), position=RoPE())),
    "CALM": partial(small_agent, core=replace(DROPOUT, depth=CALM())),
    "episode": partial(small_agent, core=CORES["GTrXL"], context="episode"),
    "BehaviorCloning": partial(small_mlp, "BehaviorCloning", learning_rate=1e-2),
    "ReturnConditionedMLP": partial(small_mlp, "ReturnConditionedMLP", dropout=0.2, learning_rate=1e-2),
    "MaskedPretraining": partial(small_pretraining, learning_rate=1e-2),
}


class Snapshots(BaseCallback):
    """Callback that copies the newest weights after each update."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def _on_step(self):
        model = self.model._update.trained
        self.weights.append({name: x.detach().clone() for name, x in model.named_parameters()})
        return True


def slow_average(history, decay):
    """Return the average of the docstring: a sum over all earlier weights."""
    n = len(history)
    factors = [decay ** (n - i) for i in range(1, n + 1)]
    return {
        name: sum(f * w[name].double() for f, w in zip(factors, history, strict=True)) / sum(factors)
        for name in history[0]
    }


@pytest.mark.parametrize("updates", [1, 2, 6])
@pytest.mark.parametrize("name", MAKERS)
def test_the_policy_is_the_bias_corrected_average_of_the_weights(name, updates):
    history = Snapshots()
    agent = MAKERS[name](weight_averaging=DECAY).learn(updates, history)
    expected = slow_average(history.weights, DECAY)
    for key, value in agent.policy.named_parameters():
        own = history.weights[-1][key] if key.startswith(("loss.critic", "loss.log_temp")) else expected[key]
        torch.testing.assert_close(value, own.to(value.dtype), rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", MAKERS)
def test_averaging_does_not_change_the_trained_weights(name):
    plain, averaged = MAKERS[name]().learn(4), MAKERS[name](weight_averaging=DECAY).learn(4)
    trained = averaged._update.trained.state_dict()
    assert all(torch.equal(value, trained[key]) for key, value in plain.policy.state_dict().items())
    assert any(
        not torch.equal(value, averaged.policy.state_dict()[key])
        for key, value in plain.policy.state_dict().items()
    )


@pytest.mark.parametrize("name", MAKERS)
def test_buffers_are_those_of_the_trained_model(name):
    agent = MAKERS[name](weight_averaging=DECAY).learn(3)
    trained = dict(agent._update.trained.named_buffers())
    for key, value in agent.policy.named_buffers():
        assert torch.equal(value, trained[key]), key


def test_the_agent_acts_by_the_average():
    data = some_trajectories()
    agent = small_agent(data, weight_averaging=DECAY, learning_rate=1e-2).learn(5)
    chosen = replayed(agent, data)
    plain = small_agent(data, learning_rate=1e-2)
    plain.policy.load_state_dict(agent.policy.state_dict())
    np.testing.assert_array_equal(replayed(plain, data), chosen)
    plain.policy.load_state_dict(agent._update.trained.state_dict())
    assert (replayed(plain, data) != chosen).any()


def test_a_critic_and_its_targets_are_not_averaged_again():
    agent = small_agent(objective=QRegularized(hidden_sizes=(8,)), weight_averaging=DECAY).learn(4)
    trained = agent._update.trained.state_dict()
    critic = [key for key in trained if key.startswith(("loss.critic", "loss.target"))]
    assert critic
    assert all(torch.equal(agent.policy.state_dict()[key], trained[key]) for key in critic)


def assert_equal_agents(one, other):
    for a, b in ((one.policy, other.policy), (one._update.trained, other._update.trained)):
        assert all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())
    assert one._average.updates == other._average.updates
    a, b = (agent.optimizer.state_dict()["state"] for agent in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[number][key], b[number][key]) for number in a for key in a[number])


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_training_is_bitwise_equal(tmp_path, name):
    make, file = partial(MAKERS[name], weight_averaging=DECAY), tmp_path / "half.zip"
    whole = make().learn(6)
    make().learn(6, callback=partial(save_third_update, file))
    torch.manual_seed(99)  # a new process has other generator states
    assert_equal_agents(make().learn(6, resume_from=file), whole)


def test_acting_between_updates_does_not_affect_the_training():
    data = some_trajectories()

    def act(local, _):
        local["self"].predict(shown(data, np.array([2, 5])))
        return True

    make = partial(small_agent, data, core=replace(DROPOUT, kernel=Routing(2), position=RoPE()))
    acting, quiet = (make(weight_averaging=DECAY).learn(4, callback) for callback in (act, None))
    assert_equal_agents(acting, quiet)


def test_a_loaded_agent_continues_with_its_average(tmp_path):
    make = partial(small_agent, weight_averaging=DECAY, learning_rate=1e-2, warmup_updates=0)
    first = make().learn(3)
    first.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", some_trajectories(), device="cpu")
    assert_equal_agents(first, loaded)
    assert loaded.weight_averaging == DECAY
    assert_equal_agents(first.learn(2), loaded.learn(2))


def test_averaging_can_be_switched_when_an_agent_is_loaded(tmp_path):
    agent = small_agent(weight_averaging=DECAY).learn(3)
    agent.save(tmp_path / "average.zip")
    plain = DecisionTransformer.load(tmp_path / "average.zip", device="cpu", weight_averaging=None)
    weights = agent.policy.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in plain.policy.state_dict().items())
    plain.save(tmp_path / "plain.zip")
    assert not {"trained_policy", "weight_average"} & read_archive(tmp_path / "plain.zip").tensors.keys()
    again = DecisionTransformer.load(
        tmp_path / "plain.zip", some_trajectories(), device="cpu", weight_averaging=0.5
    )
    assert again._average.updates == 0
    history = Snapshots()
    again.learn(1, history)
    for name, value in again.policy.named_parameters():
        torch.testing.assert_close(value, history.weights[0][name], msg=name)


def test_a_checkpoint_with_another_decay_is_refused(tmp_path):
    small_agent(weight_averaging=DECAY).learn(2).save(tmp_path / "cut.zip")
    for other, text in ((None, "None"), (0.5, "0.5")):
        message = f"its weight_averaging is 0.8, the agent's {text}; build the agent"
        with pytest.raises(ValueError, match=message):
            small_agent(weight_averaging=other).learn(4, resume_from=tmp_path / "cut.zip")


def test_transferred_weights_are_trained():
    source = small_pretraining(weight_averaging=DECAY, learning_rate=1e-2, return_scale=7.0).learn(3)
    agent = small_agent(weight_averaging=DECAY, learning_rate=1e-9).load_pretrained(source).learn(1)
    for model in (agent.policy, agent._update.trained):
        assert model.tokens.return_scale == 7.0
        for name, value in source.policy.transformer.named_parameters():
            torch.testing.assert_close(model.transformer.get_parameter(name), value, atol=1e-6, rtol=0)


def test_a_student_is_averaged():
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    student, history = small_agent(data, weight_averaging=DECAY, learning_rate=1e-2), Snapshots()
    student.distill(small_agent(data, seed=8), 4, callback=history)
    expected = slow_average(history.weights, DECAY)
    for name, value in student.policy.named_parameters():
        torch.testing.assert_close(value, expected[name].float(), rtol=1e-4, atol=1e-6, msg=name)


def test_a_calibration_ends_with_the_next_update():
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    agent = small_agent(data, core=replace(DROPOUT, depth=CALM(confidence="softmax")), weight_averaging=DECAY)
    agent.learn(2)
    rule = agent.policy.transformer.depth.calibratable_exit()
    rule.threshold.fill_(0.123)
    with pytest.warns(
        UserWarning, match="the exit threshold 0.123 was calibrated for weights that now change"
    ):
        agent.learn(2)
    for model in (agent.policy, agent._update.trained):
        assert model.transformer.depth.calibratable_exit().threshold == rule.spec_threshold


def tampered(agent, file, change):
    agent.save(file)
    archive = read_archive(file)
    change(archive.tensors)
    write_archive(file, archive.documents, archive.tensors)
    return file


def with_updates(value):
    return lambda tensors: tensors["weight_average"].update(updates=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("trained_policy"), "trained_policy and weight_average are missing"),
        (lambda tensors: tensors.pop("weight_average"), "trained_policy and weight_average are missing"),
        (with_updates(torch.tensor(-1)), "'updates' is -1, not a count"),
        (with_updates(torch.tensor(1.5)), "'updates' is 1.5, not a count"),
        (with_updates(torch.tensor([1, 2])), r"'updates' is \[1, 2\], not a count"),
        (lambda tensors: tensors["trained_policy"].popitem(), "trained_policy"),
        (
            lambda tensors: next(iter(tensors["trained_policy"].values())).fill_(float("nan")),
            "trained_policy",
        ),
    ],
)
def test_damaged_averages_are_refused(tmp_path, change, message):
    agent = small_agent(weight_averaging=DECAY).learn(2)
    file = tampered(agent, tmp_path / "agent.zip", change)
    with pytest.raises(CheckpointError, match=message):
        DecisionTransformer.load(file, device="cpu")


def test_a_failed_update_leaves_the_average(monkeypatch):
    agent = small_agent(weight_averaging=DECAY).learn(2)
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent._update.trained.tokens.return_scale = float("nan")
    with pytest.raises(NumericalError):
        agent.learn(1)
    assert agent._average.updates == 2
    assert all(torch.equal(value, before[name]) for name, value in agent.policy.state_dict().items())


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, float("nan")])
@pytest.mark.parametrize(
    "kind", [DecisionTransformer, BehaviorCloning, ReturnConditionedMLP, MaskedPretraining]
)
def test_decays_out_of_range_are_errors(kind, value):
    with pytest.raises(ValueError, match=r"weight_averaging must be .* more than 0 and less than 1 or None"):
        kind(some_trajectories(), weight_averaging=value)


def averaged_weights(steps):
    agent = small_agent(core=CORES["memory"], weight_averaging=DECAY, learning_rate=1e-3)
    for group in agent.optimizer.param_groups:
        group["eps"] = 1e-3  # prevents large steps for gradients of rounding errors
    agent.learn(steps)
    return {name: value.numpy().copy() for name, value in agent.policy.state_dict().items()}


def test_the_average_of_two_processes_equals_that_of_one():
    expected = averaged_weights(4)
    one, other = on_ranks(2, averaged_weights, 4)
    for name, value in expected.items():
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        np.testing.assert_allclose(one[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_weights_that_are_set_start_a_new_average():
    agent = small_agent(weight_averaging=0.9, learning_rate=0.0, weight_decay=0.0).learn(5)
    weights = {name: x + 1 for name, x in agent.policy.state_dict().items() if x.is_floating_point()}
    whole = agent.get_parameters()
    whole["policy"] = {**whole["policy"], **weights}
    agent.set_parameters(whole)
    agent.learn(5, reset_num_timesteps=False)
    name = next(name for name, _ in agent.policy.named_parameters())
    assert torch.equal(agent.policy.state_dict()[name], weights[name])


def test_parameters_are_not_read_from_files(tmp_path):
    agent = small_agent()
    agent.save(tmp_path / "agent.zip")
    with pytest.raises(TypeError, match=r"takes the dict of get_parameters.*DecisionTransformer\.load"):
        agent.set_parameters(str(tmp_path / "agent.zip"))
