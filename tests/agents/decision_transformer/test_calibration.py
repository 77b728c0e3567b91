"""Tests of the calibration of the early-exit threshold."""

import math
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from rlxf import DecisionTransformer
from rlxf.attention import CALM, KNNLM, TransformerSpec
from rlxf.data import DatasetError
from tests.agents.decision_transformer.worlds import SIZES, make_loud, shown, some_trajectories

DATA = some_trajectories(action_space=spaces.Discrete(3), lengths=(9, 1, 4, 14) * 10)
LAST = (1.0, 0.75, 0.5, 0.25, 0.0)


def agent(depth=None, data=DATA):
    core = replace(TransformerSpec(**SIZES), layers=4, depth=depth or CALM("softmax"))
    return make_loud(DecisionTransformer(data, 5, core=core, batch_size=8, seed=3, device="cpu"))


def acted(agent, steps):
    """Return the most likely actions of `predict` at some steps of the data, and the layers used."""
    actions, depths = [], []
    for step in steps:
        episode = int(np.searchsorted(DATA.offsets, step, side="right")) - 1
        state, action = None, None
        for now in range(int(DATA.offsets[episode]), step + 1):
            action, state = agent.predict(shown(DATA, np.array([now])), state, deterministic=True)
            depth = agent.mean_predict_depth()
        actions.append(int(action[0]))
        depths.append(depth)
    return np.array(actions), np.array(depths)


@pytest.mark.thorough
def test_measured_risk_and_depth_match_predict():
    one = agent()
    calibration = one.calibrate(0.5, 0.5, LAST, steps=400)
    steps = range(DATA.steps // 10)
    lengths = np.repeat(DATA.lengths[:4], DATA.lengths[:4])
    threshold = one.policy.transformer.depth.threshold
    threshold.fill_(math.inf)
    full, _ = acted(one, steps)
    for number, value in enumerate(LAST):
        threshold.fill_(value)
        actions, depths = acted(one, steps)
        weights = 1 / lengths / 4  # each episode has equal weight
        single = calibration_of_first_episodes(one, value)
        assert abs(((actions != full) * weights).sum() - single.risk[0]) < 0.06
        assert abs((depths * weights).sum() - single.depth[0]) < 0.15
        assert calibration.risk[number] <= calibration.risk[-1] + 1e-9


def calibration_of_first_episodes(one, value):
    """Calibrate with a single threshold on the first four episodes."""
    data = some_trajectories(action_space=spaces.Discrete(3), lengths=(9, 1, 4, 14) * 10)
    data = replace(data, **first_episodes(data, 4))
    return one.calibrate(0.5, 0.5, (value,), steps=2000, dataset=data)


def first_episodes(data, count):
    end = int(data.offsets[count])
    arrays = ("observations", "actions", "rewards", "return_to_go")
    cut = {name: getattr(data, name)[:end] for name in arrays}
    return (
        cut
        | {"offsets": data.offsets[: count + 1]}
        | {name: getattr(data, name)[:count] for name in ("terminated", "truncated")}
    )


def test_the_lowest_valid_threshold_is_chosen_and_saved(tmp_path):
    one = agent()
    calibration = one.calibrate(0.9, 0.5, LAST)
    assert calibration.threshold == LAST[np.flatnonzero(calibration.within_bound)[-1]]
    one.save(tmp_path / "agent.zip")
    read = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    assert (
        read.policy.transformer.depth.threshold
        == one.policy.transformer.depth.threshold
        == calibration.threshold
    )


def test_without_a_valid_threshold_no_token_exits_early():
    one = agent(CALM("softmax", 0.0))
    calibration = one.calibrate(1e-6, 1e-6, (0.5, 0.0))
    assert not calibration.within_bound.any()
    one.predict(shown(DATA, np.array([0, 9])))
    assert one.mean_predict_depth() == 4


def test_equal_seeds_give_equal_risks():
    one, other = (agent().calibrate(0.5, 0.5, LAST, steps=3) for _ in range(2))
    assert np.array_equal(one.risk, other.risk)
    assert "guaranteed" in [column.header for column in one.table().columns]


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="only a core with depth=CALM"):
        agent(TransformerSpec().depth).calibrate()
    with pytest.raises(ValueError, match="thresholds must be strictly decreasing"):
        agent().calibrate(thresholds=(0.5, 0.5))
    with pytest.raises(ValueError, match="thresholds must be strictly decreasing"):
        agent().calibrate(thresholds=())
    with pytest.raises(ValueError, match="decreasing numbers from 1 to 0"):
        agent().calibrate(thresholds=(0.5, -3.0))
    with pytest.raises(TypeError, match="must be a number, got 'a'"):
        agent().calibrate(thresholds=["a"])
    with pytest.raises(ValueError, match="alpha"):
        agent().calibrate(alpha=0.0)
    with pytest.raises(ValueError, match="steps"):
        agent().calibrate(steps=0)


@pytest.mark.parametrize(
    ("observations", "actions", "kind"),
    [
        (DATA.observation_space, spaces.Discrete(9), "action"),
        (spaces.Discrete(2), DATA.action_space, "observation"),
    ],
)
def test_data_of_other_spaces_are_refused(observations, actions, kind):
    data = some_trajectories(observations, actions)
    with pytest.raises(DatasetError, match=f"the {kind}s of dataset must match those of the training data"):
        agent().calibrate(0.5, 0.5, LAST, steps=3, dataset=data)


def test_levels_are_validated_before_any_computation(monkeypatch):
    monkeypatch.setattr("rlxf.agents.decision_transformer.learner.measure_exits", lambda *_: 1 / 0)
    for wrong in ({"alpha": 1.0}, {"delta": 0.0}):
        with pytest.raises(ValueError, match="must be above 0 and below 1"):
            agent().calibrate(**wrong)


def test_training_resets_the_threshold():
    one = agent(CALM("softmax", 0.6))
    one.calibrate(0.9, 0.5, LAST)
    threshold = one.policy.transformer.depth.threshold
    assert threshold != 0.6
    with pytest.warns(UserWarning, match="calibrated for weights that now change.* reset to 0.6"):
        one.learn(1)
    assert threshold == threshold.new_tensor(0.6)


def test_remember_refuses_early_exits():
    with pytest.raises(ValueError, match="exits early"):
        agent().attach_datastore(DATA, KNNLM(2))
