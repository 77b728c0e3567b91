"""Memory that persists across episodes: attention crosses their ends, returns do not."""

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from torch.nn.functional import one_hot

from rlxf import GTrXLPPO, evaluate
from rlxf.attention import Compressive, Full, TokenIndex
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs import PreviousTransition
from rlxf.envs.tensor_vec_env import as_vec_env
from tests.agents.gtrxl.test_predict import play
from tests.agents.gtrxl.test_ratio import assert_acts_as_it_learns
from tests.agents.gtrxl.test_truncation import ENVS, MEMORY, Recorder, slow_value
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    TERMINATED,
    next_step_scripts,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.attention.specs import SHORT
from tests.covering import covering

ENDING = ("LearnedAbsolute", "LearnedPerLayer", "Multiplicative", "Tupe", "Floater")


def persistent_agent(env, **changes):
    return small_agent(env, persist_memory_across_episodes=True, **changes)


@settings(max_examples=4, deadline=None)
@given(ends=st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=24), min_size=1, max_size=3))
def test_acting_equals_learning_for_any_episode_ends(ends):
    assert_acts_as_it_learns(persistent_agent(scripts(ends)))


@settings(max_examples=3, deadline=None)
@given(ends=st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=24), min_size=1, max_size=3))
def test_acting_equals_learning_with_filler_rows(ends):
    assert_acts_as_it_learns(persistent_agent(as_vec_env(next_step_scripts(ends))), number=3)


def chosen(axis, name):
    return SHORT.get(name) or TECHNIQUES[axis][name]()


