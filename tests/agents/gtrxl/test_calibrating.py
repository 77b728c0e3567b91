"""How early a GTrXL may leave: what is promised, and what it does then."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import GTrXLPPO
from rlxf.attention import CALM
from tests.agents.gtrxl.worlds import ACTIONS, scripts, shifted, small_agent, small_core

FALLING = (2.0, 0.5, 0.0)
"""The first is reached by nobody."""


def agent(depth=None, action_space=ACTIONS["Discrete"]):
    core = replace(small_core(), layers=3, depth=depth or CALM("classifier"))
    return small_agent(scripts(shifted(3), action_space=action_space), core=core)


def played(one, **options):
    env = scripts(shifted(3), action_space=one.action_space)
    return one.calibrate(env, **{"thresholds": FALLING, "episodes": 12, "seed": 0} | options)


def test_nobody_does_otherwise_who_takes_all_passes():
    found = played(agent())
    assert found.risk[0] == 0.0
    assert found.depth[0] == 3.0
    assert found.depth[-1] == 1.0
    assert found.risk[-1] > 0.0


def test_the_threshold_is_the_lowest_that_keeps_the_promise_and_is_saved(tmp_path):
    one = agent()
    found = played(one, alpha=0.9, delta=0.5)
    assert found.threshold == FALLING[np.flatnonzero(found.kept)[-1]]
    one.save(tmp_path / "agent.zip")
    read = GTrXLPPO.load(tmp_path / "agent.zip", device="cpu")
    assert float(read.policy.transformer.depth.threshold) == pytest.approx(found.threshold)


def test_the_same_seed_plays_the_same_episodes():
    one = agent()
    assert np.array_equal(played(one).risk, played(one).risk)


@pytest.mark.parametrize("actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(3)], ids=["Box", "bits"])
def test_other_actions(actions):
    assert played(agent(action_space=actions)).risk[0] == 0.0


def test_observations_are_normalised_as_in_training():
    env = VecNormalize(scripts(shifted(3)), norm_reward=False)
    core = replace(small_core(), layers=3, depth=CALM("classifier"))
    one = small_agent(env, core=core)
    env.obs_rms.mean[:], env.obs_rms.var[:] = 5.0, 0.01
    raw = one.calibrate(scripts(shifted(3)), thresholds=(0.5,), episodes=6, seed=0)
    wrapped = VecNormalize(scripts(shifted(3)), norm_reward=False, training=False)
    wrapped.obs_rms = env.obs_rms
    assert np.array_equal(raw.risk, one.calibrate(wrapped, thresholds=(0.5,), episodes=6, seed=0).risk)


def test_a_failure_leaves_the_threshold_as_it_was(monkeypatch):
    one = agent(CALM("classifier", 0.75))
    monkeypatch.setattr(type(one.policy), "act_early", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        played(one)
    assert float(one.policy.transformer.depth.threshold) == 0.75


def test_bad_input():
    with pytest.raises(ValueError, match="only the depth CALM"):
        played(agent(small_core().depth))
    with pytest.raises(ValueError, match="thresholds must fall"):
        played(agent(), thresholds=(0.1, 0.2))
    with pytest.raises(ValueError, match="episodes"):
        played(agent(), episodes=0)
    with pytest.raises(ValueError, match="delta"):
        played(agent(), delta=2.0)
