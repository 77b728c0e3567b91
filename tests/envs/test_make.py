import re
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.envs import GymnasiumVecEnv, PreviousStep, TMazeVector, make_env, make_vec_env
from rlxf.utils.extras import install_command


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
        ("popgym-RepeatPrevios-v0", "popgym-RepeatPreviousEasy-v0[^.]*$"),
        ("MiniGrid-MemoryS8-v0", "MiniGrid-MemoryS7-v0[^.]*$"),
        ("no_such_module:Thing-v0", "no_such_module"),
        ("an id with spaces", "near names: none"),
    ],
)
def test_an_unknown_id_is_named_with_a_way_out(env_id, named):
    with pytest.raises(ValueError, match=f"{env_id}.*{named}"):
        make_vec_env(env_id, 1)


@pytest.mark.parametrize(
    ("env_id", "argument", "advice"),
    [
        ("rlxf/TMaze-v0", "wind", "it takes corridor_length, "),
        ("rlxf/TMaze-v0", "corridor_lenght", r"did you mean 'corridor_length'\?$"),
        ("CartPole-v1", "gravity", "it takes sutton_barto_reward, render_mode$"),
        ("Acrobot-v1", "wind", "it takes render_mode$"),
    ],
)
@pytest.mark.parametrize("make", [partial(make_vec_env, n_envs=1), make_env], ids=["several", "one"])
def test_an_argument_that_an_environment_does_not_take_is_named(make, env_id, argument, advice):
    with pytest.raises(TypeError, match=rf"^{env_id} takes no argument '{argument}'; {advice}"):
        make(env_id, env_kwargs={argument: 1})


class Inner(gymnasium.Env):
    def __init__(self, size: int = 3, *, render_mode: str | None = None):
        raise TypeError("size must be odd")


class Outer(Inner):
    def __init__(self, depth: int = 1, **kwargs):
        super().__init__(**kwargs)


@pytest.fixture
def outer():
    gymnasium.register("test/Outer-v0", Outer)
    yield "test/Outer-v0"
    del gymnasium.registry["test/Outer-v0"]


def test_arguments_of_base_classes_are_accepted_too(outer):
    with pytest.raises(TypeError, match="takes no argument 'deep'; did you mean 'depth'"):
        make_vec_env(outer, 1, env_kwargs={"deep": 1})
    with pytest.raises(TypeError, match="takes no argument 'wind'; it takes depth, size, render_mode"):
        make_vec_env(outer, 1, env_kwargs={"wind": 1})


def test_another_type_error_of_an_environment_stays(outer):
    with pytest.raises(TypeError, match=r"size must be odd.*test/Outer-v0"):
        make_vec_env(outer, 1, env_kwargs={"size": 2})


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "popgym", None)
    told = re.escape(install_command("memory"))
    with pytest.raises(ValueError, match=rf"popgym-RepeatPreviousEasy-v0.*{told}"):
        make_vec_env("popgym-RepeatPreviousEasy-v0", 1)


def test_the_number_of_copies_is_checked():
    with pytest.raises(ValueError, match=r"n_envs.*0"):
        make_vec_env("CartPole-v1", 0)


def as_text(env: gymnasium.Env) -> gymnasium.Env:
    return TransformObservation(env, str, spaces.Text(99))


def test_an_unsupported_space_is_named():
    with pytest.raises(TypeError, match="Text"):
        make_vec_env("CartPole-v1", 1, wrapper_class=as_text)
