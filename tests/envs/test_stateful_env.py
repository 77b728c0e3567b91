"""Seeded episodes: they are the same in every process, and replays are bitwise equal."""

import gymnasium
import numpy as np
import pytest

from rlxf.envs import ActionReplay, PreviousTransition, make_vec_env
from rlxf.envs.stateful_env import MAX_RECORDED_STEPS

ACTIONS = np.random.default_rng(0).integers(2, size=300).tolist()


def cartpole():
    return ActionReplay(gymnasium.make("CartPole-v1"))


def played(env, actions):
    """Play the actions, with a reset after each episode, and return the observations."""
    observations = []
    for action in actions:
        observation, *_, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        if terminated or truncated:
            observations.append(env.reset()[0])
    return np.array(observations)


def test_first_episode_has_the_given_seed():
    inner = gymnasium.make("CartPole-v1")
    assert np.array_equal(cartpole().reset(seed=5)[0], inner.reset(seed=5)[0])


def test_episodes_depend_only_on_the_seed_and_their_number():
    """The first observation of an episode does not depend on the actions in earlier episodes."""
    starts = []
    for length in (1, 3):
        env = cartpole()
        env.reset(seed=5)
        first_observations = []
        for _ in range(4):
            for action in ACTIONS[:length]:
                env.step(action)
            first_observations.append(env.reset()[0])
        starts.append(first_observations)
    assert np.array_equal(*starts)
    assert len({tuple(start) for start in starts[0]}) == 4


@pytest.mark.parametrize("cut", [0, 1, 57, 200])
def test_replayed_episode_continues_equally(cut):
    env = cartpole()
    env.reset(seed=5)
    played(env, ACTIONS[:cut])
    record = env.record()
    expected = played(env, ACTIONS[cut:])
    replayed = cartpole()
    assert replayed.replay(record) is None
    assert np.array_equal(played(replayed, ACTIONS[cut:]), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"number": 3},
        {"actions": np.array(ACTIONS[:4])},
        {"actions": 1 - np.array(ACTIONS[:5])},
    ],
    ids=str,
)
def test_replay_detects_a_different_episode(change):
    env = cartpole()
    env.reset(seed=5)
    for action in ACTIONS[:5]:
        env.step(action)
    assert "gives another episode" in cartpole().replay(env.record() | change)


def test_reset_with_options_and_long_episodes_are_not_replayable(monkeypatch):
    env = cartpole()
    assert "not at all" in env.record()["lost"]
    env.reset(seed=1, options={"low": -0.01})
    assert "options" in env.record()["lost"]
    env.reset()
    monkeypatch.setattr("rlxf.envs.stateful_env.MAX_RECORDED_STEPS", 2)
    for _ in range(3):
        env.step(0)
    assert "longer than 2 steps" in env.record()["lost"]
    assert MAX_RECORDED_STEPS >= 10_000


def test_episodes_without_a_seed_differ():
    first = [cartpole().reset()[0] for _ in range(2)]
    assert not np.array_equal(*first)


@pytest.mark.parametrize("n_envs", [1, 4])
def test_observations_do_not_depend_on_the_number_of_environments(n_envs):
    env = make_vec_env("CartPole-v1", n_envs, seed=7)
    observations = [env.reset()[0]]
    for action in ACTIONS:
        observations.append(env.step(np.full(n_envs, action))[0][0])
    single = cartpole()
    assert np.array_equal(observations[0], single.reset(seed=7)[0])
    steps = [single.step(action) for action in ACTIONS[:5]]
    assert np.array_equal(observations[1:6], [step[0] for step in steps])


def test_previous_transition_persists_across_episodes_with_replayable():
    """`ActionReplay` resets the inner environment with a seed, which must not clear the outer wrappers."""
    env = make_vec_env("CartPole-v1", 1, seed=7, previous_transition=True)
    env.reset()
    done = [env.step(np.array([1]))[0]["previous_done"][0, 0] for _ in range(40)]
    assert sum(done) > 1
    assert env.env_is_wrapped(PreviousTransition) == env.env_is_wrapped(ActionReplay) == [True]
