import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, VecTransposeImage

from rlxf.envs import TMaze, TMazeVector, as_vec_env
from rlxf.envs.filler_rows import has_filler_rows, shows_filler_rows
from rlxf.envs.sb3_vec_env import make_sync_vec_env
from rlxf.envs.step_checks import with_checked_steps
from rlxf.envs.tmaze_tensor import TMazeTensor
from rlxf.utils.errors import FaultyEnvironmentError
from tests.envs.small_envs import VIEW, Counter

SB3_MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
MODES = [*SB3_MODES, AutoresetMode.NEXT_STEP]
KEYS = ["terminal_observation", "TimeLimit.truncated", "is_success"]


def adapted(mode: AutoresetMode, n: int = 3, **kwargs: Any) -> VecEnv:
    return as_vec_env(SyncVectorEnv([partial(Counter, **kwargs)] * n, autoreset_mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_has_filler_rows_through_wrappers(mode):
    assert has_filler_rows(VecNormalize(adapted(mode))) == (mode is AutoresetMode.NEXT_STEP)
    assert not has_filler_rows(by_sb3())


@pytest.mark.parametrize("kind", [TMazeVector, TMazeTensor])
def test_filler_rows_are_unknown_after_loading(kind):
    """The loaded state has no observation."""
    env, other = (as_vec_env(kind(2, 1, autoreset_mode=AutoresetMode.NEXT_STEP)) for _ in range(2))
    env.seed(0)
    observation = env.reset()
    while not env.filler_next.any():
        observation, *_ = env.step(np.zeros(2, int))
    assert shows_filler_rows(env, observation)
    other.load_state(env.state())
    assert other.filler_next.any()
    for each in (other, VecNormalize(other, norm_reward=False)):
        assert not shows_filler_rows(each, observation)


def view(counts: np.ndarray) -> np.ndarray:
    return np.full(VIEW.shape, int(counts[1]), np.uint8)


def test_images_in_filler_rows_are_recognized():
    def make() -> gymnasium.Env:
        return gymnasium.wrappers.TransformObservation(Counter(), view, VIEW)

    env = VecTransposeImage(as_vec_env(SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)))
    env.seed(0)
    observation = env.reset()
    while not env.unwrapped.filler_next.any():
        observation, *_ = env.step(np.zeros(2, int))
    assert shows_filler_rows(env, observation)
    assert not shows_filler_rows(env, observation + 1)


class OtherFinalInfos(gymnasium.vector.VectorWrapper):
    """Infos of ended episodes as a sequence of dicts, or with a success of each environment and no mask."""

    def __init__(self, form: str):
        super().__init__(SyncVectorEnv([Counter] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
        self.form = form

    def step(self, actions: Any) -> Any:
        *results, infos = super().step(actions)
        final = infos.get("final_info")
        if final is not None and self.form == "sequence":
            ended = final["_is_success"]
            infos["final_info"] = np.array(
                [{"is_success": final["is_success"][i]} if ended[i] else None for i in range(3)], object
            )
        elif final is not None:
            infos["final_info"] = {"is_success": final["is_success"]}
        return *results, infos


@pytest.mark.parametrize("form", ["sequence", "no mask"])
def test_other_forms_of_final_infos_keep_the_success(form):
    assert rollout(as_vec_env(OtherFinalInfos(form)), 60) == rollout(adapted(AutoresetMode.SAME_STEP), 60)


def by_sb3(n: int = 3, **kwargs: Any) -> VecEnv:
    return DummyVecEnv([lambda: Monitor(Counter(**kwargs))] * n)


def row(observations: Any, i: int) -> Any:
    if isinstance(observations, dict):
        return {key: value[i].tolist() for key, value in observations.items()}
    return np.asarray(observations[i]).tolist()


def plain(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: np.asarray(value).tolist() for key, value in observation.items()}
    return observation.tolist()


def end_of(info: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of an info at the end of an episode, without times and in plain types."""
    end = {key: info[key] for key in KEYS if key in info}
    if "terminal_observation" in end:
        end["terminal_observation"] = plain(end["terminal_observation"])
        end["episode"] = (info["episode"]["r"], info["episode"]["l"])
    return end


def rollout(env: VecEnv, seed: int, steps: int = 40) -> list[list[tuple]]:
    """Return the rows (next observation, reward, done, end entries) of each environment without reset steps.

    Actions depend on the environment and its number of other steps, so reset steps do not shift them.
    """
    env.seed(seed)
    first = env.reset()
    rows: list[list[tuple]] = [[(row(first, i),)] for i in range(env.num_envs)]
    for _ in range(steps):
        actions = np.array([(len(rows[i]) + i) % 3 for i in range(env.num_envs)])
        observations, rewards, ends, infos = env.step(actions)
        for i, info in enumerate(infos):
            if info.get("filler"):
                assert (rewards[i], ends[i]) == (0.0, False)
                rows[i][-1] = (row(observations, i), *rows[i][-1][1:])
                continue
            end = end_of(info) if ends[i] else {}
            rows[i].append((row(observations, i), float(rewards[i]), bool(ends[i]), end))
    return rows


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("mode", SB3_MODES)
@given(seed=st.integers(0, 10_000))
def test_results_equal_those_of_sb3(mode, as_dict, seed):
    assert rollout(adapted(mode, as_dict=as_dict), seed) == rollout(by_sb3(as_dict=as_dict), seed)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("as_dict", [False, True])
@given(seed=st.integers(0, 10_000))
def test_next_step_without_fillers_equals_sb3(as_dict, seed):
    actual = rollout(adapted(AutoresetMode.NEXT_STEP, as_dict=as_dict), seed)
    expected = rollout(by_sb3(as_dict=as_dict), seed)
    for rows, expected_rows in zip(actual, expected, strict=True):
        last = len(rows) - 1  # an episode that ends at the last step has no filler yet
        assert rows[:last] == expected_rows[:last]
        assert rows[last][1:] == expected_rows[last][1:]


def test_environments_in_other_processes_equal_sb3():
    inner = AsyncVectorEnv([Counter] * 2, autoreset_mode=AutoresetMode.SAME_STEP, context="spawn")
    env = as_vec_env(inner)
    rows = rollout(env, 3)
    env.close()
    assert rows == rollout(by_sb3(n=2), 3)


def test_next_step_marks_ends_and_fillers():
    env = adapted(AutoresetMode.NEXT_STEP)
    env.seed(0)
    env.reset()
    ended = np.zeros(3, dtype=bool)
    for _ in range(60):
        observations, _, ends, infos = env.step(np.zeros(3, dtype=np.int64))
        assert [info.get("filler", False) for info in infos] == ended.tolist()
        assert [info.get("filler_next", False) for info in infos] == ends.tolist()
        for i in np.flatnonzero(ends):
            np.testing.assert_array_equal(observations[i], infos[i]["terminal_observation"])
        ended = ends
    assert ends.dtype == bool


@pytest.mark.parametrize("mode", MODES)
def test_reset_within_an_episode_resets_the_counts(mode):
    env = adapted(mode, n=2)
    env.seed(1)
    env.reset()
    fresh = rollout(adapted(mode, n=2), 7)
    for _ in range(5):
        env.step(np.zeros(2, dtype=np.int64))
    lengths = [[end[-1].get("episode", (0, 0))[1] for end in rows[1:]] for rows in rollout(env, 7)]
    assert lengths == [[end[-1].get("episode", (0, 0))[1] for end in rows[1:]] for rows in fresh]


def test_infos_are_separate_dicts():
    env = adapted(AutoresetMode.SAME_STEP, n=2)
    env.reset()
    infos = env.step(np.zeros(2, dtype=np.int64))[3]
    infos[0]["key"] = 1
    assert "key" not in infos[1]
    assert "key" not in env.step(np.zeros(2, dtype=np.int64))[3][0]


class Clocked(Counter):
    """`Counter` with its step in the infos, as a number and within a dict."""

    def step(self, action: int) -> Any:
        *results, info = super().step(action)
        step = int(self.count[1])
        return *results, info | {"step": step, "parts": {"odd": step % 2 == 1}}


@pytest.mark.parametrize("mode", MODES)
def test_infos_of_all_steps_are_those_of_the_environments(mode):
    env = as_vec_env(SyncVectorEnv([Clocked] * 3, autoreset_mode=mode))
    env.seed(0)
    env.reset()
    steps = np.zeros(3, int)
    for _ in range(30):
        fillers = env.filler_next.copy()
        *_, ends, infos = env.step(np.zeros(3, int))
        steps = np.where(fillers, 0, steps + 1)
        expected = [{} if filler else {"step": step} for filler, step in zip(fillers, steps, strict=True)]
        assert [{key: info[key] for key in info.keys() & {"step"}} for info in infos] == expected
        assert all(info["parts"] == {"odd": info["step"] % 2 == 1} for info in infos if "step" in info)
        steps[ends] = 0


def test_terminal_observation_is_a_copy():
    env = adapted(AutoresetMode.NEXT_STEP, n=1)
    env.seed(0)
    env.reset()
    ended = False
    while not ended:
        observations, _, (ended,), (info,) = env.step(np.zeros(1, dtype=np.int64))
    info["terminal_observation"] += 1
    assert (observations[0] != info["terminal_observation"]).all()


def test_seed_and_options_reach_the_next_reset_only():
    env = adapted(AutoresetMode.SAME_STEP)
    assert env.seed(3) == [3, 4, 5]
    env.set_options({"a": 1})
    env.reset()
    assert env.get_attr("np_random_seed") == [3, 4, 5]
    assert env.reset_infos == [{"options": "{'a': 1}"}] * 3
    env.reset()
    assert env.reset_infos == [{"options": "None"}] * 3


def test_seed_is_used_once():
    env = as_vec_env(TMazeVector(32, 1))
    env.seed(0)
    assert (env.reset() != env.reset()).any()


def test_different_options_raise():
    env = adapted(AutoresetMode.SAME_STEP, n=2)
    env.set_options([{"a": 1}, {"a": 2}])
    with pytest.raises(ValueError, match="'a': 2"):
        env.reset()


def test_attributes_and_methods_of_the_environments():
    env = adapted(AutoresetMode.SAME_STEP)
    env.set_attr("label", "x", indices=[0, 2])
    assert env.get_attr("label") == ["x", "first", "x"]
    env.set_attr("label", ["a", "list"])
    assert env.get_attr("label", indices=1) == [["a", "list"]]
    assert env.env_method("shout", "hey") == ["HEY"] * 3
    assert env.env_method("shout", "hey", indices=[0]) == ["HEY"]
    with pytest.raises(AttributeError):
        env.get_attr("nothing")


def test_vector_environment_without_single_environments_has_its_own_attributes():
    env = as_vec_env(TMazeVector(3, 4))
    assert [rules.corridor_length for rules in env.get_attr("rules")] == [4, 4, 4]
    assert not env.has_attr("nothing")
    with pytest.raises(NotImplementedError, match="set_attr"):
        env.set_attr("rules", 1)
    with pytest.raises(NotImplementedError, match="'reset'"):
        env.env_method("reset")


def test_env_is_wrapped():
    env = as_vec_env(SyncVectorEnv([lambda: gymnasium.wrappers.TimeLimit(Counter(), 3)] * 2))
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True, True]
    assert env.env_is_wrapped(gymnasium.wrappers.ClipReward, indices=1) == [False]
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert as_vec_env(TMazeVector(2)).env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False, False]


def test_render_tiles_all_environments():
    env = as_vec_env(TMazeVector(4, 3, render_mode="rgb_array"))
    env.reset()
    assert env.render_mode == "rgb_array"
    assert env.render().shape == (2 * 24, 2 * 4 * 8, 3)


def test_close_closes_the_vector_env():
    inner = SyncVectorEnv([Counter])
    as_vec_env(inner).close()
    assert inner.closed


class Minimal(VectorEnv):
    """Vector environment with episodes of one step, given metadata and empty infos."""

    num_envs = 1
    single_observation_space = observation_space = spaces.Box(0, 1, (1,))
    single_action_space = action_space = spaces.Discrete(2)

    def __init__(self, metadata: dict[str, Any]):
        self.metadata = metadata

    def reset(self, *, seed=None, options=None):
        return np.zeros((1, 1), dtype=np.float32), {}

    def step(self, actions):
        return np.zeros((1, 1), dtype=np.float32), np.ones(1), np.ones(1, bool), np.zeros(1, bool), {}


@pytest.mark.parametrize("metadata", [{}, {"autoreset_mode": "NextStep"}])
def test_missing_autoreset_mode_raises(metadata):
    with pytest.raises(ValueError, match="autoreset_mode"):
        as_vec_env(Minimal(metadata))


def test_same_step_without_final_obs_raises():
    env = as_vec_env(Minimal({"autoreset_mode": AutoresetMode.SAME_STEP}))
    env.reset()
    with pytest.raises(ValueError, match="final_obs"):
        env.step(np.zeros(1, dtype=np.int64))


class HalfBatch(Minimal):
    """Vector environment that returns the observations of one environment of two, as an asynchronous pool."""

    num_envs = 2

    def reset(self, *, seed=None, options=None):
        return np.zeros((1, 1), np.float32), {}


def test_observations_of_some_environments_raise():
    env = HalfBatch({"autoreset_mode": AutoresetMode.NEXT_STEP})
    with pytest.raises(FaultyEnvironmentError, match=r"must have 2 rows.* got shape \(1, 1\); with EnvPool"):
        as_vec_env(env).reset()


def test_reused_arrays_raise():
    with pytest.raises(ValueError, match="copy=True"):
        as_vec_env(SyncVectorEnv([Counter], copy=False))


def test_other_objects_raise():
    with pytest.raises(TypeError, match="TMaze"):
        as_vec_env(TMaze())


def test_unsupported_space_raises():
    with pytest.raises(TypeError, match="Text"):
        as_vec_env(
            SyncVectorEnv([lambda: gymnasium.wrappers.TransformObservation(Counter(), str, spaces.Text(9))])
        )


@pytest.mark.parametrize("mode", MODES)
def test_evaluate_policy_counts_the_same_episodes(mode):
    """SB3 gets the returns and lengths of whole episodes without reset steps."""
    model = PPO("MlpPolicy", by_sb3(n=1), n_steps=8, batch_size=8, seed=0, device="cpu")

    def episodes(env: VecEnv) -> Any:
        env.seed(5)
        return evaluate_policy(model, env, n_eval_episodes=6, return_episode_rewards=True)

    returns, lengths = episodes(adapted(mode, n=1))
    expected_returns, expected_lengths = episodes(by_sb3(n=1))
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-5)
    assert lengths == expected_lengths


def test_sb3_agent_trains_with_vecnormalize():
    env = VecNormalize(as_vec_env(TMazeVector(4, 1)))
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(256)
    assert model.ep_info_buffer is not None
    assert {info["l"] for info in model.ep_info_buffer} == {2}
    assert set(model.ep_success_buffer or []) <= {False, True}
    assert len(model.ep_success_buffer or []) == len(model.ep_info_buffer)


def test_tmaze_vector_equals_tmaze_in_dummy_vec_env():
    batch, loop = (
        as_vec_env(TMazeVector(3, 2)),
        sb3_make_vec_env("rlxf/TMaze-v0", 3, env_kwargs={"corridor_length": 2}),
    )
    assert rollout(batch, 4) == rollout(loop, 4)


class IntegerFlags(gymnasium.wrappers.vector.TransformReward):
    """Done flags as uint8."""

    def __init__(self, env: VectorEnv):
        super().__init__(env, lambda rewards: rewards)

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, terminated.astype(np.uint8), truncated.astype(np.uint8), infos


@pytest.mark.parametrize("mode", MODES)
def test_done_flags_of_another_dtype(mode):
    plain_flags, integers = (SyncVectorEnv([Counter] * 3, autoreset_mode=mode) for _ in range(2))
    assert rollout(as_vec_env(IntegerFlags(integers)), 0) == rollout(as_vec_env(plain_flags), 0)


class Levels(gymnasium.Env):
    """Episodes of two steps with nested observations from one array; the info of a reset has the episode."""

    observation_space = spaces.Dict({"nested": spaces.Dict({"time": spaces.Box(0, 9, (1,), np.float32)})})
    action_space = spaces.Discrete(2)

    def __init__(self, level: int = 0):
        self.level, self.array = level, np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level += 1
        self.array[:] = 0
        return {"nested": {"time": self.array}}, {"level": self.level}

    def step(self, action):
        self.array += 1
        return {"nested": {"time": self.array}}, 1.0, False, bool(self.array[0] == 2), {}


@pytest.mark.parametrize("mode", MODES)
def test_reset_infos_are_those_of_the_current_episode(mode):
    env = as_vec_env(SyncVectorEnv([Levels, partial(Levels, 10)], autoreset_mode=mode))
    env.reset()
    for steps, level in ((1, 1), (2, 2)):
        for _ in range(steps if mode is not AutoresetMode.NEXT_STEP else steps + level - 1):
            env.step(np.zeros(2, int))
        assert [info["level"] for info in env.reset_infos] == [level, level + 10]


class Flat(Levels):
    observation_space = spaces.Box(0, 9, (1,), np.float32)

    def reset(self, **options):
        return super().reset(**options)[0]["nested"]["time"], {}

    def step(self, action):
        observation, *results = super().step(action)
        return observation["nested"]["time"], *results


@pytest.mark.parametrize("make", [Levels, Flat])
@pytest.mark.parametrize(
    "vectorize",
    [
        lambda make: make_sync_vec_env([make]),
        lambda make: with_checked_steps(as_vec_env(SyncVectorEnv([make], autoreset_mode="SameStep"))),
    ],
    ids=["made here", "of the user"],
)
def test_an_environment_that_reuses_its_observation_keeps_the_last_one(vectorize, make):
    env = vectorize(make)
    env.reset()
    env.step(np.zeros(1, int))
    *_, infos = env.step(np.zeros(1, int))
    last = infos[0]["terminal_observation"]
    assert last == ({"nested": {"time": 2.0}} if make is Levels else 2.0)


def times_ten(reward: Any) -> Any:
    return 10 * reward


def scaled(statistics: Any, make: Any = Levels) -> gymnasium.Env:
    """Make an environment with ``statistics`` inside of a wrapper that changes the rewards."""
    return gymnasium.wrappers.TransformReward(statistics(make()), times_ten)


STATISTICS = [Monitor, gymnasium.wrappers.RecordEpisodeStatistics]


@pytest.mark.parametrize("statistics", STATISTICS)
def test_the_statistics_of_an_environment_count_its_own_rewards(statistics):
    env = make_sync_vec_env([partial(scaled, statistics)])
    env.reset()
    env.step(np.zeros(1, int))
    _, rewards, _, infos = env.step(np.zeros(1, int))
    assert (rewards.tolist(), infos[0]["episode"]["r"], infos[0]["episode"]["l"]) == ([10.0], 2.0, 2)


def counters(mode: AutoresetMode) -> VectorEnv:
    return SyncVectorEnv([Counter] * 3, autoreset_mode=mode)


def episode_scores(env: VecEnv) -> list[list[tuple[float, int]]]:
    """Return the returns and lengths of the episodes of each environment in 40 steps without fillers."""
    return [[row[-1]["episode"] for row in rows[1:] if "episode" in row[-1]] for rows in rollout(env, 3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outer", [False, True], ids=["of each environment", "of the vector environment"])
def test_statistics_inside_of_changed_rewards(mode, outer):
    vector = gymnasium.wrappers.vector
    if outer:
        env = as_vec_env(vector.TransformReward(vector.RecordEpisodeStatistics(counters(mode)), times_ten))
    else:
        make = partial(scaled, gymnasium.wrappers.RecordEpisodeStatistics, Counter)
        env = as_vec_env(SyncVectorEnv([make] * 3, autoreset_mode=mode))
    own = not (outer and mode is AutoresetMode.DISABLED)  # Gymnasium's vector wrapper counts wrongly
    expected = adapted(mode) if own else as_vec_env(vector.TransformReward(counters(mode), times_ten))
    assert episode_scores(env) == episode_scores(expected)


class Chapters(Counter):
    """`Counter` whose infos have an entry ``episode`` of another meaning."""

    def step(self, action: int) -> Any:
        *results, info = super().step(action)
        return *results, info | {"episode": int(self.count[0])}


@pytest.mark.parametrize("mode", MODES)
def test_another_entry_episode_is_no_statistics(mode):
    env = as_vec_env(SyncVectorEnv([Chapters] * 3, autoreset_mode=mode))
    assert rollout(env, 3) == rollout(adapted(mode), 3)
    for _ in range(20):
        *_, ends, infos = env.step(np.zeros(3, int))
        assert ["episode" in info for info in infos] == ends.tolist()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_attributes_inside_a_wrapper_of_the_vector_environment(kind):
    inner = kind([partial(gymnasium.make, "CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env = as_vec_env(gymnasium.wrappers.vector.RecordEpisodeStatistics(inner))
    assert [len(queue) for queue in env.get_attr("return_queue")] == [0, 0]  # of the wrapper
    env.set_attr("gravity", 5.0)
    assert env.get_attr("gravity") == [5.0, 5.0]
    assert env.env_method("get_wrapper_attr", "gravity") == [5.0, 5.0]
    env.close()


def test_a_numpy_integer_as_a_seed():
    env = adapted(AutoresetMode.SAME_STEP)
    env.seed(np.int64(4))
    env.reset()


class Spoken(Levels):
    observation_space = spaces.Dict({"time": spaces.Box(0, 9, (1,), np.float32), "text": spaces.Text(5)})


@pytest.mark.parametrize("shared", [True, False])
def test_text_of_other_processes_that_is_not_shared_warns(shared):
    env = AsyncVectorEnv([Spoken], shared_memory=shared, autoreset_mode=AutoresetMode.SAME_STEP)
    expected = (
        pytest.warns(UserWarning, match="text .* constant.*shared_memory=False") if shared else nullcontext()
    )
    with expected:
        as_vec_env(env).close()


class Altered(gymnasium.vector.VectorWrapper):
    """Environments with a function that changes the results of a step: (observations, ..., infos) -> same."""

    def __init__(self, change: Any):
        super().__init__(SyncVectorEnv([Counter] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
        self.change = change

    def step(self, actions: Any) -> Any:
        return self.change(*super().step(actions))


@pytest.mark.parametrize(("name", "number"), [("rewards", 1), ("terminations", 2), ("truncations", 3)])
@pytest.mark.parametrize("shape", [(3, 1), (), (1,)])
def test_results_of_another_shape_raise_with_their_name(name, number, shape):
    def change(*results: Any) -> Any:
        return *results[:number], np.zeros(shape), *results[number + 1 :]

    env = as_vec_env(Altered(change))
    env.reset()
    expected = rf"{name} of .* shape \(3,\), got shape {re.escape(str(shape))}"
    with pytest.raises(FaultyEnvironmentError, match=expected):
        env.step(np.zeros(3, int))


def end_with_objects(observations: Any, rewards: Any, terminated: Any, truncated: Any, infos: Any) -> Any:
    """End all episodes, with a batch of Python objects as the last observations."""
    ends = np.ones(3, bool)
    return observations, rewards, ends, truncated, {"final_obs": observations.astype(object)}


def test_last_observations_of_objects_have_the_dtype_of_their_space():
    env = as_vec_env(Altered(end_with_objects))
    env.reset()
    observations, _, _, infos = env.step(np.zeros(3, int))
    last = np.stack([info["terminal_observation"] for info in infos])
    assert last.dtype == env.observation_space.dtype
    assert (last == observations).all()


class ForeignArray:
    """Array of another library, as JAX returns it."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)

    def __getitem__(self, i: Any) -> Any:
        return self.values[i]


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


class OtherArrays(gymnasium.vector.VectorWrapper):
    """Environment whose observations are not writable arrays of NumPy.

    Args:
        env: the vector environment.
        convert: conversion of each array.
    """

    def __init__(self, env: VectorEnv, convert: Any):
        super().__init__(env)
        self.convert = convert

    def _converted(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self.convert(part) for key, part in observations.items()}
        return self.convert(observations)

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = self.env.reset(**kwargs)
        return self._converted(observations), infos

    def step(self, actions: Any) -> Any:
        observations, *others = self.env.step(actions)
        return self._converted(observations), *others


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("convert", [ForeignArray, read_only])
@pytest.mark.parametrize("mode", MODES)
def test_observations_of_other_array_types(mode, convert, as_dict):
    """They are those of the environment, as writable arrays."""
    make = partial(SyncVectorEnv, [partial(Counter, as_dict=as_dict)] * 3, autoreset_mode=mode)
    changed, plain_env = as_vec_env(OtherArrays(make(), convert)), as_vec_env(make())
    for env in (changed, plain_env):
        env.seed(0)
    pairs = [(changed.reset(), plain_env.reset())]
    pairs += [(changed.step(np.zeros(3, int))[0], plain_env.step(np.zeros(3, int))[0]) for _ in range(12)]
    for theirs, ours in pairs:
        parts = theirs.values() if as_dict else [theirs]
        assert all(type(part) is np.ndarray and part.flags.writeable for part in parts)
        np.testing.assert_equal(theirs, ours)
