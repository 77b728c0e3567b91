"""Tests of the classic control tasks without velocities."""

import gymnasium
import numpy as np
import pytest

from rlxf import collect, evaluate
from rlxf.agents.mlp import BehaviorCloning

TASKS = {
    "rlxf/CartPoleNoVel-v1": ("CartPole-v1", [1, 3]),
    "rlxf/PendulumNoVel-v1": ("Pendulum-v1", [2]),
    "rlxf/MountainCarContinuousNoVel-v0": ("MountainCarContinuous-v0", [1]),
    "rlxf/LunarLanderNoVel-v3": ("LunarLander-v3", [2, 3, 5]),
}
each = pytest.mark.parametrize(("task", "original", "hidden"), [(t, *v) for t, v in TASKS.items()], ids=TASKS)


@each
def test_only_velocities_are_zero(task, original, hidden):
    if "Lunar" in task:
        pytest.importorskip("Box2D")
    env, other = gymnasium.make(task), gymnasium.make(original)
    pairs = [(env.reset(seed=3)[0], other.reset(seed=3)[0])]
    for _ in range(20):
        action = other.action_space.sample()
        masked, whole = env.step(action), other.step(action)
        assert masked[1:] == whole[1:]
        pairs.append((masked[0], whole[0]))
        if masked[2]:
            break
    seen = [i for i in range(len(pairs[0][0])) if i not in hidden]
    assert all((masked[hidden] == 0).all() for masked, _ in pairs)
    assert all(np.array_equal(masked[seen], whole[seen]) for masked, whole in pairs)
    assert any(whole[hidden].any() for _, whole in pairs)


@each
def test_spaces_and_time_limit_are_the_original_ones(task, original, hidden):
    if "Lunar" in task:
        pytest.importorskip("Box2D")
    env, other = gymnasium.make(task), gymnasium.make(original)
    assert (env.observation_space, env.action_space) == (other.observation_space, other.action_space)
    assert env.observation_space.contains(env.reset(seed=0)[0])
    assert env.get_wrapper_attr("_max_episode_steps") == gymnasium.spec(original).max_episode_steps


@pytest.mark.parametrize("task", [task for task in TASKS if "Lunar" not in task])
def test_agents_of_recorded_data_can_be_evaluated(task, minari_root):
    """The wrapper is a part of the registered task, so a dataset does not describe it as an addition."""
    collect(None, task, "test/masked-v0", episodes=2, n_envs=1)
    agent = BehaviorCloning("test/masked-v0", hidden_sizes=(4,), seed=0)
    report = evaluate(agent, episodes=1, n_envs=1)
    assert report.lengths.max() <= gymnasium.spec(task).max_episode_steps
