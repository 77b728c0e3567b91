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
def test_two_updates_with_one_seed(make):
    first = trained(make, seed=5)
    assert same(first, trained(make, seed=5))
    assert not same(first, trained(make, seed=6))


def test_a_prediction_between_does_not_move_the_memory():
    """An agent that is asked in the middle of training has the same rollout buffer and acting state."""
    results = []
    for asked in (False, True):
        agent = small_agent(scripts(shifted(3)), learning_rate=1e-3).learn(3 * 16)
        if asked:
            agent.predict(agent._last_obs, deterministic=True)
        agent.learn(3 * 16, reset_num_timesteps=False)
        results.append(parameters(agent))
    assert same(*results)
