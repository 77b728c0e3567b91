"""Acting equals learning: before the first optimizer step, PPO's ratio is 1 to 1e-4."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.agents.gtrxl import losses
from rlxf.attention import (
    KNN,
    RATE,
    RMT,
    Add,
    Compressive,
    Full,
    GRUGate,
    HighwayGate,
    InputGate,
    OutputGate,
    SigTanhGate,
    SinkSoftmax,
    StreamingXL,
    Window,
)
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs.tensor_vec_env import as_vec_env
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    OBSERVATIONS,
    RECURRENT_CORES,
    all_segments,
    last_outputs,
    next_step_scripts,
    recurrent_core,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.agents.techniques import CHOICES
from tests.attention.specs import SHORT
from tests.covering import covering

TOLERANCE = 1e-4
RESIDUALS = [Add(), GRUGate(), InputGate(), OutputGate(), HighwayGate(), SigTanhGate()]
POSITIONS = [None, *(choice["position"] for choice in CHOICES.values() if "position" in choice)]


def differences(agent, batch):
    """Return the absolute errors of ratio and value for each real step."""
    with torch.no_grad():
        distribution, values = agent.policy.heads(
            last_outputs(agent.policy, batch.obs, batch.previous, batch.index, batch.state)
        )
        ratio = (distribution.log_prob(batch.actions) - batch.log_probs).exp()
    real = batch.weight == 1
    return (ratio - 1).abs()[real], (values - batch.values).abs()[real]


def assert_acts_as_it_learns(agent, number=2):
    for buffer in rollouts(agent, number):
        ratio, values = differences(agent, all_segments(buffer))
        assert ratio.max() < TOLERANCE
        assert values.max() < TOLERANCE


@pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
def test_all_action_spaces(action_space):
    assert_acts_as_it_learns(small_agent(scripts(shifted(3), action_space=action_space)))


@pytest.mark.parametrize("policy", OBSERVATIONS)
@pytest.mark.parametrize("previous_action", [True, False])
def test_all_policies(policy, previous_action):
    env = scripts(shifted(2), OBSERVATIONS[policy])
    assert_acts_as_it_learns(small_agent(env, policy, previous_action=previous_action))


@pytest.mark.parametrize("residual", RESIDUALS, ids=repr)
def test_all_residuals(residual):
    core = small_core(residual=residual)
    assert_acts_as_it_learns(small_agent(scripts(shifted(3)), core=core))


@covering(1, position={repr(each): each for each in POSITIONS}, norm={each: each for each in ("pre", "post")})
def test_positions_and_norms(position, norm):
    core = dataclasses.replace(small_core(), position=position, norm=norm)
    assert_acts_as_it_learns(small_agent(scripts(shifted(3)), core=core))


@covering(1, lengths={str(each): each for each in [(4, 4), (8, 8), (12, 3), (6, 1)]}, n_envs={"1": 1, "5": 5})
def test_rollouts_shorter_and_longer_than_the_memory(lengths, n_envs):
    n_steps, segment_length = lengths
    env = scripts(shifted(n_envs))
    agent = small_agent(env, n_steps=n_steps, segment_length=segment_length, batch_size=2 * segment_length)
    assert_acts_as_it_learns(agent, number=3)


@pytest.mark.thorough
@settings(max_examples=8, deadline=None)
@given(ends=st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=24), min_size=1, max_size=3))
def test_any_episode_ends(ends):
    assert_acts_as_it_learns(small_agent(scripts(ends)))


@pytest.mark.thorough
@settings(max_examples=8, deadline=None)
@given(ends=st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=24), min_size=1, max_size=3))
def test_any_episode_ends_with_filler_rows(ends):
    assert_acts_as_it_learns(small_agent(as_vec_env(next_step_scripts(ends))), number=3)


def test_one_endless_episode():
    assert_acts_as_it_learns(small_agent(scripts([[0]] * 2)), number=4)


MEMORIES = [
    {"memory": Compressive(2, 4, 3), "pattern": Full()},
    {"memory": Compressive(3, 2, 2, "most-used"), "pattern": Full()},
    {"memory": KNN(3, 20, 4), "pattern": Window(4)},
    {"memory": KNN(8, 50, 2, layer=1)},
    {"memory": StreamingXL(3, 2), "pattern": Full()},
    {"memory": RMT(3, 2), "pattern": Full()},
    {"memory": RATE(6, 3), "pattern": Full()},
    {"memory": StreamingXL(2, 4), "pattern": Full(), "kernel": SinkSoftmax()},
]


@covering(
    1,
    choice={repr(each): each for each in MEMORIES},
    ends={"no": [[0]] * 2, "many": shifted(3), "few": shifted(2, [0] * 30 + [1])},
)
def test_all_memories(choice, ends):
    core = dataclasses.replace(small_core(), **choice)
    assert_acts_as_it_learns(small_agent(scripts(ends), core=core), number=4)


@covering(
    2,
    core=RECURRENT_CORES,
    world={"same step": scripts, "reset steps": lambda ends: as_vec_env(next_step_scripts(ends))},
    across={"episodes": False, "across episodes": True},
)
def test_recurrent_cores(core, world, across):
    """Most episodes cross the starts of segments and of rollouts."""
    agent = small_agent(world(shifted(3)), core=core, persist_memory_across_episodes=across)
    assert_acts_as_it_learns(agent, number=3)


@pytest.mark.parametrize("core", RECURRENT_CORES.values(), ids=RECURRENT_CORES)
def test_recurrent_cores_in_one_endless_episode(core):
    assert_acts_as_it_learns(small_agent(scripts([[0]] * 2), core=core), number=4)


@pytest.mark.parametrize("name", TECHNIQUES["recurrence"])
def test_all_recurrences(name):
    core = recurrent_core(recurrence=SHORT.get(name) or TECHNIQUES["recurrence"][name]())
    assert_acts_as_it_learns(small_agent(scripts(shifted(3)), core=core))


@pytest.mark.parametrize("core", RECURRENT_CORES.values(), ids=RECURRENT_CORES)
def test_tolerance_detects_missing_recurrent_state(core):
    agent = small_agent(scripts([[0]] * 2), core=core)
    for buffer in rollouts(agent, 2):
        batch = all_segments(buffer)
    cleared = batch.state.recurrent.map(torch.zeros_like)
    state = dataclasses.replace(batch.state, recurrent=cleared)
    ratio, values = differences(agent, dataclasses.replace(batch, state=state))
    assert ratio.max() > 100 * TOLERANCE
    assert values.max() > 100 * TOLERANCE


def test_tolerance_detects_missing_long_range_memory():
    core = dataclasses.replace(small_core(), memory=KNN(3, 20, 4), pattern=Window(4))
    agent = small_agent(scripts([[0]] * 2), core=core)
    for buffer in rollouts(agent, 3):
        batch = all_segments(buffer)
    assert (batch.state.older.index.episode >= 0).all()
    state = dataclasses.replace(batch.state, older=None)
    ratio, _ = differences(agent, dataclasses.replace(batch, state=state))
    assert ratio.max() > 100 * TOLERANCE


def test_tolerance_detects_missing_memory():
    """An agent that ignores its memory exceeds the tolerance."""
    agent = small_agent(scripts([[0]] * 2))
    for buffer in rollouts(agent, 2):
        batch = all_segments(buffer)
    state = dataclasses.replace(batch.state, hidden=torch.zeros_like(batch.state.hidden))
    ratio, values = differences(agent, dataclasses.replace(batch, state=state))
    assert ratio.max() > 100 * TOLERANCE
    assert values.max() > 100 * TOLERANCE


def test_ratio_is_one_in_first_minibatch(monkeypatch):
    ratios = []
    objective = losses.clipped_objective

    def recorded(ratio, advantages, clip_range):
        ratios.append(ratio.detach())
        return objective(ratio, advantages, clip_range)

    monkeypatch.setattr(losses, "clipped_objective", recorded)
    agent = small_agent(scripts(shifted(3)), n_epochs=2, learning_rate=1e-3)
    agent.learn(2 * 3 * 16)
    minibatches = len(ratios) // 2
    assert minibatches == 2 * 3
    for number, ratio in enumerate(ratios):
        moved = (ratio - 1).abs().max()
        assert (moved < TOLERANCE) == (number % minibatches == 0)
