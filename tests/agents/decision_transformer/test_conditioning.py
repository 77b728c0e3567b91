"""Tests of conditioning on returns that the model predicts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer.conditioning import (
    DistributionHead,
    ElasticHistory,
    ExpectileHead,
    HighestValueReturn,
    MaxReturn,
    SampledReturn,
    expectile_loss,
)
from rlxf.agents.decision_transformer.model import DECISION_TOKENS, STEP_START_TOKENS
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import CALM, XL, Window, XLRelative
from rlxf.data import Windows
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    K,
    small_agent,
    some_trajectories,
)

CRITIC = QRegularized(hidden_sizes=(8,))
PREDICTED = {"MaxReturn": MaxReturn(), "SampledReturn": SampledReturn(bins=7)}


@pytest.mark.parametrize("m", [0.5, 0.9, 0.99])
def test_expectile_loss_is_smallest_at_the_expectile(m):
    x = torch.randn(2_000, dtype=torch.float64)
    candidates = torch.linspace(-4, 4, 8_001, dtype=torch.float64)
    best = candidates[torch.stack([expectile_loss(x - c, m).mean() for c in candidates]).argmin()]
    above, below = (x - best).clamp(min=0).mean(), (best - x).clamp(min=0).mean()
    torch.testing.assert_close(m * above, (1 - m) * below, rtol=0.02, atol=1e-3)  # first-order condition
    if m == 0.5:
        torch.testing.assert_close(best, x.mean(), rtol=0, atol=1e-3)


def test_expectile_head_predicts_in_the_units_of_the_data():
    head = ExpectileHead(3, 0.9)
    head.fit(np.array([100.0, 300.0], np.float32))
    y = torch.randn(5, 3)
    predicted = head.choose(y, deterministic=True)
    torch.testing.assert_close(predicted, 100 + 200 * head.net(y)[:, 0])
    torch.testing.assert_close(head.error(y, predicted), torch.zeros(5), rtol=0, atol=1e-10)


def test_distribution_is_tilted_to_high_returns():
    head, y = DistributionHead(3, bins=5, optimality=4.0), torch.randn(2, 3)
    head.fit(np.array([-10.0, 10.0], np.float32))
    p, values = head.net(y).softmax(dim=-1), [-10.0, -5.0, 0.0, 5.0, 10.0]
    for row in range(2):
        weights = [p[row, n].item() * np.exp(4 * (v + 10) / 20) for n, v in enumerate(values)]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert head.choose(y, deterministic=True)[row].item() == pytest.approx(mean, abs=1e-4)
    torch.manual_seed(0)
    samples = head.choose(y[:1].expand(20_000, 3), deterministic=False)
    frequency = torch.stack([(samples == v).float().mean() for v in values])
    torch.testing.assert_close(frequency, head.tilted_probabilities(y)[0], rtol=0, atol=0.02)


def test_error_of_the_distribution_is_that_of_the_nearest_value():
    head, y = DistributionHead(3, bins=3, optimality=1.0), torch.randn(4, 3)
    head.fit(np.array([0.0, 2.0], np.float32))
    error = head.error(y, torch.tensor([0.4, 0.6, 1.2, 1.9]))
    logs = head.net(y).log_softmax(dim=-1)
    torch.testing.assert_close(error, -logs[range(4), [0, 1, 1, 2]])


@pytest.mark.parametrize("conditioning", PREDICTED.values(), ids=PREDICTED)
def test_prediction_depends_on_earlier_returns_only_and_the_action_on_the_newest(conditioning):
    agent = small_agent(conditioning=conditioning)
    model, batch = agent.policy.eval(), Windows(agent.trajectories, K).starting_at([0])
    column = 2
    changed = batch.return_to_go.clone()
    changed[0, column] += 3
    before, after = (
        model.outputs(model.steps(each), slice(None))
        for each in (batch, replace(batch, return_to_go=changed))
    )
    state = (before - after)[0, STEP_START_TOKENS].abs().amax(dim=-1)
    decision = (before - after)[0, DECISION_TOKENS].abs().amax(dim=-1)
    assert (state[: column + 1] == 0).all()
    assert (state[column + 1 :] > 1e-5).all()
    assert (decision[:column] == 0).all()
    assert (decision[column:] > 1e-5).all()


@pytest.mark.parametrize("conditioning", PREDICTED.values(), ids=PREDICTED)
def test_the_token_of_a_predicted_return_contains_the_state(conditioning):
    agent = small_agent(conditioning=conditioning)
    model, batch = agent.policy.eval(), Windows(agent.trajectories, K).starting_at([0])
    steps, tokens = model.steps(batch), agent.policy.tokens
    time = tokens.time(steps.time_steps)
    state = tokens.state_embedding(steps.features)
    returns = tokens.return_embedding(steps.return_to_go[..., None] / tokens.return_scale)
    action = tokens.action_embedding(tokens.actions(steps.actions))
    expected = [tokens.norm(each + time) for each in (state, state + returns, action)]
    torch.testing.assert_close(tokens(steps).unflatten(1, (K, 3)), torch.stack(expected, dim=2))


def test_logits_are_those_of_a_sampled_return():
    """The samples of ``predict`` have these probabilities, with the return that was drawn for each row."""
    agent = small_agent(
        some_trajectories(action_space=ACTIONS["Discrete"]),
        conditioning=SampledReturn(bins=7, optimality=0.0),
    )
    rows = agent.trajectories.encoder.decode(np.repeat(agent.trajectories.observations[:1], 60, axis=0))
    torch.manual_seed(0)
    logits, state = agent.action_logits(rows)
    torch.manual_seed(0)
    _, sampled = agent.predict(rows, deterministic=False)
    assert torch.equal(state.return_to_go, sampled.return_to_go)
    assert len(state.return_to_go[:, -1].unique()) > 3
    assert len(logits.unique(dim=0)) > 3


def plain_observations(data):
    """Yield observations of two environments and their episode starts; the first restarts every 4 steps."""
    for t in range(9):
        yield data.observations[[t, t + 1]], np.array([t % 4 == 0, t == 0])


@pytest.mark.parametrize("conditioning", PREDICTED.values(), ids=PREDICTED)
def test_acting_uses_predicted_returns_as_learned(conditioning):
    agent = small_agent(conditioning=conditioning)
    model, state, played = agent.policy.eval(), None, []
    for observations, start in plain_observations(agent.trajectories):
        actions, state = agent.predict(observations, state, start)
        y = model.outputs(state, slice(None))
        predicted = model.return_head.choose(y[:, STEP_START_TOKENS], deterministic=True)
        torch.testing.assert_close(state.return_to_go[:, -1], predicted[:, -1], rtol=1e-5, atol=1e-5)
        chosen = model.loss.head.choose(y[:, DECISION_TOKENS][:, -1], deterministic=True)
        np.testing.assert_allclose(actions, chosen.detach().numpy(), rtol=1e-5, atol=1e-5)
        played.append(actions)
        assert state.time_steps[:, -1].tolist() == [(len(played) - 1) % 4, len(played) - 1]
    for back in range(K - 1):  # the state holds the actions that were returned
        np.testing.assert_allclose(state.actions[1, -1 - back], played[-1 - back][1], atol=1e-6)


def test_losses_are_those_of_actions_and_returns():
    agent = small_agent(conditioning=MaxReturn(0.8))
    model, batch = agent.policy.eval(), Windows(agent.trajectories, K).starting_at([0, 4])
    parts, y = model.losses(batch), model.outputs(model.steps(batch), slice(None))
    head, mask = model.return_head, batch.mask
    low, high = agent.trajectories.return_to_go.min(), agent.trajectories.return_to_go.max()
    target = (batch.return_to_go - float(low)) / float(high - low)
    u = target - head.net(y[:, STEP_START_TOKENS])[..., 0]
    expected = (torch.where(u < 0, 0.2, 0.8) * u**2)[mask].mean()
    torch.testing.assert_close(parts["return_loss"], expected)
    actions = model.loss.head.error(y[:, DECISION_TOKENS], batch.actions)[mask].mean()
    torch.testing.assert_close(parts["loss"], actions + expected)


@pytest.mark.parametrize("action_space", ["Discrete", "MultiDiscrete"])
@pytest.mark.parametrize("conditioning", PREDICTED.values(), ids=PREDICTED)
def test_the_agent_learns_acts_and_loads(conditioning, action_space, tmp_path):
    data = some_trajectories(action_space=ACTIONS[action_space])
    agent = small_agent(data, conditioning=conditioning)
    agent.learn(2)
    agent.save(tmp_path / "agent.zip")
    loaded, observations = DecisionTransformer.load(tmp_path / "agent.zip"), data.observations[[0, 3]]
    assert loaded.conditioning == conditioning
    actions, state = agent.predict(observations)
    again, other = loaded.predict(observations)
    np.testing.assert_array_equal(actions, again)
    assert torch.equal(state.return_to_go, other.return_to_go)


@pytest.mark.thorough
def test_predicted_returns_approach_those_of_the_best_continuations():
    """Two kinds of episodes begin alike; after training the prediction is near the better return."""
    lengths = (3,) * 40
    rewards = np.zeros(120, np.float32)
    rewards[2::3] = np.where(np.arange(40) % 2, 1.0, 0.0)
    data = some_trajectories(
        lengths=lengths,
        observations=np.tile(np.eye(3, dtype=np.float32), (40, 1)),
        rewards=rewards,
        return_to_go=np.repeat(rewards[2::3], 3),
    )
    for conditioning, low, high in ((MaxReturn(0.5), 0.3, 0.7), (MaxReturn(0.98), 0.8, 1.1)):
        agent = small_agent(data, conditioning=conditioning, learning_rate=3e-3, context_length=3)
        agent.learn(150)
        _, state = agent.predict(data.observations[[0]])
        assert low < state.return_to_go[0, -1].item() < high


def test_unsuitable_choices_are_refused():
    for make, message in (
        (lambda: MaxReturn(1.0), "expectile must be from 0.5 to below 1, got 1.0"),
        (lambda: MaxReturn(0.2), "expectile must be from 0.5 to below 1, got 0.2"),
        (lambda: SampledReturn(bins=1), "bins must be at least 2, got 1"),
        (lambda: SampledReturn(optimality=-1.0), "optimality must not be negative"),
        (lambda: small_agent(conditioning=MaxReturn(), context="episode"), "use context='window'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    early = replace(small_agent().core, depth=CALM(confidence="softmax"))
    with pytest.raises(ValueError, match=r"conditioning=MaxReturn\(.*\) needs outputs of one depth"):
        small_agent(data, conditioning=MaxReturn(), core=early)


def test_elastic_history_acts_from_the_history_with_the_largest_prediction():
    agent = small_agent(conditioning=ElasticHistory(step=2))
    model, state, chosen = agent.policy.eval(), None, set()
    lengths = [*range(K, 0, -2)]
    for observations, start in plain_observations(agent.trajectories):
        _, state = agent.predict(observations, state, start)
        for row in range(2):
            window = state.window.rows(torch.tensor([row]))
            options = []
            for length in lengths:
                y = model.outputs(model_window(window, length), slice(None))[:, -3]
                options.append(model.return_head.choose(y, deterministic=True).item())
            best = int(np.argmax(options))
            assert state.history[row].item() == min(lengths[best], window.mask.sum().item())
            assert window.return_to_go[0, -1].item() == pytest.approx(options[best], rel=1e-4, abs=1e-5)
            y = model.newest_output(state)[row]
            expected = model.outputs(model_window(window, lengths[best]))[0, -1]
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
            chosen.add(lengths[best])
    assert len(chosen) > 1


def model_window(window, length):
    """Return a window that holds the last steps only."""
    mask = window.mask.clone()
    mask[:, : mask.shape[1] - length] = False
    return replace(window, mask=mask)


@pytest.mark.parametrize("action_space", ["Box", "Discrete", "MultiDiscrete"])
@torch.no_grad()
def test_the_return_whose_action_has_the_highest_value_is_chosen(action_space):
    data = some_trajectories(action_space=ACTIONS[action_space])
    agent = small_agent(data, conditioning=HighestValueReturn(candidates=4), objective=CRITIC)
    model, state, chosen = agent.policy.eval(), None, set()
    model.loss.critic.nets[0][-1].weight *= 50  # makes the values of the candidates differ
    model.tokens.return_embedding.weight *= 50
    low, high = data.return_to_go.min(), data.return_to_go.max()
    for observations, start in plain_observations(data):
        actions, state = agent.predict(observations, state, start)
        y = model.outputs(state, slice(None))[:, -3]
        predicted = model.return_head.choose(y, deterministic=True)
        for row in range(2):
            window, values, played = state.rows(torch.tensor([row])), [], []
            candidates = [predicted[row].item(), *np.linspace(low, high, 4)]
            for candidate in candidates:
                changed = window.return_to_go.clone()
                changed[0, -1] = float(candidate)
                y = model.outputs(replace(window, return_to_go=changed))[0, -1]
                action = model.loss.head.choose(y, deterministic=True)
                encoded = model.tokens.actions(action)[None]
                values.append(min(float(q) for q in model.loss.critic(window.features[:, -1], encoded)[:, 0]))
                played.append(action.numpy())
            best = int(np.argmax(values))
            assert window.return_to_go[0, -1].item() == pytest.approx(candidates[best], rel=1e-4, abs=1e-5)
            np.testing.assert_allclose(actions[row], played[best], rtol=1e-4, atol=1e-5)
            chosen.add(best)
    assert len(chosen) > 1


def test_values_of_a_critic_need_one():
    with pytest.raises(ValueError, match=r"which objective=Imitation\(\) does not train; use objective=QReg"):
        small_agent(conditioning=HighestValueReturn())
    for candidates, error in ((1, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="HighestValueReturn candidates"):
            HighestValueReturn(candidates=candidates)


def test_elastic_history_refuses_a_memory():
    core = replace(small_agent().core, memory=XL(6), pattern=Window(7), position=XLRelative())
    with pytest.raises(ValueError, match=r"a memory would add to, got XL\(length=6\); use memory=None"):
        small_agent(conditioning=ElasticHistory(), core=core)


@pytest.mark.parametrize("conditioning", [*PREDICTED.values(), ElasticHistory()], ids=str)
def test_equal_returns_are_refused(conditioning, tmp_path):
    data = some_trajectories()
    data = data.with_rewards(1 / np.repeat(data.lengths, data.lengths))
    with pytest.raises(ValueError, match=r"predicts the return, but all . episodes have the return 1, so"):
        small_agent(data, conditioning=conditioning)
    small_agent(conditioning=conditioning).save(tmp_path / "agent.zip")
    with pytest.raises(ValueError, match="predicts the return, but all"):
        DecisionTransformer.load(tmp_path / "agent.zip", data)


@pytest.mark.parametrize("conditioning", [*PREDICTED.values(), ElasticHistory()], ids=str)
def test_datastores_and_distillation_need_a_target_return(conditioning):
    agent, other = small_agent(conditioning=conditioning), small_agent()
    with pytest.raises(ValueError, match="a datastore needs an agent that acts for a target return"):
        agent.attach_datastore(some_trajectories())
    with pytest.raises(ValueError, match="but the teacher has conditioning="):
        other.distill(agent, 1)
    with pytest.raises(ValueError, match="but the student has conditioning="):
        agent.distill(other, 1)


def test_a_conditioning_without_a_model_is_refused():
    class Other(MaxReturn):
        """Conditioning that no model knows."""

    with pytest.raises(TypeError, match=r"conditioning must be TargetReturn, MaxReturn, .*, got .*Other"):
        small_agent(conditioning=Other())
