import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.envs import GymnasiumVecEnv, PreviousStep, TMazeVector, make_env, make_vec_env


def test_a_batch_is_used_where_there_is_one():
    env = make_vec_env("rlxf/TMaze-v0", 5, env_kwargs={"corridor_length": 9})
    assert isinstance(env, GymnasiumVecEnv)
    assert isinstance(env.env, TMazeVector)
    assert env.env.rules.corridor_length == 9
    assert env.num_envs == 5


def test_a_wrapper_is_put_around_each_copy():
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 9}, wrapper_class=PreviousStep)
    assert isinstance(env, DummyVecEnv)
    assert env.env_is_wrapped(PreviousStep) == [True, True]
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.get_attr("unwrapped")[0].rules.corridor_length == 9


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_other_environments_are_sb3s_loop_so_none_gives_filler_rows(env_id):
    assert isinstance(make_vec_env(env_id, 2), DummyVecEnv)


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1"])
def test_the_seed_decides_the_first_observations(env_id):
    first, same, other = (make_vec_env(env_id, 32, seed=seed).reset() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("rlxf/TMaze-v0", {"env_kwargs": {"corridor_length": 9}}),
        ("CartPole-v1", {"previous_reward": True}),
        ("CartPole-v1", {"wrapper_class": PreviousStep}),
        ("MiniGrid-MemoryS7-v0", {}),
        ("popgym-AutoencodeEasy-v0", {"previous_reward": True}),
    ],
    ids=["arguments", "reward before", "wrapper", "view of a family", "both"],
)
def test_one_environment_shows_what_several_show(env_id, options):
    one, several = make_env(env_id, **options), make_vec_env(env_id, 2, **options)
    assert one.observation_space == several.observation_space
    assert one.action_space == several.action_space
    assert one.observation_space.contains(one.reset(seed=0)[0])


def test_one_environment_is_refused_like_several():
    with pytest.raises(ValueError, match="unknown environment id 'CartPol-v1'"):
        make_env("CartPol-v1")


def test_an_id_may_name_its_module():
    assert make_vec_env("rlxf.envs:rlxf/TMaze-v0", 1).num_envs == 1


@pytest.mark.parametrize(
    ("env_id", "named"),
    [
        ("rlxf/TMaz-v0", "rlxf/TMaze-v0"),
        ("CartPol-v1", "CartPole-v1"),
        ("popgym-RepeatPrevios-v0", r"popgym-RepeatPrevious.*rlxf\[memory\]"),
        ("MiniGrid-MemoryS8-v0", r"MiniGrid-MemoryS7-v0.*rlxf\[memory\]"),
        ("no_such_module:Thing-v0", "no_such_module"),
        ("an id with spaces", "near names: none"),
    ],
)
def test_an_unknown_id_is_named_with_a_way_out(env_id, named):
    with pytest.raises(ValueError, match=f"{env_id}.*{named}"):
        make_vec_env(env_id, 1)


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1", "Acrobot-v1"])
def test_arguments_that_an_environment_does_not_take_are_named(env_id):
    with pytest.raises(TypeError, match=rf"'wind'.*{env_id}.*{{'wind': 1}}"):
        make_vec_env(env_id, 1, env_kwargs={"wind": 1})


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "popgym", None)
    with pytest.raises(ValueError, match=r"popgym-RepeatPreviousEasy-v0.*pip install rlxf\[memory\]"):
        make_vec_env("popgym-RepeatPreviousEasy-v0", 1)


def test_the_number_of_copies_is_checked():
    with pytest.raises(ValueError, match=r"n_envs.*0"):
        make_vec_env("CartPole-v1", 0)


def as_text(env: gymnasium.Env) -> gymnasium.Env:
    return TransformObservation(env, str, spaces.Text(99))


def test_an_unsupported_space_is_named():
    with pytest.raises(TypeError, match="Text"):
        make_vec_env("CartPole-v1", 1, wrapper_class=as_text)
