"""Learn then Test: p-values of the authors, and its guarantee; early exits of both agents while acting."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import configure

from rlxf import evaluate
from rlxf.agents.common.calibration import hoeffding_bentkus, select_risk_controlled
from rlxf.attention import ACT, CALM, DepthAdaptive, Fixed, TransformerSpec, Universal
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online
from tests.agents.gtrxl.worlds import ACTIONS
from tests.attention.oracle import load

VECTOR = {name: value.numpy() for name, value in load("calm_ltt").items()}
ALPHA, DELTA = float(VECTOR["cfg_alpha"]), float(VECTOR["cfg_delta"])


def test_p_values_equal_reference():
    losses = VECTOR["in_losses"]
    risk = losses.mean(axis=0)
    np.testing.assert_allclose(risk, VECTOR["out_risk"], rtol=1e-12)
    p = hoeffding_bentkus(risk, len(losses), ALPHA)
    np.testing.assert_allclose(p, VECTOR["out_p_hb_formula"], rtol=1e-9, atol=1e-300)


def test_p_value_at_zero_risk():
    p = hoeffding_bentkus([0.0, 0.2, 0.4], 5, 0.3)
    np.testing.assert_allclose(p.clip(max=1), VECTOR["out_hb_formula_n5"], rtol=1e-9)


def test_settings_before_first_failure_are_selected():
    kept = VECTOR["in_lambdas"][select_risk_controlled(VECTOR["in_losses"], ALPHA, DELTA)]
    np.testing.assert_array_equal(kept, VECTOR["out_valid"])


def test_settings_after_a_failure_are_not_tested():
    losses = np.zeros((200, 3))
    losses[:, 1] = 1.0
    assert select_risk_controlled(losses, 0.1, 0.1).tolist() == [True, False, False]


@pytest.mark.parametrize("samples", [50, 200])
def test_guarantee_fails_at_most_with_probability_delta(samples):
    """True risks rise from 0 to 0.4; the last selected setting may exceed 0.2 only rarely."""
    true = np.linspace(0.0, 0.4, 21)
    rng, broken, daring = np.random.default_rng(0), 0, []
    for _ in range(200):
        losses = (rng.random((samples, 1)) < true).astype(np.float64)
        kept = select_risk_controlled(losses, 0.2, 0.1)
        chosen = true[kept].max() if kept.any() else 0.0
        broken += chosen > 0.2
        daring.append(chosen)
    assert broken <= 0.1 * 200
    assert np.mean(daring) > 0.05


@pytest.mark.parametrize(
    ("losses", "alpha", "delta", "message"),
    [
        (np.zeros((3, 2)), 0.0, 0.1, "alpha"),
        (np.zeros((3, 2)), 0.1, 1.0, "delta"),
        (np.zeros((0, 2)), 0.1, 0.1, "samples"),
        (np.zeros(3), 0.1, 0.1, "samples"),
        (np.full((3, 2), 1.5), 0.1, 0.1, r"in \[0, 1\]"),
        (np.full((3, 2), np.nan), 0.1, 0.1, r"in \[0, 1\]"),
    ],
)
def test_bad_input(losses, alpha, delta, message):
    with pytest.raises(ValueError, match=message):
        select_risk_controlled(losses, alpha, delta)


LEAVING = {
    "CALM, softmax": CALM("softmax", 0.0),
    "CALM, state": CALM("state", 0.0),
    "CALM, classifier": CALM("classifier", 0.0),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
    "ACT": ACT(bias=0.0),
}
each = pytest.mark.parametrize("depth", LEAVING.values(), ids=LEAVING)
CHOICES = spaces.MultiDiscrete([2, 3])


def offline_agent(depth, actions=CHOICES):
    core = replace(TransformerSpec(**offline.SIZES), layers=3, depth=depth)
    return offline.small_agent(offline.some_trajectories(action_space=actions), core=core)


def online_agent(depth, actions=CHOICES):
    core = replace(online.small_core(), layers=3, depth=depth)
    return online.small_agent(online.scripts(online.shifted(3), action_space=actions), core=core)


@each
def test_predict_takes_fewer_passes_and_counts_them(depth):
    agent = online_agent(depth)
    assert agent.mean_predict_depth() is None
    agent.predict(np.zeros((4, 3), np.float32))
    taken = agent.mean_predict_depth()
    assert 1 <= taken <= 3
    assert not isinstance(depth, CALM) or taken == (2 if depth.confidence == "state" else 1)
    assert agent.mean_predict_depth() is None


@each
def test_decision_transformer_takes_fewer_passes(depth):
    agent, data = offline_agent(depth), offline.some_trajectories(action_space=CHOICES)
    agent.predict(offline.shown(data, np.array([0, 3])))
    assert 1 <= agent.mean_predict_depth() <= 3


def test_unreachable_threshold_acts_at_full_depth():
    agent = online_agent(CALM("classifier", 1.0))
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    policy = agent.policy
    initial, same = policy.initial_state(4), policy.initial_state(4)
    start = torch.ones(4, dtype=torch.bool)
    tensor = torch.from_numpy(obs)
    full, _ = policy.act(tensor, initial, initial.advance(start))
    early = policy.act_early(tensor, same, same.advance(start))
    torch.testing.assert_close(early, full)


def test_first_ratio_is_one_despite_early_exits(monkeypatch):
    agent = online_agent(CALM("softmax", 0.0))
    agent.n_epochs, agent.batch_size = 1, agent.n_steps * agent.n_envs
    agent.set_logger(configure(None, []))
    agent.learn(agent.n_steps * agent.n_envs)
    assert abs(agent.logger.name_to_value["train/approx_kl"]) < 1e-6


def logged_depth(agent, folder):
    logger = configure(str(folder), ["csv"])
    evaluate(agent, online.scripts(online.shifted(2), action_space=CHOICES), 2, logger=logger)
    with (folder / "progress.csv").open() as file:
        row = next(csv.DictReader(file))
    return float(row["eval/mean_depth"])


@each
def test_evaluations_log_the_depth(depth, tmp_path):
    assert 1 <= logged_depth(online_agent(depth), tmp_path) <= 3


def test_evaluation_resets_depth_count(tmp_path):
    agent = online_agent(CALM("classifier", 0.0))
    threshold = agent.policy.transformer.depth.threshold
    threshold.fill_(2.0)
    agent.predict(np.zeros((99, 3), np.float32))
    threshold.fill_(0.0)
    assert logged_depth(agent, tmp_path) == 1.0


@pytest.mark.parametrize("depth", [Fixed(), Universal()], ids=str)
def test_fixed_depth_is_not_logged(depth, tmp_path):
    agent = online_agent(depth)
    agent.predict(np.zeros((4, 3), np.float32))
    assert agent.mean_predict_depth() is None
    with pytest.raises(KeyError):
        logged_depth(agent, tmp_path)


def test_rollouts_and_updates_are_not_counted():
    agent = online_agent(ACT())
    agent.learn(agent.n_steps * agent.n_envs)
    assert agent.mean_predict_depth() is None
    assert 1 <= agent.logger.name_to_value["train/mean_depth"] <= 3


@pytest.mark.parametrize("make", [online_agent, offline_agent])
def test_softmax_confidence_is_rejected_for_box_actions(make):
    with pytest.raises(ValueError, match=r"CALM\(confidence='softmax'.*Box"):
        make(CALM("softmax"), ACTIONS["Box"])


def test_sequence_exit_rule_is_rejected():
    with pytest.raises(ValueError, match=r"DepthAdaptive\(classifier='sequence'.*step by step"):
        online_agent(DepthAdaptive("sequence"))


@pytest.mark.parametrize("depth", [CALM("classifier"), DepthAdaptive("geometric")], ids=["CALM", "adaptive"])
@pytest.mark.parametrize("make", [online_agent, offline_agent])
def test_exit_settings_are_saved(make, depth, tmp_path):
    agent = make(depth)
    with torch.no_grad():
        for tensor in agent.policy.transformer.depth.state_dict().values():
            tensor += 0.25
    agent.save(tmp_path / "agent.zip")
    read = type(agent).load(tmp_path / "agent.zip").policy.transformer.depth.state_dict()
    for name, tensor in agent.policy.transformer.depth.state_dict().items():
        assert torch.equal(read[name], tensor)