@pytest.mark.parametrize("name", TECHNIQUES["position"])
def test_limited_positions_are_rejected(name):
    core = replace(small_core(), position=chosen("position", name))
    if name in ENDING:
        with pytest.raises(ValueError, match=rf"persist_memory_across_episodes=True positions grow .*{name}"):
            persistent_agent(scripts(shifted(2)), core=core)
        return
    agent = persistent_agent(scripts(shifted(2)), core=core)
    far = TokenIndex.range(2, 5, start=10**6)
    with torch.no_grad():
        y, _ = agent.policy.transformer.encode(torch.randn(2, 5, core.width), far)
    assert y.isfinite().all()
    assert_acts_as_it_learns(agent, number=1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_compressive_memory_with_filler_rows_is_rejected(wrapped):
    core = replace(small_core(), memory=Compressive(2, 4, 3), pattern=Full())
    env = as_vec_env(next_step_scripts(shifted(2)))
    agent = persistent_agent(VecNormalize(env) if wrapped else env, core=core)
    with pytest.raises(ValueError, match=r"reset step .*Compressive.* discard every block .*SAME_STEP"):
        agent.learn(32)
    assert agent.num_timesteps == 0
    agent.set_env(scripts(shifted(2)))
    assert_acts_as_it_learns(agent, number=3)


def test_compressive_memory_with_filler_rows_works_within_episodes():
    core = replace(small_core(), memory=Compressive(2, 4, 3), pattern=Full())
    assert_acts_as_it_learns(small_agent(next_step_scripts(shifted(2)), core=core), number=3)


def test_positions_continue_across_episodes():
    agent = persistent_agent(scripts(shifted(2)))
    for number, buffer in enumerate(rollouts(agent, 2)):
        steps = torch.arange(16 * number, 16 * (number + 1))
        assert torch.equal(buffer.index.position[:, MEMORY:], steps.expand(2, -1))
        assert (buffer.index.episode[:, MEMORY:] == 0).all()
        assert buffer.dones.any()


@pytest.mark.parametrize("across", [True, False])
def test_earlier_episode_affects_actions_only_across_episodes(across):
    agent = small_agent(
        scripts(shifted(1), action_space=ACTIONS["Box"]),
        persist_memory_across_episodes=across,
        previous_action=False,
    )
    seen = np.random.default_rng(0).uniform(-1, 1, (6, 1, 3)).astype(np.float32)
    starts = np.arange(6)[:, None] % 3 == 0
    other = seen.copy()
    other[1] *= -1
    first, second = (play(agent, shown, starts)[0] for shown in (seen, other))
    assert (first[1] != second[1]).any()
    assert (first[3:] != second[3:]).any() == across


def test_previous_action_persists_across_episodes():
    agent = persistent_agent(scripts(shifted(1), action_space=ACTIONS["Box"]))
    observation = np.zeros((1, 3), np.float32)
    _, state = agent.predict(observation)
    acting = state.copy()
    acting.advance(torch.ones(1, dtype=torch.bool))
    assert torch.equal(acting.action, state.action)
    assert state.action.abs().max() > 0
    assert acting.position.tolist() == [1]


@covering(
    2,
    world={"same step": scripts, "next step": next_step_scripts},
    across={"across episodes": True, "episodes": False},
    ends={"many": shifted(ENVS), "always": [[TERMINATED]] * ENVS},
)
def test_previous_action_is_last_executed_action(world, across, ends):
    """Across episodes this includes the last action of the previous episode."""
    agent = small_agent(world(ends), persist_memory_across_episodes=across)
    before = torch.zeros(ENVS, 3)
    for buffer in rollouts(agent, 3):
        executed, real = one_hot(buffer.actions, 3).float(), buffer.weight == 1
        for t in range(buffer.n_steps):
            rows = real[:, t]
            assert torch.equal(buffer.previous[rows, t], before[rows])
            known = torch.full_like(rows, across) | ~buffer.dones[:, t]
            before[rows] = (executed[:, t] * known[:, None])[rows]


def test_episode_start_has_no_effect_across_episodes():
    agent = persistent_agent(scripts(shifted(1), action_space=ACTIONS["Box"]))
    seen = np.random.default_rng(0).uniform(-1, 1, (7, 2, 3)).astype(np.float32)
    never, always = (np.full((7, 2), starts) for starts in (False, True))
    with_starts, without_starts = (play(agent, seen, starts)[0] for starts in (always, never))
    np.testing.assert_array_equal(with_starts, without_starts)
    np.testing.assert_array_equal(play(agent, seen, never)[0], without_starts)  # calls are independent


def test_returns_end_with_the_episode():
    agent = persistent_agent(scripts([[0, 0, TERMINATED]] * 2), gamma=0.9, gae_lambda=0.8)
    for buffer in rollouts(agent, 1):
        slow = torch.zeros(2, 16)
        for env in range(2):
            following = 0.0
            for t in reversed(range(15)):
                not_done = 0.0 if buffer.dones[env, t] else 1.0
                delta = buffer.rewards[env, t] + 0.9 * not_done * buffer.values[env, t + 1]
                following = delta - buffer.values[env, t] + 0.72 * not_done * following
                slow[env, t] = following
        torch.testing.assert_close(buffer.advantages[:, :12], slow[:, :12], atol=1e-5, rtol=1e-5)


def test_truncated_step_is_bootstrapped_with_memory_of_all_episodes():
    env = Recorder(scripts(shifted(ENVS)))
    agent = persistent_agent(env, gamma=0.9)
    for buffer in rollouts(agent, 3):
        cuts = 0
        for t, (rewards, infos) in enumerate(env.steps):
            for e, info in enumerate(infos):
                cut = bool(info.get("TimeLimit.truncated"))
                value = slow_value(agent, buffer, e, t, info["terminal_observation"]) if cut else 0.0
                assert buffer.rewards[e, t].item() == pytest.approx(rewards[e] + 0.9 * value, abs=1e-4)
                cuts += cut
        assert cuts > 2
        env.steps.clear()


@pytest.mark.parametrize("across", [True, False])
def test_memory_persists_between_calls_of_learn_until_reset(across):
    agent = small_agent(scripts([[0]] * 3), persist_memory_across_episodes=across)
    agent.learn(3 * 16)
    agent.learn(3 * 16, reset_num_timesteps=False)
    assert agent.rollout_buffer.index.position.max() == 31
    agent.learn(3 * 16)  # the environments are reset
    assert agent.rollout_buffer.index.position.max() == 15
    assert (agent.rollout_buffer.index.episode[:, :MEMORY] == -1).all()


def test_setting_is_saved(tmp_path):
    persistent_agent(scripts(shifted(1))).save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    assert loaded.persist_memory_across_episodes
    _, state = loaded.predict(np.zeros((1, 3), np.float32))
    _, state = loaded.predict(np.zeros((1, 3), np.float32), state, np.ones(1, bool))
    assert state.position.tolist() == [1]


def test_teacher_and_student_need_same_setting():
    env = scripts(shifted(2))
    student, teacher = persistent_agent(env), small_agent(env)
    message = "teacher's persist_memory_across_episodes is False, the student's is True"
    with pytest.raises(ValueError, match=message):
        student.distill(teacher, 32)
    student.distill(persistent_agent(scripts(shifted(2))), 32)


class Levers(gymnasium.Env):
    """Bandit with one-step episodes, constant observations and a fixed rewarded action."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pays):
        self.pays = pays

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action == self.pays), True, False, {}


class Repeats:
    """Agent that records the positions in its state."""

    def __init__(self, agent):
        self.agent, self.seen = agent, []

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        _, state = self.agent.predict(observation, state, episode_start, deterministic)
        self.seen.append(int(state.position[0]))
        return np.zeros(len(episode_start), np.int64), state


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("world", [scripts, next_step_scripts])
def test_evaluation_warns_of_filler_rows_across_episodes(world, across):
    agent = small_agent(scripts(shifted(2)), persist_memory_across_episodes=across)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(agent, world(shifted(2)), 2)
    about = [each.filename for each in caught if "reset steps" in str(each.message)]
    assert about == [__file__] * (across and world is next_step_scripts)


def count_filler_warnings(agent, env):
    """Count the warnings of reset steps from predict in a user-defined loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        obs, state, starts = env.reset(), None, np.ones(env.num_envs, dtype=bool)
        for _ in range(30):
            actions, state = agent.predict(obs, state, starts)
            obs, _, starts, _ = env.step(actions)
    return sum("reset steps" in str(each.message) for each in caught)


@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor, VecNormalize])
def test_predict_warns_once_of_filler_rows(wrap):
    env = wrap(as_vec_env(next_step_scripts(shifted(2))))
    agent = small_agent(env, persist_memory_across_episodes=True)
    assert count_filler_warnings(agent, env) == 1
    assert count_filler_warnings(agent, env) == 0


@pytest.mark.parametrize("across", [True, False])
def test_predict_does_not_warn_without_filler_rows(across):
    agent = small_agent(as_vec_env(next_step_scripts(shifted(2))), persist_memory_across_episodes=across)
    assert count_filler_warnings(agent, scripts(shifted(2))) == 0
    agent = small_agent(as_vec_env(next_step_scripts(shifted(2))))
    assert count_filler_warnings(agent, agent.env) == 0


def test_evaluation_keeps_state_across_episodes():
    env = PreviousTransition(Levers(1))
    for across, positions in ((True, [0, 1, 2, 3]), (False, [0, 0, 0, 0])):
        agent = small_agent(
            env, "MultiInputGTrXLPolicy", persist_memory_across_episodes=across, n_steps=4, batch_size=4
        )
        player = Repeats(agent)
        evaluate(player, env, 4)
        assert player.seen == positions
