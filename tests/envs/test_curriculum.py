"""Curricula: when the next stage begins, what lasts across a resumed training, and what is refused."""

import copy
import json
import os
import signal
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger, make_output_format

from rlxf.envs import (
    Curriculum,
    CurriculumCallback,
    CurriculumEnv,
    Workers,
    as_vec_env,
    make_vec_env,
)
from rlxf.envs.action_replay import ActionReplay
from rlxf.envs.resume import episode_state, resume_episodes
from rlxf.evaluation import evaluate
from rlxf.utils.errors import EpisodeLostError
from tests.envs.faulty_envs import wait_until

MAZES = Curriculum(({"corridor_length": 2}, {"corridor_length": 4}), advance_return=-9.0, episodes=3)
TASK = {"corridor_length": 8}


class Given(gymnasium.Env):
    """Episodes of one step whose return is the action; the observation is the stage and a random number."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-9, 9, (), np.float64)

    def __init__(self, stage: int):
        self.own = stage

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.own, self.np_random.random()]), {}

    def step(self, action):
        return np.array([self.own, 0.0]), float(action), True, False, {}


def given(stages=3, advance_return=1.0, episodes=3):
    easier = tuple({"number": number} for number in range(stages - 1))
    makers = [partial(Given, stage) for stage in range(1, stages + 1)]
    return CurriculumEnv(makers, Curriculum(easier, advance_return, episodes))


def expected_stages(returns, stages, advance_return, episodes):
    """Return the stage of each episode by the definition, with a loop over all earlier episodes."""
    stage, since, found = 1, 0, []
    for number in range(len(returns)):
        found.append(stage)
        own = returns[since : number + 1]
        if stage < stages and len(own) >= episodes and sum(own[-episodes:]) / episodes >= advance_return:
            stage, since = stage + 1, number + 1
    return found


@pytest.mark.parametrize("episodes", [1, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_stages_follow_the_definition(episodes, seed):
    returns = np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 2.0], 60)
    env, stages = given(4, 0.95, episodes), []
    for value in returns:
        stages.append(int(env.reset(seed=None)[0][0]))
        env.step(value)
    assert stages == expected_stages(returns.tolist(), 4, 0.95, episodes)
    assert stages[-1] > 1


def test_evaluations_use_the_task_and_do_not_change_the_stage():
    env = given(3, advance_return=1.0, episodes=1)
    env.begin_evaluation()
    assert env.reset()[0][0] == 3
    env.step(9.0)
    assert env.persistent_state() == {"stage": 1, "returns": []}
    env.reset()
    env.end_evaluation()
    env.step(9.0)  # the episode began in the evaluation
    assert env.reset()[0][0] == 1
    env.step(9.0)
    assert env.reset()[0][0] == 2


def test_an_episode_stays_in_its_stage():
    env = CurriculumEnv(
        [partial(gymnasium.make, "rlxf/TMaze-v0", corridor_length=n) for n in (1, 9)],
        Curriculum(({},), advance_return=-9.0, episodes=1),
    )
    lengths = []
    for seed in range(2):
        env.reset(seed=seed)
        lengths.append(next(t for t in range(1, 99) if any(env.step(0)[2:4])))
        assert env.stage == 2  # for the next episode
    assert lengths[0] < lengths[1]


def test_seeds_determine_the_episodes_of_all_stages():
    observations = []
    for _ in range(2):
        env = given(episodes=1)
        observations.append([env.reset(seed=5)[0]])
        for value in (1.0, 0.0, 1.0, 1.0):
            env.step(value)
            observations[-1].append(env.reset()[0])
    assert np.array_equal(*observations)
    assert len(np.unique(np.array(observations[0])[:, 1])) == 5


def played(env, steps, seed=0):
    """Return the results of random actions, and the stages after each step."""
    generator, results = np.random.default_rng(seed), []
    for _ in range(steps):
        actions = np.where(generator.random(env.num_envs) < 0.8, 0, generator.integers(4, size=env.num_envs))
        observations, rewards, dones, _ = env.step(actions)
        results.append((copy.deepcopy(observations), rewards.copy(), dones.copy(), env.get_attr("stage")))
    return results


def same(one, other):
    pairs = [pair for x, y in zip(one, other, strict=True) for pair in zip(x, y, strict=True)]
    return all(np.array_equal(*pair) for pair in pairs)


def test_worker_processes_have_the_same_stages():
    results = []
    for workers in (None, Workers(2)):
        with closing(make_vec_env("rlxf/TMaze-v0", 3, 7, TASK, workers=workers, curriculum=MAZES)) as env:
            env.reset()
            results.append(played(env, 80))
    assert same(*results)
    assert {stage for *_, stages in results[0] for stage in stages} == {1, 2, 3}


@pytest.mark.parametrize("cut", [0, 1, 9, 40, 77])
def test_a_replayed_episode_has_the_stage_of_the_recorded_one(cut):
    def make():
        return make_vec_env("rlxf/TMaze-v0", 2, 7, TASK, curriculum=MAZES)

    with closing(make()) as env, closing(make()) as resumed:
        env.reset()
        resumed.reset()
        played(env, cut)
        for number, record in enumerate(env.env_method("record")):
            assert resumed.env_method("replay", record, indices=number) == [None]
        assert same(played(env, 60, seed=1), played(resumed, 60, seed=1))


@pytest.mark.parametrize("workers", [None, Workers(2)], ids=str)
@pytest.mark.parametrize("saving", [None, Workers(2)], ids=str)
def test_saved_episodes_continue_in_their_stages(saving, workers):
    def make(workers):
        return make_vec_env(
            "rlxf/TMaze-v0", 3, 7, TASK, previous_transition=True, workers=workers, curriculum=MAZES
        )

    with closing(make(saving)) as env, closing(make(workers)) as resumed:
        env.reset()
        resumed.reset()
        played(env, 33)
        document, arrays = episode_state(env)
        assert {record["state"]["stage"] for record in document["records"]} - {1}
        resume_episodes(resumed, json.loads(json.dumps(document)), arrays)
        results = [played(each, 40, seed=1) for each in (env, resumed)]
    for one, other in zip(*results, strict=True):
        assert all(np.array_equal(one[0][key], other[0][key]) for key in one[0])
        assert same([one[1:]], [other[1:]])


def until_stage(env, stage):
    """Play until each environment is in a stage."""
    for step in range(400):
        stages = played(env, 1, seed=step)[-1][-1]
        if min(stages) >= stage:
            return
    raise AssertionError(f"stage {stage} was not reached")


def kill(env, i):
    os.kill(env.pool._workers_by_env[i]._process.pid, signal.SIGKILL)


def stages_after(env, steps):
    return {stage for *_, stages in played(env, steps) for stage in stages if stage is not None}


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_a_restarted_environment_continues_in_its_stage():
    with closing(make_vec_env("rlxf/TMaze-v0", 2, 7, TASK, workers=Workers(2), curriculum=MAZES)) as env:
        env.reset()
        until_stage(env, 3)
        kill(env, 1)
        assert stages_after(env, 60) == {3}
        assert env.restarts == 1


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
@pytest.mark.parametrize("failure", ["before saving", "after resuming"])
@pytest.mark.parametrize("saving", [None, Workers(2, back_off=100.0)], ids=["no workers", "workers"])
def test_stages_last_across_resumption_and_failure(saving, failure):
    def make(workers):
        return make_vec_env("rlxf/TMaze-v0", 2, 7, TASK, workers=workers, curriculum=MAZES)

    if saving is None and failure == "before saving":
        pytest.skip("environments in this process do not fail")
    with closing(make(saving)) as env, closing(make(Workers(2))) as resumed:
        env.reset()
        resumed.reset()
        until_stage(env, 3)
        if failure == "before saving":
            kill(env, 1)
            wait_until(lambda: 1 in env.failed_envs())
        document, arrays = episode_state(env)
        resume_episodes(resumed, json.loads(json.dumps(document)), arrays)
        if failure == "after resuming":
            kill(resumed, 1)
        assert stages_after(resumed, 60) == {3}
        assert resumed.restarts >= 1


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_a_stage_of_another_curriculum_does_not_prevent_restarts():
    shorter = Curriculum(MAZES.stages[:1], MAZES.advance_return, MAZES.episodes)
    workers = Workers(2, back_off=0.0)
    with (
        closing(make_vec_env("rlxf/TMaze-v0", 2, 7, TASK, curriculum=MAZES)) as env,
        closing(make_vec_env("rlxf/TMaze-v0", 2, 7, TASK, workers=workers, curriculum=shorter)) as resumed,
    ):
        env.reset()
        resumed.reset()
        until_stage(env, 3)
        with pytest.raises(EpisodeLostError, match="not a state of 2 stages"):
            resume_episodes(resumed, *episode_state(env))
        resumed.pool.persistent_states[1] = {"stage": 3, "returns": []}
        resumed.reset()
        kill(resumed, 1)
        assert stages_after(resumed, 100) <= {1, 2}
        assert resumed.pool.persistent_states[0] is None or resumed.pool.persistent_states[0]["stage"] <= 2


@pytest.mark.parametrize(
    "state",
    [
        {"stage": 4, "returns": []},
        {"stage": 0, "returns": []},
        {"stage": True, "returns": []},
        {"stage": 1.0, "returns": []},
        {"stage": 1, "returns": "1"},
        {"stage": 1, "returns": [None]},
        {"stage": 1, "returns": [float("nan")]},
        {"stage": 1, "returns": [True]},
        {"stage": 1, "returns": [], "task": {}},
        {"stage": 1},
        [],
        None,
    ],
    ids=str,
)
def test_a_state_that_is_not_one_of_these_stages_is_reported(state):
    env = ActionReplay(given())
    env.reset(seed=0)
    record = env.record()
    assert record["state"] == {"stage": 1, "returns": []}
    assert "cannot be replayed" in env.replay(record | {"state": state})
    assert env.get_wrapper_attr("stage") == 1 or "task" in state


def test_a_state_keeps_only_the_last_returns():
    env = given(episodes=2)
    env.load_persistent_state({"stage": 2, "returns": [9.0] * 1000})
    assert env.persistent_state() == {"stage": 2, "returns": [9.0, 9.0]}


def test_stages_are_ids_or_arguments():
    tasks = Curriculum(("CartPole-v0", {"a": 1, "b": 2}), 1).tasks("CartPole-v1", {"a": 0, "c": 3})
    assert tasks == [
        ("CartPole-v0", {}),
        ("CartPole-v1", {"a": 1, "b": 2, "c": 3}),
        ("CartPole-v1", {"a": 0, "c": 3}),
    ]


def test_the_spec_and_the_options_of_the_observation_are_those_of_the_task():
    with closing(
        make_vec_env("rlxf/TMaze-v0", 2, 0, TASK, previous_transition=True, curriculum=MAZES)
    ) as env:
        assert env.get_attr("spec")[0].id == "rlxf/TMaze-v0"
        assert env.get_attr("spec")[0].kwargs["corridor_length"] == 8
        assert "previous_reward" in env.observation_space.spaces
        assert env.get_attr("stages") == [3, 3]


class Level(gymnasium.Env):
    """Task whose level, which the observation shows, rises with each episode."""

    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, levels=(0,)):
        self.levels = list(levels)

    def persistent_state(self):
        return self.levels

    def load_persistent_state(self, state):
        self.levels[:] = state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        self.levels.append(self.levels[-1] + 1)
        return self._observe(), 0.0, len(self.levels) % 2 == 0, False, {}

    def action_masks(self):
        return np.array([True, len(self.levels) > 3])

    def _observe(self):
        return np.array([self.levels[-1]], np.float32)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])  # after 3 steps, the second stage begins
@pytest.mark.parametrize("has_curriculum", [False, True])
def test_the_persistent_state_of_a_task_is_restored(steps, has_curriculum):
    def make():
        curriculum = Curriculum([{"levels": [5]}], advance_return=0.0, episodes=2) if has_curriculum else None
        return make_vec_env(Level, 1, 3, {"levels": [0]}, curriculum=curriculum)

    def observations(env, number):
        return [env.step(np.array([0]))[0].item() for _ in range(number)]

    with closing(make()) as env, closing(make()) as resumed:
        env.reset()
        resumed.reset()
        observations(env, steps)
        observations(resumed, 3)
        assert resumed.env_method("replay", *env.env_method("record")) == [None]
        assert observations(env, 12) == observations(resumed, 12)


@pytest.mark.parametrize("state", [{1: np.float32(2)}, float("nan")], ids=str)
def test_a_persistent_state_that_is_not_json_is_reported_at_the_first_reset(state, monkeypatch):
    monkeypatch.setattr(Level, "persistent_state", lambda self: state)
    with pytest.raises((TypeError, ValueError), match="JSON"):
        ActionReplay(Level()).reset(seed=0)


def test_the_environment_of_the_current_stage_is_reachable_and_others_are_closed():
    closed = []

    class Noted(Level):
        def close(self):
            closed.append(self.levels[0])

    env_fns = [partial(Noted, [number]) for number in (10, 20, 30)]
    env = CurriculumEnv(env_fns, Curriculum([{}, {}], 0.0, 1))
    for number in (10, 20, 30):
        assert int(env.reset(seed=0)[0][0]) == number
        assert env.get_wrapper_attr("action_masks")().tolist() == [True, False]
        assert closed == [each for each in (10, 20) if each < number]
        assert env.step(0)[4]["curriculum_stage"] == number // 10
    env.close()
    assert closed == [10, 20, 30]


def test_wrappers_of_the_user_see_the_rewards_after_the_monitor():
    class Half(gymnasium.RewardWrapper):
        def reward(self, reward):
            return reward / 2

    curriculum = Curriculum(({"stage": 1},), 2.0, 1)
    with closing(make_vec_env(Given, 1, 0, {"stage": 2}, wrapper_class=Half, curriculum=curriculum)) as env:
        env.reset()
        observations, rewards, _, (info,) = env.step(np.array([2.0]))
    assert (rewards[0], info["episode"]["r"], observations[0, 0]) == (1.0, 2.0, 2)


def test_stages_by_id_have_the_render_mode_of_the_task():
    curriculum = Curriculum(("CartPole-v0",), 1e9)
    kwargs = {"render_mode": "rgb_array"}
    with closing(make_vec_env("CartPole-v1", 1, 0, kwargs, curriculum=curriculum)) as env:
        env.reset()
        assert env.get_images()[0].ndim == 3


def test_returns_that_are_not_finite_do_not_count():
    env = given(episodes=1)
    for value in (float("nan"), float("inf")):
        env.reset(seed=0)
        env.step(value)
        assert env.persistent_state() == {"stage": 1, "returns": []}


def test_wrappers_of_packages_apply_to_each_stage():
    pytest.importorskip("minigrid")
    curriculum = Curriculum(("MiniGrid-MemoryS7-v0",), 0.5, 1)
    with closing(make_vec_env("MiniGrid-MemoryS9-v0", 1, 0, curriculum=curriculum)) as env:
        assert env.observation_space.shape == (984,)
        env.reset()
        env.env_method("load_persistent_state", {"stage": 2, "returns": []})
        assert env.reset().shape == (1, 984)


def test_environment_classes_have_stages_too():
    curriculum = Curriculum(({"stage": 1},), 1.0, 1)
    with closing(make_vec_env(Given, 1, env_kwargs={"stage": 2}, curriculum=curriculum)) as env:
        assert env.reset()[0, 0] == 1
        assert env.step(np.array([1.0]))[0][0, 0] == 2


class Nested(Given):
    """`Given` with a nested observation space, whose infos reach the callback at the end of episodes only."""

    observation_space = spaces.Dict({"a": spaces.Dict({"b": Given.observation_space})})

    def reset(self, **options):
        observation, info = super().reset(**options)
        return {"a": {"b": observation}}, info

    def step(self, action):
        observation, *others = super().step(action)
        return {"a": {"b": observation}}, *others


def test_the_stages_of_nested_observations_reach_the_callback():
    curriculum = Curriculum(({"stage": 1},), -9, 1)
    callback = CurriculumCallback()
    with closing(make_vec_env(Nested, 2, 0, {"stage": 2}, curriculum=curriculum)) as env:
        env.reset()
        callback.init_callback(SimpleNamespace(get_env=lambda: env, logger=None))
        callback._on_training_start()
        for _ in range(2):
            callback.locals = {"infos": env.step(np.zeros(2))[3]}
            callback._on_step()
    assert callback._stages == {0: 2, 1: 2}


def test_numbers_of_numpy_are_accepted():
    curriculum = Curriculum([{}], np.float32(0.5), np.int64(3))
    assert (curriculum.advance_return, curriculum.episodes) == (0.5, 3)
    assert type(curriculum.advance_return) is float


def test_a_stage_that_cannot_begin_keeps_the_environment_of_the_last_one(monkeypatch):
    closed = []
    monkeypatch.setattr(Level, "close", lambda self: closed.append(self))
    env = CurriculumEnv([partial(Given, 1), partial(Level, [1])], Curriculum([{}], -9, 1))
    env.reset(seed=0)
    env.step(0.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="need the same spaces: stage 2"):
            env.reset()
    assert isinstance(env.unwrapped, Given)
    assert len(closed) == 2


def test_the_mean_stage_is_logged(tmp_path):
    with closing(
        make_vec_env(Given, 4, 0, {"stage": 2}, curriculum=Curriculum(({"stage": 1},), -9, 2))
    ) as env:
        agent = PPO("MlpPolicy", env, n_steps=1, batch_size=4, n_epochs=1, seed=0, device="cpu")
        agent.set_logger(Logger(str(tmp_path), [make_output_format("csv", str(tmp_path))]))
        agent.learn(12, callback=CurriculumCallback(), log_interval=1)
    header, *rows = (tmp_path / "progress.csv").read_text().splitlines()
    column = header.split(",").index("curriculum/stage")
    assert [float(row.split(",")[column]) for row in rows] == [1.0, 1.0, 2.0]


def test_a_callback_without_a_curriculum_warns():
    with closing(make_vec_env("CartPole-v1", 2, 0)) as env:
        agent = PPO("MlpPolicy", env, n_steps=2, batch_size=4, n_epochs=1, seed=0, device="cpu")
        with pytest.warns(UserWarning, match="logs nothing, because the environments have no curriculum"):
            agent.learn(4, callback=CurriculumCallback())


def test_episodes_that_a_wrapper_ends_do_not_count_with_a_warning():
    wrapper = partial(TimeLimit, max_episode_steps=1)
    with closing(make_vec_env("rlxf/TMaze-v0", 2, 0, TASK, wrapper, curriculum=MAZES)) as env:
        env.reset()
        with pytest.warns(UserWarning, match=r"the last 10 episodes in stage 1 .* were ended by a reset"):
            stages = stages_after(env, 12)
    assert stages == {1}


def test_limits_of_the_environment_itself_are_ends_of_episodes(recwarn):
    task = TASK | {"max_episode_steps": 1}
    with closing(make_vec_env("rlxf/TMaze-v0", 2, 0, task, curriculum=MAZES)) as env:
        env.reset()
        assert stages_after(env, 12) == {1, 2, 3}
    assert not recwarn


def test_evaluations_and_a_few_resets_in_the_middle_of_episodes_do_not_warn(recwarn):
    env = CurriculumEnv([partial(gymnasium.make, "rlxf/TMaze-v0")] * 2, MAZES)
    for number in range(60):
        if number % 3:
            env.begin_evaluation()
        env.reset(seed=0)
        env.step(0)
        env.end_evaluation()
        if number % 27 == 24:
            while not any(env.step(0)[2:4]):
                pass
    assert not recwarn
    assert env.stage == 1


def test_resets_in_the_middle_of_episodes_warn_only_in_succession(recwarn):
    env = CurriculumEnv([partial(gymnasium.make, "rlxf/TMaze-v0")] * 2, Curriculum(({},), 99.0))
    for number in range(30):
        env.reset(seed=0)
        while not any(env.step(0)[2:4]) and number % 10 == 9:
            pass
    assert not recwarn
    for _ in range(10):
        env.reset(seed=0)
        env.step(0)
    with pytest.warns(UserWarning, match="the last 10 episodes in stage 1"):
        env.reset(seed=0)


def test_many_evaluations_in_the_middle_of_episodes_do_not_warn(recwarn):
    env = CurriculumEnv([partial(gymnasium.make, "rlxf/TMaze-v0")] * 2, MAZES)
    for _ in range(20):
        env.reset(seed=0)
        env.step(0)
        env.begin_evaluation()
        env.reset(seed=0)
        env.end_evaluation()
    assert not recwarn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1.0), "needs from 1 to 100 easier stages before the task, got 0"),
        ((({},) * 101, 1.0), "needs from 1 to 100 easier stages before the task, got 101"),
        (("CartPole-v1", 1.0), "must be a list, got 'CartPole-v1'"),
        (({"a": 1}, 1.0), "must be a list, got {'a': 1}"),
        ((({},), 10**400), "advance_return must be a finite number, got 1000"),
        ((({},), 1.0, 1001), "episodes must be a whole number from 1 to 1,000, got 1001"),
        ((({},), 1.0, True), "episodes must be a whole number from 1 to 1,000, got True"),
        (((3,), 1.0), "must be the id of an environment, such as 'CartPole-v1', or arguments .* got 3"),
        ((({},), None), "advance_return must be a finite number, got None"),
        ((({},), True), "advance_return must be a finite number, got True"),
        ((({},), float("nan")), "advance_return must be a finite number, got nan"),
        ((({},), 1.0, 0), "episodes must be a whole number from 1 to 1,000, got 0"),
        ((({},), 1.0, 2.5), "episodes must be a whole number from 1 to 1,000, got 2.5"),
    ],
    ids=str,
)
def test_what_is_no_curriculum_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Curriculum(*arguments)


def test_stages_with_other_spaces_are_refused():
    with pytest.raises(ValueError, match=r"need the same spaces: stage 2 has .*, but stage 1 has"):
        make_vec_env("rlxf/TMaze-v0", 1, curriculum=Curriculum(({}, "CartPole-v1"), 1.0))


def test_unknown_stages_are_refused():
    with pytest.raises(ValueError, match="CartPole-v1"):
        make_vec_env("CartPole-v1", 1, curriculum=Curriculum(("CartPol-v1",), 1.0))
    with pytest.raises(TypeError, match=r"takes no argument 'corridor_lenght'.*corridor_length"):
        make_vec_env("rlxf/TMaze-v0", 1, curriculum=Curriculum(({"corridor_lenght": 3},), 1.0))


class Fixed:
    """Agent with the action 2."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.full(len(observation), 2.0), state


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_vector_environments_of_gymnasium_are_evaluated_in_the_task(kind):
    env = kind([partial(given, episodes=1, advance_return=9.0)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    envs, seen = as_vec_env(env), []

    class Watching(Fixed):
        def predict(self, observation, *args, **kwargs):
            seen.append(observation[:, 0].tolist())
            return super().predict(observation, *args, **kwargs)

    evaluate(Watching(), envs, episodes=4)
    assert {stage for stages in seen for stage in stages} == {3.0}
    assert envs.reset()[:, 0].tolist() == [1.0, 1.0]
    envs.close()


@pytest.mark.parametrize("stages", [[{"corridor_length": 5}], {"corridor_length": 5}, "CartPole-v0"])
def test_stages_without_a_curriculum_raise(stages):
    with pytest.raises(TypeError, match=r"pass rlxf.envs.Curriculum\(stages, advance_return=...\)"):
        make_vec_env("rlxf/TMaze-v0", 1, curriculum=stages)
