"""NBCE: reference vectors of the author, and both agents acting from several contexts."""

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.agents.contexts import (
    NBCE,
    AverageNBCE,
    Contexts,
    act_from_contexts,
    nucleus,
    repeat_observation,
)
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online
from tests.attention.oracle import close, load

VECTOR = load("nbce")
BETA, ETA, TOP_P = float(VECTOR["cfg_beta"]), float(VECTOR["cfg_eta"]), 0.95
CONTEXTS = 3


@pytest.mark.parametrize(("column", "out", "top_p"), [(0, "out_plain", 1.0), (1, "out_topp", TOP_P)])
def test_reference_vectors(column, out, top_p):
    nbce, before = NBCE(BETA, ETA, top_p), None
    for logits, expected, chosen in zip(
        VECTOR["in_logits"], VECTOR[out], VECTOR["out_choice"][:, column], strict=True
    ):
        merged, before = nbce(logits, before)
        kept = expected > -1e20
        close(merged[kept], expected[kept])
        assert (merged[~kept] < -1e20).all()
        assert before == chosen


def test_average_of_the_reference_logits():
    """The article's second pooling, ``(beta + 1) mean(l_1 ... l_n) - beta l_0``, by a loop over actions."""
    merger, before = AverageNBCE(BETA), None
    for logits in VECTOR["in_logits"]:
        log_p = logits.log_softmax(dim=-1)
        merged, before = merger(logits, before)
        for action in range(logits.shape[1]):
            mean = sum(float(row[action]) for row in log_p[1:]) / (len(logits) - 1)
            assert float(merged[action]) == pytest.approx((BETA + 1) * mean - BETA * float(log_p[0, action]))
        assert before == 0


def test_average_with_beta_n_minus_1_is_naive_bayes():
    """Contexts of two independent observations give the posterior of both."""
    prior = torch.tensor([0.2, 0.5, 0.3])
    likelihoods = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.7, 0.4]])
    logits = torch.cat([prior[None], prior * likelihoods]).log()
    merged, _ = AverageNBCE(beta=1.0)(logits, None)
    torch.testing.assert_close(merged.softmax(dim=-1), (p := prior * likelihoods.prod(dim=0)) / p.sum())


def test_average_discards_actions_that_a_context_excludes():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1.0, 2.0, 0.0], [1.0, -torch.inf, 0.0]])
    merged, _ = AverageNBCE()(logits, None)
    assert merged[1] == -torch.inf
    assert merged[[0, 2]].isfinite().all()


def test_previous_row_is_kept_if_entropies_are_close():
    surer, sure = torch.tensor([3.0, 0.0]), torch.tensor([2.9, 0.0])
    logits = torch.stack([torch.zeros(2), sure, surer])
    assert NBCE(eta=0.1)(logits, None)[1] == 2
    assert NBCE(eta=0.1)(logits, 1)[1] == 1
    assert NBCE(eta=0.0)(logits, 1)[1] == 2


def test_nucleus_is_minimal():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]).log()
    kept = nucleus(logits, 0.8 - 1e-4) > -1e20
    assert kept.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert torch.equal(nucleus(logits, 1.0), logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -1.0}, "NBCE beta must not be negative, got -1.0"),
        ({"eta": float("nan")}, "NBCE eta must be finite, got nan"),
        ({"top_p": 0.0}, "NBCE top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": "all"}, "NBCE top_p must be a number, got 'all'"),
    ],
)
def test_options_are_in_range(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        NBCE(**options)


def test_beta_of_the_average_is_in_range():
    with pytest.raises(ValueError, match=r"AverageNBCE beta must not be negative, got -1\.0"):
        AverageNBCE(-1.0)


# Agents.


@pytest.fixture(scope="module")
def policy():
    return online.small_agent(online.scripts(online.shifted(1)), n_envs=1).policy


def observations(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, 3)).astype(np.float32)


def state_with_contexts(policy, steps: int = 5):
    """Return a state whose rows have different contexts."""
    state = None
    for step in range(steps):
        _, state = policy.predict(observations(CONTEXTS + 1, step), state)
    return state


