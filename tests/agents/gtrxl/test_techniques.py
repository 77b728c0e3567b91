"""Every technique trains the agent."""

from dataclasses import replace

from rlxf.attention import TransformerSpec
from rlxf.attention.patterns.window import limit_distance
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent, small_core
from tests.agents.techniques import all_have_moved, each, weights


@each
def test_two_updates(choice):
    agent = small_agent(scripts(shifted(3)), core=no_farther(replace(small_core(), **choice)))
    before = weights(agent.policy)
    agent.learn(2 * agent.n_steps * agent.n_envs)
    all_have_moved(before, agent.policy)


def no_farther(core: TransformerSpec) -> TransformerSpec:
    """Return the core with a pattern limited to its memory."""
    assert core.memory is not None
    if core.memory.visible_pattern(core.pattern).max_distance <= core.memory.length:
        return core
    return replace(core, pattern=limit_distance(core.pattern, core.memory.length))
