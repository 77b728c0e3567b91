"""An agent with memory that never gets its state back warns once, and nobody else does."""

import warnings

import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy

from rlxf import evaluate
from rlxf.agents.stateless import PATIENCE, StatelessCalls
from tests.agents.decision_transformer.worlds import shown, some_trajectories
from tests.agents.decision_transformer.worlds import small_agent as small_transformer
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent

FORGOTTEN = "acts without memory"
OBSERVATION = np.zeros((2, 3), np.float32)


def told(play):
    """How often it was warned of, and by which files."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [each.filename for each in caught if FORGOTTEN in str(each.message)]


@pytest.fixture
def agent():
    return small_agent(scripts(shifted(2)))


def test_a_loop_that_drops_the_state(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION)

    assert told(play) == [__file__]
    assert told(play) == []


def test_a_few_observations_are_independent(agent):
    def play():
        for _ in range(PATIENCE - 1):
            agent.predict(OBSERVATION)

    assert told(play) == []


def test_a_loop_that_says_which_are_first(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION, episode_start=np.ones(2, bool))

    assert told(play) == []


def test_no_state_although_an_episode_goes_on(agent):
    assert len(told(lambda: agent.predict(OBSERVATION, episode_start=np.array([True, False])))) == 1


def test_episodes_that_begin_without_a_state(agent):
    def play():
        for _ in range(2 * PATIENCE):
            _, state = agent.predict(OBSERVATION)
            agent.predict(OBSERVATION, state)

    assert told(play) == []


@pytest.mark.parametrize("tool", [evaluate, evaluate_policy])
def test_tools_that_pass_the_state_on(agent, tool):
    assert told(lambda: tool(agent, scripts(shifted(2)), 20)) == []


def test_a_decision_transformer_knows_by_its_time_steps():
    data = some_trajectories()
    agent = small_transformer(data)
    first, later = (shown(data, np.array([step])) for step in (0, 4))

    def play(observation):
        for _ in range(3 * PATIENCE):
            agent.predict(observation)

    assert told(lambda: play(first)) == []
    assert told(lambda: play(later)) == [__file__]


def test_a_decision_transformer_that_is_told():
    data = some_trajectories()
    later = shown(data, np.array([4]))
    given = {"episode_start": np.array([False])}
    assert len(told(lambda: small_transformer(data).predict(later, **given))) == 1


def test_calls_with_a_state_start_the_count_again():
    calls = StatelessCalls(stacklevel=2)

    def play():
        for state in ([None] * (PATIENCE - 1) + ["state"]) * 3:
            calls.note(state, None)

    assert told(play) == []