def test_gtrxl_action_equals_nbce_of_contexts(policy):
    state, now = state_with_contexts(policy), observations(1, 99)[0]
    rows = np.repeat(now[None], CONTEXTS + 1, axis=0)
    logits, _ = policy.action_logits(rows, state, np.arange(CONTEXTS + 1) == 0)
    merged, chosen = NBCE()(logits, None)
    action, after = act_from_contexts(policy, now, Contexts(state, CONTEXTS + 1))
    assert (action, after.chosen) == (int(merged.argmax()), chosen)
    fresh, _ = policy.action_logits(now[None], None)
    torch.testing.assert_close(logits[0], fresh[0])
    assert (logits[1:] - logits[0]).abs().amax(dim=1).min() > 1e-3


def test_gtrxl_acts_from_the_average_of_contexts(policy):
    contexts = Contexts(state_with_contexts(policy), CONTEXTS + 1)
    for step in range(3):
        now = observations(1, 99 + step)[0]
        rows = np.repeat(now[None], CONTEXTS + 1, axis=0)
        first = np.arange(CONTEXTS + 1) == 0 if step == 0 else None
        logits, _ = policy.action_logits(rows, contexts.state, first)
        action, contexts = act_from_contexts(policy, now, contexts, AverageNBCE())
        assert (action, contexts.chosen) == (int(AverageNBCE()(logits, None)[0].argmax()), 0)


def test_all_rows_of_gtrxl_state_contain_the_action(policy):
    contexts = Contexts(state_with_contexts(policy), CONTEXTS + 1)
    action, after = act_from_contexts(policy, observations(1, 7)[0], contexts)
    taken = policy.encode_actions(torch.full((CONTEXTS + 1,), action))
    assert torch.equal(after.state.action, taken)
    rows, other = observations(CONTEXTS + 1, 8), torch.full((CONTEXTS + 1,), (action + 1) % 3)
    logits, _ = policy.action_logits(rows, after.state)
    other_logits, _ = policy.action_logits(rows, policy.observe_action(after.state, other))
    assert (logits - other_logits).abs().amax(dim=1).min() > 1e-4


def test_contexts_are_not_modified(policy):
    contexts, now = Contexts(state_with_contexts(policy), CONTEXTS + 1), observations(1, 7)[0]
    assert act_from_contexts(policy, now, contexts)[0] == act_from_contexts(policy, now, contexts)[0]
    assert contexts.chosen is None


def test_choices_match_predict(policy):
    state, now = state_with_contexts(policy), observations(CONTEXTS + 1, 99)
    logits, _ = policy.action_logits(now, state)
    assert (policy.predict(now, state, deterministic=True)[0] == logits.argmax(-1).numpy()).all()


def test_decision_transformer_action_equals_nbce_of_contexts():
    data = offline.some_trajectories(action_space=offline.ACTIONS["Discrete"], lengths=(9, 9, 9, 9))
    agent, first = offline.small_agent(data), np.arange(CONTEXTS + 1) * 9
    state = None
    for step in range(3):
        _, state = agent.predict(offline.shown(data, first + step), state)
    now = {key: value[0] for key, value in offline.shown(data, first + 3).items()}
    rows = {key: np.repeat(value[None], CONTEXTS + 1, axis=0) for key, value in now.items()}
    logits, _ = agent.action_logits(rows, state, np.arange(CONTEXTS + 1) == 0)
    assert (logits[1:] - logits[0]).abs().amax(dim=1).min() > 1e-3
    merged, chosen = NBCE()(logits, None)
    action, after = act_from_contexts(agent, now, Contexts(state, CONTEXTS + 1))
    assert (action, after.chosen) == (int(merged.argmax()), chosen)
    assert agent.predict(rows, state)[0].tolist() == agent.action_logits(rows, state)[0].argmax(-1).tolist()


def test_observations_with_parts_are_repeated():
    repeated = repeat_observation(({"a": np.arange(2)}, np.int64(3)), 2)
    assert isinstance(repeated, tuple)
    assert repeated[0]["a"].tolist() == [[0, 1], [0, 1]]
    assert repeated[1].tolist() == [3, 3]


def test_other_action_spaces_are_rejected():
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    policy = online.small_agent(online.scripts(online.shifted(1), action_space=box), n_envs=1).policy
    with pytest.raises(TypeError, match=r"Discrete.*, got Box\("):
        policy.action_logits(observations(1, 0))
    data = offline.some_trajectories()
    with pytest.raises(TypeError, match=r"Discrete.*, got Box\("):
        offline.small_agent(data).action_logits(offline.shown(data, np.array([0])))
