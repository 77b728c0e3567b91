"""Tests of the critic: targets within windows, action values, and the objective that uses them."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf import BehaviorCloning, DecisionTransformer
from rlxf.agents.common.actions import action_encoder
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.offline.objectives import Imitation, QRegularized
from rlxf.agents.offline.objectives.critic import (
    CriticWindows,
    DivergenceCheck,
    TwinQ,
    frozen_copy,
    largest_reward,
    window_targets,
)
from rlxf.attention import CALM
from rlxf.data import DatasetError, Windows
from rlxf.data.splits import split_episodes
from rlxf.training import NumericalError
from tests.agents.decision_transformer.worlds import ACTIONS, shown, small_agent, some_trajectories
from tests.agents.trainings import save_third_update

BOX = spaces.Box(np.array([-2, -1], np.float32), np.array([2, 3], np.float32))


def slow_targets(rewards, values, terminated, discount, n_steps):
    """Return the targets of one window by the formula of the paper, or of the n-step return."""
    n = len(rewards) - 1
    targets = []
    for i in range(n + 1):
        end = n if n_steps is None else min(i + n_steps, n)
        if terminated and (n_steps is None or i + n_steps > n):
            targets.append(sum(discount ** (j - i) * rewards[j] for j in range(i, n + 1)))
            continue
        total = sum(discount ** (j - i) * rewards[j] for j in range(i, end))
        targets.append(total + discount ** (end - i) * values[end])
    return targets


@pytest.mark.parametrize("discount", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("n_steps", [None, 1, 2, 4, 5, 9])
def test_targets_are_discounted_sums_with_a_value(discount, n_steps):
    rewards = torch.randn(6, 5, dtype=torch.float64)
    values, ends = torch.randn(6, 5, dtype=torch.float64), torch.tensor([True, False] * 3)
    expected = [
        slow_targets(r.tolist(), v.tolist(), e.item(), discount, n_steps)
        for r, v, e in zip(rewards, values, ends, strict=True)
    ]
    found = window_targets(rewards, values, ends, discount, n_steps)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_rewards_after_the_last_step_of_an_unfinished_episode_have_no_effect():
    rewards, value, ends = torch.randn(1, 4), torch.tensor([[2.0]]), torch.tensor([False])
    changed = rewards.clone()
    changed[0, -1] = 1e6
    assert torch.equal(*(window_targets(r, value, ends, 0.9) for r in (rewards, changed)))


def test_values_of_discrete_actions_are_expectations_over_probabilities():
    actions = action_encoder(spaces.Discrete(3))
    critic, x = TwinQ(4, actions, (8,)), torch.randn(5, 4)
    each = torch.stack([critic(x, actions(torch.full((5,), a))) for a in range(3)], dim=-1)
    p = torch.rand(5, 3).softmax(dim=-1)
    torch.testing.assert_close(critic(x, p), (each * p).sum(dim=-1))


def test_both_action_values_depend_on_box_actions():
    actions = action_encoder(BOX)
    critic, x, a = TwinQ(4, actions, (8,)), torch.randn(5, 4), torch.randn(5, 2, requires_grad=True)
    for q in critic(x, a):
        (gradient,) = torch.autograd.grad(q.sum(), a, retain_graph=True)
        assert (gradient != 0).all()


def test_a_frozen_copy_has_buffers_in_the_order_of_the_parameters():
    critic = TwinQ(4, action_encoder(BOX), (8, 8))
    target = frozen_copy(critic)
    assert [*target.parameters()] == []
    for buffer, parameter in zip(target.buffers(), critic.parameters(), strict=True):
        assert torch.equal(buffer, parameter)
        assert buffer.data_ptr() != parameter.data_ptr()


@pytest.mark.parametrize("n_steps", [None, 1, 3])
@pytest.mark.parametrize("name", ["Box", "Discrete", "MultiDiscrete"])
def test_the_agent_learns_with_a_critic(name, n_steps):
    data = some_trajectories(action_space=ACTIONS[name])
    objective = QRegularized(hidden_sizes=(16,), n_steps=n_steps)
    agent = small_agent(data, objective=objective, learning_rate=1e-3)
    before = {key: value.clone() for key, value in agent.policy.state_dict().items()}
    agent.learn(3)
    metrics = agent._update.metrics()
    assert {"imitation_loss", "critic_loss", "q", "q_target"} <= set(metrics)
    moved = [key for key, value in agent.policy.state_dict().items() if not torch.equal(value, before[key])]
    for part in ("transformer", "loss.head", "loss.critic", "loss.target"):
        assert any(key.startswith(part) for key in moved), part


def test_target_networks_follow_the_action_values():
    agent = small_agent(objective=QRegularized(target_rate=0.25, hidden_sizes=(8,)))
    loss = agent.policy.loss
    old = [value.clone() for value in loss.target.buffers()]
    agent.learn(1)
    for before, value, after in zip(old, loss.critic.parameters(), loss.target.buffers(), strict=True):
        torch.testing.assert_close(after, before + 0.25 * (value - before))


def test_the_value_term_changes_the_policy_and_not_the_critic():
    agent = small_agent(objective=QRegularized(hidden_sizes=(8,)))
    model, batch = agent.policy, Windows(agent.trajectories, 5).starting_at([0, 3, 11])
    parts = model.losses(batch)
    value = parts["loss"] - parts["imitation_loss"] - parts["critic_loss"]
    critic, head = model.loss.critic.parameters(), model.loss.head.parameters()
    gradients = torch.autograd.grad(value, [*critic], allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in gradients)
    assert all((g != 0).any() for g in torch.autograd.grad(value, [*head], retain_graph=True))
    policy = [p for name, p in model.named_parameters() if not name.startswith("loss.critic")]
    assert all(g is None for g in torch.autograd.grad(parts["critic_loss"], policy, allow_unused=True))


def mean_size_of_q(model, batch):
    """Return the mean of |Q| of the first network over the real steps, at the actions of the policy."""
    windows = model.critic_windows(batch, model.steps(batch))
    y = model.outputs(model.steps(batch))
    q = model.loss.critic(windows.features, model.loss.head.network_action(y))[0]
    return q[windows.mask].abs().mean()


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_weight_of_the_values_grows_to_eta(warmup):
    agent = small_agent(objective=QRegularized(eta=3.0, hidden_sizes=(8,), warmup_updates=warmup))
    model, batch = agent.policy.eval(), Windows(agent.trajectories, 5).starting_at([0, 3, 11])
    for update in range(1, 7):
        parts = model.losses(batch)
        value = (parts["imitation_loss"] + parts["critic_loss"] - parts["loss"]).item()
        weight = value / (parts["q"] / mean_size_of_q(model, batch)).item()
        assert weight == pytest.approx(3.0 * min(1, update / (warmup + 1)), rel=1e-4)
        model.after_update()


def bandit_action(objective):
    """Train on episodes of one step, where 0.8 gives 1 and -0.8 gives 0; return the action for return 0."""
    good = np.arange(60) % 4 == 0
    rewards = good.astype(np.float32)
    data = some_trajectories(
        observation_space=spaces.Box(-1, 1, (1,)),
        action_space=spaces.Box(-1, 1, (1,)),
        lengths=(1,) * 60,
        actions=np.where(good, 0.8, -0.8).astype(np.float32)[:, None],
        rewards=rewards,
        return_to_go=rewards,
    )
    core = decision_transformer(width=16, layers=1, dropout=0.0)
    agent = DecisionTransformer(data, 2, 3e-3, core=core, objective=objective, seed=0, device="cpu")
    agent.learn(150)
    observations = shown(data, np.array([1]))
    assert observations["return_to_go"] == 0
    return agent.predict(observations)[0].item()


@pytest.mark.thorough
def test_the_critic_moves_actions_to_those_of_higher_value():
    assert bandit_action(Imitation()) < -0.5
    assert bandit_action(QRegularized(eta=20.0, hidden_sizes=(32,), warmup_updates=0)) > 0


def test_steps_that_end_an_episode_are_marked():
    data = some_trajectories(lengths=(3, 5), terminated=np.array([True, False]))
    windows = Windows(data, 2)
    assert windows.starting_at([0, 1, 2, 3, 6, 7]).terminated.tolist() == [False, True, True, *[False] * 3]


def test_resumed_training_is_equal(tmp_path):
    objective = QRegularized(hidden_sizes=(8,), warmup_updates=4)
    options = {"objective": objective, "learning_rate": 1e-3}
    whole, file = small_agent(**options).learn(6), tmp_path / "half.zip"
    small_agent(**options).learn(6, callback=partial(save_third_update, file))
    resumed = small_agent(**options).learn(6, resume_from=file)
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name


def test_a_loaded_agent_has_the_objective(tmp_path):
    agent = small_agent(objective=QRegularized(eta=2.0, hidden_sizes=(8, 4), n_steps=2))
    agent.save(tmp_path / "agent.zip")
    assert DecisionTransformer.load(tmp_path / "agent.zip").objective == agent.objective


def test_unsuitable_choices_are_refused():
    for options, message in (
        ({"eta": 0}, "eta must be above 0"),
        ({"discount": 1.0}, "discount must be from 0 to below 1"),
        ({"discount": -0.1}, "discount must be from 0 to below 1"),
        ({"target_rate": 2}, "target_rate must be above 0 and at most 1"),
        ({"target_rate": 0}, "target_rate must be above 0 and at most 1"),
        ({"hidden_sizes": (0,)}, "hidden_sizes must be at least 1"),
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"warmup_updates": -1}, "warmup_updates must be at least 0"),
        ({"hidden_sizes": (1,) * 101}, "hidden_sizes must be at most 100 numbers, got 101"),
    ):
        with pytest.raises(ValueError, match=message):
            QRegularized(**options)
    with pytest.raises(TypeError, match="hidden_sizes must be a sequence of widths"):
        QRegularized(hidden_sizes=5)
    with pytest.raises(ValueError, match="supports one process, got 2"):
        small_agent(objective=QRegularized(hidden_sizes=(8,))).policy.check_processes(2)
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    early = replace(small_agent().core, depth=CALM(confidence="softmax"))
    with pytest.raises(ValueError, match=r"objective=QRegularized\(.* needs outputs of one depth"):
        small_agent(data, objective=QRegularized(), core=early)


def first_metrics(data, updates=3, **changes):
    """Return the means of the metrics of an agent over its first updates."""
    agent = small_agent(data, objective=QRegularized(hidden_sizes=(16,)), learning_rate=1e-3, **changes)
    agent.learn(updates, log_interval=updates + 1)
    return agent._update.pop_metric_means()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_training_does_not_depend_on_the_unit_of_the_rewards(scale):
    data = some_trajectories()
    scaled = replace(data, rewards=data.rewards * scale, return_to_go=data.return_to_go * scale)
    one, other = first_metrics(data), first_metrics(scaled)
    for name in ("loss", "critic_loss", "q", "q_target"):
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


def windows_of(rewards, terminated):
    """Return a batch for a critic with these rewards."""
    rewards, terminated = torch.tensor(rewards), torch.tensor(terminated)
    ones = torch.ones_like(rewards)
    return CriticWindows(ones[..., None], ones[..., None], rewards, ones.bool(), terminated)


def watched(value, rewards):
    """Return the numbers of a batch that a `DivergenceCheck` reads."""
    return torch.stack([torch.tensor(value), largest_reward(windows_of(rewards, [False]))])


def test_the_largest_reward_leaves_out_what_no_target_counts():
    assert largest_reward(windows_of([[1.0, -3.0, 9.0], [0.5, 2.0, 4.0]], [False, True])) == 4.0
    assert largest_reward(windows_of([[1.0, -3.0, 9.0], [0.5, 2.0, 4.0]], [False, False])) == 3.0


def test_values_beyond_what_rewards_allow_are_reported_once():
    check, rewards = DivergenceCheck(0.9), [[2.0, 0.0]]  # no value exceeds 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.check(watched(199.0, rewards))
        DivergenceCheck(0.9).check(watched(9.0, [[0.0, 0.0]]))
    with pytest.warns(UserWarning, match=r"the critic diverges: the mean of \|Q\| is 201 .* exceeds 20"):
        check.check(watched(201.0, rewards))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.check(watched(500.0, rewards))


def test_larger_rewards_allow_larger_values():
    check = DivergenceCheck(0.9)
    check.check(watched(0.0, [[5.0, 0.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.check(watched(499.0, [[0.1, 0.0]]))


def set_values(agent, value):
    """Set the output of both action values."""
    with torch.no_grad():
        for net in agent.policy.loss.critic.nets:
            net[-1].bias.fill_(value)


def test_a_diverging_critic_is_reported():
    agent = small_agent(objective=QRegularized(hidden_sizes=(8,)))
    set_values(agent, 1e7)
    with pytest.warns(UserWarning, match="the critic diverges"):
        agent.learn(1)


def test_a_scale_far_below_that_of_the_data_is_reported_to_the_critic_only():
    data = some_trajectories()
    scaled = replace(data, rewards=data.rewards * 1e12, return_to_go=data.return_to_go * 1e12)
    with pytest.warns(UserWarning, match=r"return_scale=1 is less than 1% of .*leave return_scale=None"):
        small_agent(scaled, objective=QRegularized(hidden_sizes=(8,)), return_scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(scaled, objective=QRegularized(hidden_sizes=(8,)))
        small_agent(data, objective=QRegularized(hidden_sizes=(8,)), return_scale=1.0)
        small_agent(scaled, return_scale=1.0)


def test_a_small_scale_of_copied_weights_is_reported_to_the_critic_only():
    data = some_trajectories()
    source = small_agent(data, return_scale=1e-6)
    with pytest.warns(UserWarning, match="return_scale=1e-06 is less than 1% of"):
        small_agent(data, objective=QRegularized(hidden_sizes=(8,))).load_pretrained(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(data).load_pretrained(source)


def test_values_that_overflow_stop_the_training_before_the_weights_change():
    agent = small_agent(objective=QRegularized(hidden_sizes=(8,)))
    set_values(agent, 1e30)
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    with pytest.warns(UserWarning, match="the critic diverges"), pytest.raises(NumericalError) as raised:
        agent.learn(1)
    assert str(raised.value).startswith("update 1: the loss is nan, critic_loss is nan; this step did not")
    assert all(torch.equal(value, before[name]) for name, value in agent.policy.state_dict().items())


NO_REWARDS = {"rewards": np.zeros(28, np.float32), "return_to_go": np.zeros(28, np.float32)}
NO_ENDS = {"terminated": np.zeros(4, bool), "truncated": np.zeros(4, bool)}


@pytest.mark.filterwarnings("ignore:all 4 episodes:UserWarning", "ignore:4 of 4 episodes:UserWarning")
@pytest.mark.parametrize(
    ("changes", "message"),
    [(NO_REWARDS, "all 28 rewards of the data are 0"), (NO_ENDS, "none of the 4 episodes is terminated or")],
    ids=["rewards", "ends"],
)
def test_data_without_rewards_or_ends_are_refused_by_the_critic_only(changes, message, tmp_path):
    data = some_trajectories(**changes)
    with pytest.raises(DatasetError, match=message):
        small_agent(data, objective=QRegularized())
    small_agent(data).learn(1)
    BehaviorCloning(data, hidden_sizes=(8,), batch_size=8, device="cpu").learn(1)
    small_agent(objective=QRegularized(hidden_sizes=(8,))).save(tmp_path / "agent.zip")
    with pytest.raises(DatasetError, match=message):
        DecisionTransformer.load(tmp_path / "agent.zip", dataset=data)


def sparse_rewards(lengths, **ends):
    """Return data whose only rewards, of 1, are in the last steps of episodes, with returns-to-go of 1."""
    rewards = np.zeros(sum(lengths), np.float32)
    rewards[np.cumsum(lengths) - 1] = 1
    changes = {name: np.full(len(lengths), value) for name, value in ends.items()}
    return some_trajectories(lengths=lengths, rewards=rewards, return_to_go=np.ones_like(rewards), **changes)


@pytest.mark.filterwarnings("ignore:all 4 episodes:UserWarning")
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (6, 3, 5, 4)], ids=["one step", "several steps"])
def test_rewards_that_no_target_contains_are_refused_by_the_critic(lengths):
    """The target of the last step of a truncated episode needs the observation after it."""
    make = partial(small_agent, objective=QRegularized(hidden_sizes=(8,)))
    with pytest.raises(DatasetError, match="all rewards other than 0 are in the last step of an episode"):
        make(sparse_rewards(lengths, terminated=False, truncated=True))
    make(sparse_rewards(lengths, terminated=True, truncated=False))


@pytest.mark.filterwarnings("ignore:all 4 episodes:UserWarning")
def test_a_large_share_of_rewards_that_no_target_contains_is_stated():
    ends = {
        "terminated": np.array([True, True, False, False]),
        "truncated": np.array([False, False, True, True]),
    }
    data = replace(sparse_rewards((6, 3, 5, 4)), **ends)
    with pytest.warns(UserWarning, match="50% of the rewards, by absolute value, are in the last step of an"):
        small_agent(data, objective=QRegularized(hidden_sizes=(8,)))


@pytest.mark.parametrize("held_out", [True, False])
def test_episodes_to_train_on_are_checked_without_those_held_out(held_out):
    rewards = (np.arange(18) == 0).astype(np.float32)
    data = some_trajectories(lengths=(3,) * 6, rewards=rewards, return_to_go=rewards)
    parts = (split_episodes(np.arange(6), 0.5, seed) for seed in count())
    seed = next(seed for seed, (training, _) in enumerate(parts) if (0 not in training) == held_out)
    make = partial(small_agent, data, objective=QRegularized(hidden_sizes=(8,)))
    with pytest.raises(DatasetError, match="all 9 rewards of the data are 0") if held_out else nullcontext():
        make(validation_fraction=0.5, validation_seed=seed)
    make()


def test_data_that_are_only_truncated_are_accepted():
    data = some_trajectories(terminated=np.zeros(4, bool), truncated=np.ones(4, bool))
    assert np.isfinite(first_metrics(data, 1)["critic_loss"])
