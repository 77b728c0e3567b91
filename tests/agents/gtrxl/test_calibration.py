"""Calibration of the exit threshold of a GTrXL."""

from dataclasses import replace
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import GTrXLPPO
from rlxf.agents.common.calibration import check_thresholds
from rlxf.attention import CALM, DepthAdaptive
from rlxf.envs import Curriculum, make_vec_env
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    RECURRENT_CORES,
    Scripted,
    scripts,
    shifted,
    small_agent,
    small_core,
)

FALLING = (1.0, 0.5, 0.0)
"""The first threshold is never reached."""


def agent(depth=None, action_space=ACTIONS["Discrete"]):
    core = replace(small_core(), layers=3, depth=depth or CALM("classifier"))
    return small_agent(scripts(shifted(3), action_space=action_space), core=core)


def calibrate_small(one, **options):
    env = scripts(shifted(3), action_space=one.action_space)
    return one.calibrate(env, **{"thresholds": FALLING, "episodes": 12, "seed": 0} | options)


def test_unreachable_threshold_has_no_risk():
    calibration = calibrate_small(agent())
    assert calibration.risk[0] == 0.0
    assert calibration.depth[0] == 3.0
    assert calibration.depth[-1] == 1.0
    assert calibration.risk[-1] > 0.0


@pytest.mark.parametrize("name", ["GatedDeltaNet", "Mamba-2 below attention"])
def test_each_threshold_has_its_own_recurrent_state(name):
    core = replace(RECURRENT_CORES[name], layers=3, depth=CALM("classifier"))
    calibration = calibrate_small(small_agent(scripts(shifted(3)), core=core))
    assert (calibration.risk[0], calibration.depth[0], calibration.depth[-1]) == (0.0, 3.0, 1.0)
    assert calibration.risk[-1] > 0.0


def test_threshold_is_lowest_guaranteed_and_is_saved(tmp_path):
    one = agent()
    calibration = calibrate_small(one, alpha=0.9, delta=0.5)
    assert calibration.threshold == FALLING[np.flatnonzero(calibration.within_bound)[-1]]
    one.save(tmp_path / "agent.zip")
    read = GTrXLPPO.load(tmp_path / "agent.zip", device="cpu")
    assert float(read.policy.transformer.depth.threshold) == pytest.approx(calibration.threshold)


def test_same_seed_gives_same_risk():
    one = agent()
    assert np.array_equal(calibrate_small(one).risk, calibrate_small(one, seed=np.int64(0)).risk)


@pytest.mark.parametrize("actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(3)], ids=["Box", "bits"])
def test_other_action_spaces(actions):
    assert calibrate_small(agent(action_space=actions)).risk[0] == 0.0


def test_observations_are_normalized_as_in_training():
    env = VecNormalize(scripts(shifted(3)), norm_reward=False)
    core = replace(small_core(), layers=3, depth=CALM("classifier"))
    one = small_agent(env, core=core)
    env.obs_rms.mean[:], env.obs_rms.var[:] = 5.0, 0.01
    raw = one.calibrate(scripts(shifted(3)), thresholds=(0.5,), episodes=6, seed=0)
    wrapped = VecNormalize(scripts(shifted(3)), norm_reward=False, training=False)
    wrapped.obs_rms = env.obs_rms
    assert np.array_equal(raw.risk, one.calibrate(wrapped, thresholds=(0.5,), episodes=6, seed=0).risk)


def test_statistics_of_the_training_are_not_changed():
    env = VecNormalize(scripts(shifted(3)), norm_reward=False)
    one = small_agent(env, core=replace(small_core(), layers=3, depth=CALM("classifier")))
    one.learn(one.n_steps * one.n_envs)
    before = env.obs_rms.mean.copy(), env.obs_rms.count
    one.calibrate(one.get_env(), thresholds=(0.5,), episodes=6, seed=0)
    assert (env.obs_rms.mean == before[0]).all()
    assert env.obs_rms.count == before[1]
    assert env.training


def test_missing_statistics_are_refused():
    one = agent()
    one.normalized_observations = True
    with pytest.raises(ValueError, match="calibrate needs the statistics of VecNormalize"):
        one.calibrate(scripts(shifted(3)), thresholds=(0.5,), episodes=6)


def test_the_task_of_a_curriculum_is_its_last_stage():
    """Its risk would be that of an easier task."""
    lengths = []
    curriculum = Curriculum([{"corridor_length": 1}], advance_return=100.0)
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 6}, curriculum=curriculum)
    core = replace(small_core(), layers=3, depth=CALM("classifier"))
    one = small_agent(scripts(shifted(1), env.observation_space, env.action_space), core=core)
    step_wait = env.step_wait

    def step():
        results = step_wait()
        lengths.extend(info["episode"]["l"] for info in results[3] if "episode" in info)
        return results

    env.step_wait = step
    one.calibrate(env, thresholds=(0.5,), episodes=4)
    assert set(lengths) == {7}


