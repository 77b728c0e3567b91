"""Tests of the files of VecNormalize statistics."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from rlxf.training import CheckpointError, load_normalizer, save_normalizer, write_archive

NUMBERS = spaces.Box(-9, 9, (3,))
NAMED = spaces.Dict({"near": NUMBERS, "far": spaces.Box(-9, 9, (2,)), "kind": spaces.Discrete(2)})


class Noise(gymnasium.Env):
    """Environment with random observations; the reward is the action."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), False, False, {}


def noise(space: spaces.Space = NUMBERS) -> DummyVecEnv:
    return DummyVecEnv([lambda: Noise(space)] * 2)


def experienced(space: spaces.Space = NUMBERS, **settings: object) -> VecNormalize:
    """Return a VecNormalize with the statistics of thirty steps."""
    normalizer = VecNormalize(noise(space), **settings)
    normalizer.reset()
    for step in range(30):
        normalizer.step(np.array([step % 2, 1]))
    return normalizer


CASES = {
    "numbers": lambda: experienced(),
    "Dict": lambda: experienced(NAMED, norm_obs_keys=["near", "far"], clip_obs=1.5),
    "rewards alone": lambda: experienced(norm_obs=False, gamma=0.5, clip_reward=2.0),
    "fresh": lambda: VecNormalize(noise(), epsilon=1e-3),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_loaded_normalizer_gives_equal_observations_and_rewards(tmp_path, make):
    saved = make()
    save_normalizer(tmp_path / "file", saved)
    loaded = load_normalizer(tmp_path / "file", noise(saved.observation_space))
    observation = saved.observation_space.sample()
    np.testing.assert_equal(loaded.normalize_obs(observation), saved.normalize_obs(observation))
    np.testing.assert_equal(loaded.normalize_reward(np.ones(2)), saved.normalize_reward(np.ones(2)))


def test_loaded_statistics_are_updated_equally(tmp_path):
    saved = experienced()
    save_normalizer(tmp_path / "file", saved)
    loaded = load_normalizer(tmp_path / "file", noise())
    batch = np.arange(6.0).reshape(2, 3)
    for normalizer in (saved, loaded):
        normalizer.obs_rms.update(batch)
        normalizer.ret_rms.update(batch[:, 0])
    np.testing.assert_array_equal(loaded.obs_rms.mean, saved.obs_rms.mean)
    np.testing.assert_array_equal(loaded.obs_rms.var, saved.obs_rms.var)
    assert loaded.ret_rms.var == saved.ret_rms.var
    assert (loaded.obs_rms.count, loaded.ret_rms.count) == (saved.obs_rms.count, saved.ret_rms.count)


def test_normalizer_inside_another_wrapper_is_saved(tmp_path):
    saved = experienced()
    save_normalizer(tmp_path / "file", VecMonitor(saved))
    loaded = load_normalizer(tmp_path / "file", noise())
    np.testing.assert_array_equal(loaded.obs_rms.mean, saved.obs_rms.mean)


@pytest.mark.parametrize("make", [noise, lambda: Noise(NUMBERS), lambda: None], ids=["VecEnv", "Env", "None"])
def test_environment_without_statistics_is_not_saved(tmp_path, make):
    with pytest.raises(
        TypeError, match=r"statistics of a VecNormalize, got .* without one: train in VecNorm"
    ):
        save_normalizer(tmp_path / "file", make())
    assert not list(tmp_path.iterdir())


def test_statistics_are_not_loaded_into_a_single_environment(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    with pytest.raises(TypeError, match=r"wraps a VecEnv, got Noise: pass rlxf.envs.make_vec_env\("):
        load_normalizer(tmp_path / "file", Noise(NUMBERS))


def test_other_observation_space_is_rejected(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    with pytest.raises(
        CheckpointError,
        match=r"observation space differs.*mean of observation.*\(3,\) in the file and \(5,\) here",
    ):
        load_normalizer(tmp_path / "file", noise(spaces.Box(-1, 1, (5,))))
    with pytest.raises(CheckpointError, match="observation"):
        load_normalizer(tmp_path / "file", noise(NAMED))


@pytest.mark.parametrize("document", [{}, {"normalizer": []}, {"normalizer": {"name": "Other"}}], ids=str)
def test_other_file_is_rejected(tmp_path, document):
    write_archive(tmp_path / "file", document, {})
    with pytest.raises(CheckpointError, match="contains no statistics of VecNormalize"):
        load_normalizer(tmp_path / "file", noise())


def test_unknown_setting_is_rejected(tmp_path):
    document = {"name": "VecNormalize", "settings": {"norm_dreams": True}}
    write_archive(tmp_path / "file", {"normalizer": document}, {"statistics": {}})
    with pytest.raises(CheckpointError, match="norm_dreams"):
        load_normalizer(tmp_path / "file", noise())


@pytest.mark.faults
def test_truncated_file_is_rejected(tmp_path):
    save_normalizer(tmp_path / "file", experienced())
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="file"):
        load_normalizer(tmp_path / "file", noise())
