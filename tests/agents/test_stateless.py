"""An agent with memory warns once if it never gets its state, and only then."""

import warnings

import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy

from rlxf import evaluate
from rlxf.agents.common.arguments import PATIENCE, MissingStateWarning
from tests.agents.decision_transformer.worlds import shown, some_trajectories
from tests.agents.decision_transformer.worlds import small_agent as small_transformer
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent

FORGOTTEN = "acts without memory"
OBSERVATION = np.zeros((2, 3), np.float32)


def warning_files(play):
    """Return the files that the warnings point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [each.filename for each in caught if FORGOTTEN in str(each.message)]


@pytest.fixture
def agent():
    return small_agent(scripts(shifted(2)))


def test_dropped_state_warns_once(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION)

    assert warning_files(play) == [__file__]
    assert warning_files(play) == []


def test_few_independent_observations_do_not_warn(agent):
    def play():
        for _ in range(PATIENCE - 1):
            agent.predict(OBSERVATION)

    assert warning_files(play) == []


def test_no_warning_with_episode_start(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION, episode_start=np.ones(2, bool))

    assert warning_files(play) == []


def test_missing_state_in_continuing_episode_warns(agent):
    assert len(warning_files(lambda: agent.predict(OBSERVATION, episode_start=np.array([True, False])))) == 1


def test_new_episodes_without_state_do_not_warn(agent):
    def play():
        for _ in range(2 * PATIENCE):
            _, state = agent.predict(OBSERVATION)
            agent.predict(OBSERVATION, state)

    assert warning_files(play) == []


@pytest.mark.parametrize("tool", [evaluate, evaluate_policy])
def test_tools_that_pass_the_state_do_not_warn(agent, tool):
    assert warning_files(lambda: tool(agent, scripts(shifted(2)), 20)) == []


def test_decision_transformer_uses_time_steps():
    data = some_trajectories()
    agent = small_transformer(data)
    first, later = (shown(data, np.array([step])) for step in (0, 4))

    def play(observation):
        for _ in range(3 * PATIENCE):
            agent.predict(observation)

    assert warning_files(lambda: play(first)) == []
    assert warning_files(lambda: play(later)) == [__file__]


def test_decision_transformer_with_episode_start():
    data = some_trajectories()
    later = shown(data, np.array([4]))
    given = {"episode_start": np.array([False])}
    assert len(warning_files(lambda: small_transformer(data).predict(later, **given))) == 1


def test_calls_with_a_state_start_the_count_again():
    calls = MissingStateWarning(stacklevel=2)

    def play():
        for state in ([None] * (PATIENCE - 1) + ["state"]) * 3:
            calls.record(state, None)

    assert warning_files(play) == []
