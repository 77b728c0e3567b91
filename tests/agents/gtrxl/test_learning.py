"""The agent solves tasks that require memory, trains with every technique, and repeats with a seed."""

import pytest
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from rlxf.envs.make import make_vec_env
from rlxf.training import linear
from tests.agents.gtrxl.test_sb3_tools import recorded_logs
from tests.agents.gtrxl.worlds import (
    limited_to_memory,
    next_step_scripts,
    parameters,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.agents.techniques import all_have_moved, each, weights

CORRIDOR = {"corridor_length": 5}


@pytest.mark.slow
def test_agent_solves_tmaze():
    """Without memory, no policy succeeds in more than half of the mazes."""
    agent = small_agent(
        make_vec_env("rlxf/TMaze-v0", 16, seed=1, env_kwargs=CORRIDOR),
        loud=False,
        core=small_core(width=32, layers=1),
        n_steps=24,
        segment_length=12,
        batch_size=96,
        n_epochs=6,
        learning_rate=linear(1e-3, 0.0),
        ent_coef=linear(0.03, 0.0),
    )
    agent.learn(32_000)
    mean, _ = evaluate_policy(agent, sb3_make_vec_env("rlxf/TMaze-v0", 8, env_kwargs=CORRIDOR), 100)
    assert mean > 0.9


def test_the_reconstruction_error_falls():
    agent = small_agent(
        make_vec_env("rlxf/TMaze-v0", 4, seed=1, env_kwargs=CORRIDOR),
        loud=False,
        reconstruction_coef=1.0,
        n_epochs=6,
        learning_rate=5e-3,
    )
    logs = recorded_logs(agent)
    agent.learn(4 * 16 * 12)
    errors = [table["train/reconstruction_loss"] for table in logs.tables[1:]]
    assert sum(errors[-3:]) < 0.5 * sum(errors[:3])


@pytest.mark.parametrize("env_id", ["popgym-RepeatPreviousEasy-v0", "MiniGrid-MemoryS7-v0"])
def test_memory_extra_tasks_train(env_id):
    agent = small_agent(make_vec_env(env_id, 2, seed=1), loud=False, learning_rate=1e-3)
    initial = parameters(agent)
    agent.learn(2 * 2 * 16)
    assert agent.num_timesteps == 2 * 2 * 16
    assert agent._n_updates == 2 * agent.n_epochs
    assert not same(initial, parameters(agent))


@each
def test_two_updates(choice):
    agent = small_agent(scripts(shifted(3)), core=limited_to_memory(small_core(), **choice))
    before = weights(agent.policy)
    agent.learn(2 * agent.n_steps * agent.n_envs)
    all_have_moved(before, agent.policy)


MAKERS = {
    "id": lambda: "rlxf/TMaze-v0",
    "VecEnv": lambda: scripts(shifted(3)),
    "reset steps": lambda: next_step_scripts(shifted(3)),
}


def trained(make, seed):
    agent = small_agent(make(), loud=False, seed=seed, reconstruction_coef=0.1, learning_rate=1e-3)
    return parameters(agent.learn(2 * 3 * 16))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_two_updates_with_same_seed(make):
    first = trained(make, seed=5)
    assert same(first, trained(make, seed=5))
    assert not same(first, trained(make, seed=6))


def test_predict_during_training_does_not_change_memory():
    """Calling predict during training changes neither the rollout buffer nor the recurrent state."""
    results = []
    for predicts in (False, True):
        agent = small_agent(scripts(shifted(3)), learning_rate=1e-3).learn(3 * 16)
        if predicts:
            agent.predict(agent._last_obs, deterministic=True)
        agent.learn(3 * 16, reset_num_timesteps=False)
        results.append(parameters(agent))
    assert same(*results)
