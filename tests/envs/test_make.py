"""Tests of the creation of environments, also of memory tasks of other packages."""

import re
import sys
import warnings
from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import FilterObservation, TransformObservation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rlxf.envs import GymnasiumVecEnv, PreviousStep, TMaze, TMazeVector, Workers, make_env, make_vec_env
from rlxf.envs.make import flatten_minigrid_observation
from rlxf.utils.extras import install_command


def test_vector_entry_point_is_used_if_registered():
    env = make_vec_env("rlxf/TMaze-v0", 5, env_kwargs={"corridor_length": 9})
    assert isinstance(env, GymnasiumVecEnv)
    assert isinstance(env.env, TMazeVector)
    assert env.env.rules.corridor_length == 9
    assert env.num_envs == 5


class Resized(gymnasium.Env):
    """Environment with a vector entry point, `TMazeVector`, that does not accept its argument."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size: int = 1):
        self.size = size


def test_arguments_that_only_single_environments_accept(monkeypatch):
    spec = EnvSpec("Resized-v0", entry_point=Resized, vector_entry_point=TMazeVector)
    monkeypatch.setitem(gymnasium.registry, "Resized-v0", spec)
    assert make_vec_env("Resized-v0", 2, env_kwargs={"size": 4}).get_attr("size") == [4, 4]
    with pytest.raises(TypeError, match=r"Resized-v0 takes no argument 'sise'; did you mean size\?"):
        make_vec_env("Resized-v0", 2, env_kwargs={"sise": 4})


def test_wrapper_class_wraps_each_copy():
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 9}, wrapper_class=PreviousStep)
    assert isinstance(env, DummyVecEnv)
    assert env.env_is_wrapped(PreviousStep) == [True, True]
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.get_attr("unwrapped")[0].rules.corridor_length == 9


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_next_step_vector_environments_are_not_used(env_id):
    assert isinstance(make_vec_env(env_id, 2), DummyVecEnv)


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "CartPole-v1"])
def test_seed_determines_the_first_observations(env_id):
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
    ids=["arguments", "previous reward", "wrapper", "family wrappers", "both"],
)
def test_make_env_has_the_spaces_of_make_vec_env(env_id, options):
    one, several = make_env(env_id, **options), make_vec_env(env_id, 2, **options)
    assert one.observation_space == several.observation_space
    assert one.action_space == several.action_space
    assert one.observation_space.contains(one.reset(seed=0)[0])


def test_make_env_raises_for_an_unknown_id():
    with pytest.raises(ValueError, match="unknown environment id 'CartPol-v1'"):
        make_env("CartPol-v1")


def test_id_with_a_module():
    assert make_vec_env("rlxf.envs:rlxf/TMaze-v0", 1).num_envs == 1


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("rlxf/TMaz-v0", "rlxf/TMaze-v0"),
        ("CartPol-v1", "CartPole-v1"),
        ("popgym-RepeatPrevios-v0", "popgym-RepeatPreviousEasy-v0[^.]*$"),
        ("MiniGrid-MemoryS8-v0", "MiniGrid-MemoryS7-v0[^.]*$"),
        ("no_such_module:Thing-v0", "no_such_module"),
        ("an id with spaces", "similar ids: none"),
    ],
)
def test_unknown_id_raises_with_similar_ids(env_id, expected):
    with pytest.raises(ValueError, match=f"{env_id}.*{expected}"):
        make_vec_env(env_id, 1)


@pytest.mark.parametrize(
    ("env_id", "argument", "advice"),
    [
        ("rlxf/TMaze-v0", "wind", "it takes corridor_length, "),
        ("rlxf/TMaze-v0", "corridor_lenght", r"did you mean corridor_length\?$"),
        ("CartPole-v1", "gravity", "it takes sutton_barto_reward, render_mode$"),
        ("Acrobot-v1", "wind", "it takes render_mode$"),
        ("rlxf/CartPoleNoVel-v1", "wind", "$"),
    ],
)
@pytest.mark.parametrize("make", [partial(make_vec_env, n_envs=1), make_env], ids=["several", "one"])
def test_unknown_argument_raises_with_advice(make, env_id, argument, advice):
    with pytest.raises(TypeError, match=rf"^{env_id} takes no argument '{argument}'(; )?{advice}"):
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


def test_arguments_of_base_classes_are_accepted(outer):
    with pytest.raises(TypeError, match="takes no argument 'deep'; did you mean depth"):
        make_vec_env(outer, 1, env_kwargs={"deep": 1})
    with pytest.raises(TypeError, match="takes no argument 'wind'; it takes depth, size, render_mode"):
        make_vec_env(outer, 1, env_kwargs={"wind": 1})


def test_other_type_errors_have_the_environment_id(outer):
    with pytest.raises(TypeError, match=r"size must be odd.*test/Outer-v0"):
        make_vec_env(outer, 1, env_kwargs={"size": 2})


def test_missing_extra_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "popgym", None)
    command = re.escape(install_command("memory"))
    with pytest.raises(ValueError, match=rf"popgym-RepeatPreviousEasy-v0.*{command}"):
        make_vec_env("popgym-RepeatPreviousEasy-v0", 1)


@pytest.mark.parametrize(
    ("package", "env_id", "extra"), [("Box2D", "LunarLander-v3", "box2d"), ("mujoco", "Hopper-v5", "mujoco")]
)
def test_a_missing_simulator_raises_with_the_install_command(monkeypatch, package, env_id, extra):
    module = f"gymnasium.envs.{extra}"
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)  # its import is attempted again
    monkeypatch.setitem(sys.modules, package, None)
    message = re.escape(f"{env_id} needs packages that are not installed; install them with: ")
    with pytest.raises(DependencyNotInstalled, match=message) as error:
        make_vec_env(env_id, 1)
    assert install_command(extra) in str(error.value)
    assert f"gymnasium[{extra}]" not in str(error.value)


@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
def test_a_missing_module_raises_with_the_id_and_the_module(monkeypatch, vector):
    monkeypatch.setitem(sys.modules, "absent", None)
    points = {"entry_point": "absent:Task"} | ({"vector_entry_point": "absent:Tasks"} if vector else {})
    gymnasium.register("absent/Task-v0", **points)
    with pytest.raises(DependencyNotInstalled, match=r"absent/Task-v0 needs a package.* absent"):
        make_vec_env("absent/Task-v0", 1)
    del gymnasium.registry["absent/Task-v0"]


@pytest.mark.parametrize("workers", [None, Workers(2)])
def test_classes_and_functions_create_environments(workers):
    """They need not be registered; a class gets ``env_kwargs``, and wrappers are applied to each copy."""
    makers = [(TMaze, {"corridor_length": 3}), (lambda: TMaze(corridor_length=3), None)]
    for maker, kwargs in makers:
        env = make_vec_env(maker, 2, 0, kwargs, previous_reward=True, workers=workers)
        observation = env.reset()
        assert observation["previous_reward"].shape == (2, 1)
        for _ in range(4):
            _, _, done, _ = env.step(np.zeros(2, np.int64))
        assert done.all()
        env.close()


@pytest.mark.parametrize("maker", [None, 3, TMaze()])
def test_other_objects_are_refused_by_name(maker):
    with pytest.raises(TypeError, match=r"needs a Gymnasium id, or a class or function .* got "):
        make_vec_env(maker, 2)


def test_arguments_of_monitors_and_wrappers(tmp_path):
    env = make_vec_env(
        "rlxf/TMaze-v0",
        seed=0,
        wrapper_class=gymnasium.wrappers.TimeLimit,
        wrapper_kwargs={"max_episode_steps": 2},
        monitor_dir=str(tmp_path),
        monitor_kwargs={"info_keywords": ("is_success",)},
    )
    env.reset()
    env.step(np.array([0]))
    *_, infos = env.step(np.array([0]))
    env.close()
    assert (env.num_envs, infos[0]["TimeLimit.truncated"]) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["0.monitor.csv"]


def test_info_keywords_are_recorded():
    arguments = {"corridor_length": 1}
    env = make_vec_env(
        "rlxf/TMaze-v0", env_kwargs=arguments, monitor_kwargs={"info_keywords": ("is_success",)}
    )
    env.reset()
    done = False
    while not done:
        _, _, (done,), infos = env.step(np.array([0]))
    assert "is_success" in infos[0]["episode"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"vec_env_cls": DummyVecEnv}, r"no argument 'vec_env_cls': leave it out .*workers=Workers"),
        ({"start_index": 3}, "no argument 'start_index': copies are numbered from 0"),
        ({"monitor_kwarg": {}}, r"no argument 'monitor_kwarg'; did you mean monitor_kwargs\?"),
    ],
)
def test_other_arguments_of_sb3_are_refused_with_the_alternative(argument, message):
    with pytest.raises(TypeError, match=message):
        make_vec_env("CartPole-v1", **argument)
    make_vec_env("CartPole-v1", vec_env_cls=None, start_index=0)


def test_n_envs_must_be_positive():
    with pytest.raises(ValueError, match=r"n_envs.*0"):
        make_vec_env("CartPole-v1", 0)


def as_text(env: gymnasium.Env) -> gymnasium.Env:
    return TransformObservation(env, str, spaces.Text(99))


def test_unsupported_space_raises():
    with pytest.raises(TypeError, match="Text"):
        make_vec_env("CartPole-v1", 1, wrapper_class=as_text)


TASKS = [
    "popgym-RepeatPreviousEasy-v0",
    "popgym-AutoencodeEasy-v0",
    "popgym-BattleshipEasy-v0",
    "popgym-ConcentrationEasy-v0",
    "popgym-PositionOnlyPendulumEasy-v0",
    "MiniGrid-MemoryS7-v0",
    "MiniGrid-MemoryS13Random-v0",
]


def play(env: VecEnv, steps: int) -> tuple[list, list]:
    """Play random actions; return all observations and the last info of each episode."""
    env.action_space.seed(0)
    observations, ends = [env.reset()], []
    for _ in range(steps):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        observation, _, ended, infos = env.step(actions)
        observations.append(observation)
        ends += [infos[i] for i in np.flatnonzero(ended)]
    return observations, ends


@pytest.mark.filterwarnings("ignore:Maze environments have been shown:DeprecationWarning")
@pytest.mark.parametrize("name", ["EscapeEasy", "ExploreHard"])
def test_labyrinths_are_reproducible(name):
    """They draw from the global generators, which a reset with a seed seeds."""
    observations, ends = play(make_vec_env(f"popgym-Labyrinth{name}-v0", 2, seed=0), 1030)
    again, _ = play(make_vec_env(f"popgym-Labyrinth{name}-v0", 2, seed=0), 1030)
    np.testing.assert_array_equal(observations, again)
    assert len(ends) >= 2


@pytest.mark.parametrize("env_id", TASKS)
def test_memory_tasks_are_reproducible_and_raise_no_warning(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observations, ends = play(make_vec_env(env_id, 4, seed=0), 300)
        again, _ = play(make_vec_env(env_id, 4, seed=0), 300)
    np.testing.assert_array_equal(observations, again)
    assert ends
    assert all(info["episode"]["l"] > 1 for info in ends)


def test_tuple_observation_is_flattened():
    env = make_vec_env("popgym-AutoencodeEasy-v0", 2)
    assert env.observation_space.shape == (2 + 4,)
    assert env.reset().sum(axis=1).tolist() == [2, 2]


def test_minigrid_one_hot_view_matches_the_raw_codes():
    """The argmax of each one-hot part, of the direction and of each cell, is the code of the raw view."""
    raw = gymnasium.make("minigrid:MiniGrid-MemoryS7-v0")
    view = flatten_minigrid_observation(gymnasium.make("minigrid:MiniGrid-MemoryS7-v0"))
    for seed in range(3):
        observation, _ = raw.reset(seed=seed)
        bits, _ = view.reset(seed=seed)
        assert bits in view.observation_space
        assert bits[:4].argmax() == observation["direction"]
        cells = bits[4:].reshape(7, 7, 20)
        parts = [cells[..., :11], cells[..., 11:17], cells[..., 17:]]
        assert all((part.sum(axis=-1) == 1).all() for part in parts)
        np.testing.assert_array_equal(np.stack([part.argmax(-1) for part in parts], -1), observation["image"])


def test_changing_mission_raises():
    with pytest.raises(TypeError, match=r"mission.*wrapper_class"):
        make_vec_env("MiniGrid-Fetch-5x5-N2-v0", 1)


def test_wrapper_class_replaces_the_family_wrappers():
    def direction_only(env: gymnasium.Env) -> gymnasium.Env:
        return FilterObservation(env, ["direction"])

    env = make_vec_env("MiniGrid-Fetch-5x5-N2-v0", 1, wrapper_class=direction_only)
    assert env.observation_space == spaces.Dict({"direction": spaces.Discrete(4)})


@pytest.mark.parametrize("env_id", ["rlxf/TMaze-v0", "rlxf/CartPoleNoVel-v1", "CartPole-v1"])
def test_a_time_limit_is_an_argument(env_id):
    env = make_vec_env(env_id, 2, seed=0, env_kwargs={"max_episode_steps": 7})
    env.reset()
    action = np.zeros(2, int)
    for step in range(1, 8):
        _, _, dones, infos = env.step(action)
        assert dones.tolist() == [step == 7] * 2
    assert all(info["TimeLimit.truncated"] for info in infos)


def test_a_time_limit_can_be_longer_than_the_registered_one():
    env = make_env("rlxf/PendulumNoVel-v1", {"max_episode_steps": 300})
    env.reset(seed=0)
    truncated = [env.step(env.action_space.sample())[3] for _ in range(300)]
    assert truncated == [False] * 299 + [True]
    assert gymnasium.spec("rlxf/PendulumNoVel-v1").max_episode_steps == 200


def test_one_environment_is_made_from_the_spec_of_a_vector_environment():
    spec = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 7}).get_attr("spec", 0)[0]
    assert make_env(spec).unwrapped.rules.corridor_length == 7


def test_arguments_of_the_vector_class_only_do_not_reach_a_single_environment():
    kwargs = {"corridor_length": 3, "device": "cpu"}
    with closing(make_env("rlxf/TMazeTensor-v0", kwargs)) as env:
        assert env.spec.kwargs == {"active": False, "corridor_length": 3}
    with pytest.raises(TypeError, match="takes no argument 'devise'"):
        make_env("rlxf/TMazeTensor-v0", {"devise": "cpu"})


def test_arguments_of_gymnasium_make_reach_an_environment_with_a_vector_class():
    """CartPole's vector class has a parameter ``max_episode_steps``, and CartPole itself has not."""
    with closing(make_env("CartPole-v1", {"max_episode_steps": 9})) as env:
        assert env.spec.max_episode_steps == 9


class Spaceless(gymnasium.Env):
    """Environment whose wrapper defines the spaces."""

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, True, False, {}


class Spaced(gymnasium.Wrapper):
    """Wrapper that defines the spaces."""

    observation_space = action_space = spaces.Discrete(2)


def test_a_wrapper_may_define_the_spaces():
    assert make_vec_env(Spaceless, 2, wrapper_class=Spaced).observation_space == spaces.Discrete(2)
    with pytest.raises(TypeError, match="no observation_space"):
        make_vec_env(Spaceless, 2)