def test_failure_keeps_threshold(monkeypatch):
    one = agent(CALM("classifier", 0.75))
    monkeypatch.setattr(type(one.policy), "act_early", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate_small(one)
    assert float(one.policy.transformer.depth.threshold) == 0.75


class Played(gymnasium.Wrapper):
    """Record calls of step and close."""

    done: ClassVar[list[str]] = []

    def step(self, action):
        self.done.append("step")
        return super().step(action)

    def close(self):
        self.done.append("close")
        return super().close()


def make_recorded_env():
    return Played(Scripted())


@pytest.fixture
def watched():
    Played.done.clear()
    gymnasium.register("rlxf-test/Played-v0", make_recorded_env)
    yield Played.done
    del gymnasium.registry["rlxf-test/Played-v0"]


def test_only_environments_made_from_id_are_closed(watched):
    one = agent()
    one.calibrate("rlxf-test/Played-v0", thresholds=(0.5,), episodes=3, seed=0)
    assert watched.count("close") == one.n_envs
    watched.clear()
    one.calibrate(DummyVecEnv([make_recorded_env] * 2), thresholds=(0.5,), episodes=3, seed=0)
    assert "close" not in watched


@pytest.mark.parametrize("fails", [{"alpha": 0.0}, {"episodes": 0}, {"thresholds": (0.5, 2.0)}], ids=str)
def test_bad_input_is_rejected_before_first_step(fails, watched):
    with pytest.raises(ValueError, match=next(iter(fails))):
        agent().calibrate("rlxf-test/Played-v0", **fails)
    assert not watched


@pytest.mark.parametrize("go_on", ["learn", "distill"])
def test_training_resets_threshold(go_on):
    one = agent(CALM("classifier", 0.75))
    calibrate_small(one, alpha=0.9, delta=0.5)
    threshold = one.policy.transformer.depth.threshold
    assert threshold != 0.75
    teacher = () if go_on == "learn" else (agent(),)
    with pytest.warns(UserWarning, match="calibrated for weights that now change.* reset to 0.75"):
        getattr(one, go_on)(*teacher, one.n_steps * one.n_envs)
    assert threshold == 0.75
    one.learn(one.n_steps * one.n_envs)  # no second warning


class Calibrates(BaseCallback):
    """Calibrate during training, as an evaluation callback may do."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        calibrate_small(self.model, alpha=0.9, delta=0.5)


def test_each_update_resets_threshold():
    one = agent(CALM("classifier", 0.75))
    with pytest.warns(UserWarning, match="calibrated for weights that now change"):
        one.learn(2 * one.n_steps * one.n_envs, Calibrates())
    assert one.policy.transformer.depth.threshold == 0.75


def test_loading_weights_resets_threshold():
    one, other = agent(), agent()
    calibrate_small(one, alpha=0.9, delta=0.5)
    with pytest.warns(UserWarning, match="calibrated for weights that now change"):
        other.load_pretrained(one)
    assert other.policy.transformer.depth.threshold == 1.0


def test_memory_across_episodes_is_rejected():
    core = replace(small_core(), layers=3, depth=CALM("classifier"))
    one = small_agent(scripts(shifted(3)), core=core, persist_memory_across_episodes=True)
    with pytest.raises(ValueError, match="persist_memory_across_episodes=True each episode depends"):
        calibrate_small(one)


def test_bad_input():
    with pytest.raises(ValueError, match="only a core with depth=CALM"):
        calibrate_small(agent(small_core().depth))
    with pytest.raises(ValueError, match=r"only a core with depth=CALM.*DepthAdaptive"):
        calibrate_small(agent(DepthAdaptive()))
    with pytest.raises(ValueError, match="the environments do not fit the agent: action space"):
        agent().calibrate(scripts(shifted(2), action_space=spaces.Discrete(5)))
    with pytest.raises(TypeError, match=r"env must be a Gymnasium id, an Env, .* got None"):
        agent().calibrate(None)


@pytest.mark.parametrize("wrong", [(0.1, 0.2), (0.5, 0.5), (), (1.5, 0.5), (0.5, -3.0)], ids=str)
def test_thresholds_must_decrease_from_1_to_0(wrong):
    with pytest.raises(ValueError, match="thresholds must be strictly decreasing numbers from 1 to 0"):
        calibrate_small(agent(), thresholds=wrong)


@pytest.mark.parametrize("wrong", [{"thresholds": ["a"]}, {"alpha": "a"}, {"delta": None}], ids=str)
def test_argument_that_is_not_a_number(wrong):
    with pytest.raises(TypeError, match="must be a number, got"):
        calibrate_small(agent(), **wrong)


def test_thresholds_may_be_numbers_of_numpy():
    check_thresholds(tuple(np.linspace(1, 0, 5, dtype=np.float32)))
