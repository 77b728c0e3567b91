"""Equal seeds give equal agents, bit for bit."""

import pytest

from tests.agents.gtrxl.worlds import next_step_scripts, parameters, same, scripts, shifted, small_agent

MAKERS = {
    "id": lambda: "rlxf/TMaze-v0",
    "VecEnv": lambda: scripts(shifted(3)),
    "filler rows": lambda: next_step_scripts(shifted(3)),
}


def trained(make, seed):
    agent = small_agent(make(), loud=False, seed=seed, reconstruction_coef=0.1, learning_rate=1e-3)
    return parameters(agent.learn(2 * 3 * 16))


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
