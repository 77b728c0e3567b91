"""Every technique trains the agent, or is refused in one sentence before anything is built."""

from dataclasses import replace

from tests.agents.gtrxl.worlds import scripts, shifted, small_agent, small_core
from tests.agents.techniques import all_have_moved, each, named, weights


@each
def test_two_updates(choice):
    core = replace(small_core(), **choice)
    try:
        agent = small_agent(scripts(shifted(3)), core=core)
    except ValueError as error:
        if not named(choice, str(error)):
            raise
        return
    before = weights(agent.policy)
    agent.learn(2 * agent.n_steps * agent.n_envs)
    all_have_moved(before, agent.policy)
