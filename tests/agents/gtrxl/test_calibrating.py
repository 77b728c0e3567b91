"""How early a GTrXL may leave: what is promised, and what it does then."""

from dataclasses import replace
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import GTrXLPPO
from rlxf.agents.calibration import check_thresholds
from rlxf.attention import CALM, DepthAdaptive
from tests.agents.gtrxl.worlds import ACTIONS, Scripted, scripts, shifted, small_agent, small_core

FALLING = (1.0, 0.5, 0.0)
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


class Played(gymnasium.Wrapper):
    """Notes what was done to it."""

    done: ClassVar[list[str]] = []

    def step(self, action):
        self.done.append("step")
        return super().step(action)

    def close(self):
        self.done.append("close")
        return super().close()


def played_by_id():
    return Played(Scripted())


@pytest.fixture
def watched():
    Played.done.clear()
    gymnasium.register("rlxf-test/Played-v0", played_by_id)
    yield Played.done
    del gymnasium.registry["rlxf-test/Played-v0"]


def test_what_was_made_is_closed_and_what_was_given_stays_open(watched):
    one = agent()
    one.calibrate("rlxf-test/Played-v0", thresholds=(0.5,), episodes=3, seed=0)
    assert watched.count("close") == one.n_envs
    watched.clear()
    one.calibrate(DummyVecEnv([played_by_id] * 2), thresholds=(0.5,), episodes=3, seed=0)
    assert "close" not in watched


@pytest.mark.parametrize("fails", [{"alpha": 0.0}, {"episodes": 0}, {"thresholds": (0.5, 2.0)}], ids=str)
def test_bad_input_is_told_before_anything_is_played(fails, watched):
    with pytest.raises(ValueError, match=next(iter(fails))):
        agent().calibrate("rlxf-test/Played-v0", **fails)
    assert not watched


@pytest.mark.parametrize("go_on", ["learn", "learn_from"])
def test_learning_takes_the_threshold_back(go_on):
    one = agent(CALM("classifier", 0.75))
    played(one, alpha=0.9, delta=0.5)
    threshold = one.policy.transformer.depth.threshold
    assert threshold != 0.75
    teacher = () if go_on == "learn" else (agent(),)
    with pytest.warns(UserWarning, match="calibrated with other weights.* 0.75 again"):
        getattr(one, go_on)(*teacher, one.n_steps * one.n_envs)
    assert threshold == 0.75
    one.learn(one.n_steps * one.n_envs)  # and says so once


class Calibrates(BaseCallback):
    """Amid a training, as an evaluation might."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        played(self.model, alpha=0.9, delta=0.5)


def test_so_does_each_update():
    one = agent(CALM("classifier", 0.75))
    with pytest.warns(UserWarning, match="calibrated with other weights"):
        one.learn(2 * one.n_steps * one.n_envs, Calibrates())
    assert one.policy.transformer.depth.threshold == 0.75


def test_so_do_the_weights_of_another():
    one, other = agent(), agent()
    played(one, alpha=0.9, delta=0.5)
    with pytest.warns(UserWarning, match="calibrated with other weights"):
        other.take_weights(one)
    assert other.policy.transformer.depth.threshold == 1.0


def test_episodes_that_remember_others_promise_nothing():
    core = replace(small_core(), layers=3, depth=CALM("classifier"))
    one = small_agent(scripts(shifted(3)), core=core, across_episodes=True)
    with pytest.raises(ValueError, match="across_episodes=True each remembers"):
        played(one)


def test_bad_input():
    with pytest.raises(ValueError, match="only the depth CALM"):
        played(agent(small_core().depth))
    with pytest.raises(ValueError, match=r"only the depth CALM.*DepthAdaptive"):
        played(agent(DepthAdaptive()))
    with pytest.raises(ValueError, match="Action spaces do not match"):
        agent().calibrate(scripts(shifted(2), action_space=spaces.Discrete(5)))


@pytest.mark.parametrize("wrong", [(0.1, 0.2), (0.5, 0.5), (), (1.5, 0.5), (0.5, -3.0)], ids=str)
def test_thresholds_fall_from_1_to_0(wrong):
    with pytest.raises(ValueError, match="thresholds must fall, the safest first, within 1 and 0"):
        played(agent(), thresholds=wrong)


@pytest.mark.parametrize("wrong", [{"thresholds": ["a"]}, {"alpha": "a"}, {"delta": None}], ids=str)
def test_what_is_no_number(wrong):
    with pytest.raises(TypeError, match="must be a number, got"):
        played(agent(), **wrong)


def test_thresholds_may_be_numbers_of_numpy():
    check_thresholds(tuple(np.linspace(1, 0, 5, dtype=np.float32)))
