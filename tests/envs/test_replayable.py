"""Episodes with a seed each: the same in every process, and played again to the same bits."""

import gymnasium
import numpy as np
import pytest

from rlxf.envs import PreviousTransition, Replayable, make_vec_env
from rlxf.envs.replayable import MOST_STEPS

ACTIONS = np.random.default_rng(0).integers(2, size=300).tolist()


def cartpole():
    return Replayable(gymnasium.make("CartPole-v1"))


def played(env, actions):
    """What is seen, reset where an episode ends."""
    seen = []
    for action in actions:
        observation, *_, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        if terminated or truncated:
            seen.append(env.reset()[0])
    return np.array(seen)


def test_the_first_episode_is_that_of_the_seed():
    inner = gymnasium.make("CartPole-v1")
    assert np.array_equal(cartpole().reset(seed=5)[0], inner.reset(seed=5)[0])


def test_episodes_depend_on_the_seed_and_their_number_alone():
    """Whatever is played in one, the next one begins alike."""
    starts = []
    for length in (1, 3):
        env = cartpole()
        env.reset(seed=5)
        found = []
        for _ in range(4):
            for action in ACTIONS[:length]:
                env.step(action)
            found.append(env.reset()[0])
        starts.append(found)
    assert np.array_equal(*starts)
    assert len({tuple(start) for start in starts[0]}) == 4


@pytest.mark.parametrize("cut", [0, 1, 57, 200])
def test_an_episode_is_played_again_and_goes_on_alike(cut):
    env = cartpole()
    env.reset(seed=5)
    played(env, ACTIONS[:cut])
    record = env.record()
    behind = played(env, ACTIONS[cut:])
    again = cartpole()
    assert again.replay(record) is None
    assert np.array_equal(played(again, ACTIONS[cut:]), behind)


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
def test_another_episode_is_noticed(change):
    env = cartpole()
    env.reset(seed=5)
    for action in ACTIONS[:5]:
        env.step(action)
    assert "shows another episode" in cartpole().replay(env.record() | change)


def test_a_reset_with_options_and_a_long_episode_cannot_be_played_again(monkeypatch):
    env = cartpole()
    assert "not at all" in env.record()["lost"]
    env.reset(seed=1, options={"low": -0.01})
    assert "options" in env.record()["lost"]
    env.reset()
    monkeypatch.setattr("rlxf.envs.replayable.MOST_STEPS", 2)
    for _ in range(3):
        env.step(0)
    assert "longer than 2 steps" in env.record()["lost"]
    assert MOST_STEPS >= 10_000


def test_without_a_seed_episodes_differ():
    first = [cartpole().reset()[0] for _ in range(2)]
    assert not np.array_equal(*first)


@pytest.mark.parametrize("n_envs", [1, 4])
def test_what_an_environment_shows_does_not_depend_on_how_many_there_are(n_envs):
    env = make_vec_env("CartPole-v1", n_envs, seed=7)
    seen = [env.reset()[0]]
    for action in ACTIONS:
        seen.append(env.step(np.full(n_envs, action))[0][0])
    alone = cartpole()
    assert np.array_equal(seen[0], alone.reset(seed=7)[0])
    rest = [alone.step(action) for action in ACTIONS[:5]]
    assert np.array_equal(seen[1:6], [step[0] for step in rest])


def test_the_transition_before_is_still_seen_across_episodes():
    """Replayable resets with a seed; what stands around it must not take that for a beginning."""
    env = make_vec_env("CartPole-v1", 1, seed=7, previous_transition=True)
    env.reset()
    done = [env.step(np.array([1]))[0]["previous_done"][0, 0] for _ in range(40)]
    assert sum(done) > 1
    assert env.env_is_wrapped(PreviousTransition) == env.env_is_wrapped(Replayable) == [True]
