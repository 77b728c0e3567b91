"""Rollout buffer: hidden states are stored once, windows are views, reset steps have weight 0."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.agents.gtrxl import MlpGTrXLPolicy, MultiInputGTrXLPolicy
from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.agents.gtrxl.state_buffer import StateBuffer, _windows
from rlxf.attention.token_index import EMPTY
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.training.process_group import ProcessGroup
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    VECTOR,
    all_segments,
    last_outputs,
    next_step_scripts,
    rollouts,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

MEMORY, STEPS, ENVS, WIDTH, LAYERS, LENGTH = 8, 16, 3, 16, 2, 4


def new_buffer(n_steps=STEPS, observation_space=VECTOR, action_space=ACTIONS["Discrete"]):
    policy = MultiInputGTrXLPolicy if isinstance(observation_space, spaces.Dict) else MlpGTrXLPolicy
    made = policy(observation_space, action_space, lambda _: 1e-3, core=small_core())
    return SegmentBuffer(made, ENVS, n_steps, LENGTH)


def watched(agent, monkeypatch):
    """Return all hidden states (L, E, C) and indices of acting, in order."""
    seen = []
    add = SegmentBuffer.add

    def recorded(self, step, rewards, dones, index):
        seen.append((step.hidden.clone(), index.position[:, 0].clone(), index.episode[:, 0].clone()))
        add(self, step, rewards, dones, index)

    monkeypatch.setattr(SegmentBuffer, "add", recorded)
    return seen


@pytest.mark.parametrize("n_steps", [4, 16])
def test_segment_memory_is_previous_hidden_states(monkeypatch, n_steps):
    agent = small_agent(scripts(shifted(ENVS)), n_steps=n_steps, batch_size=4)
    seen = watched(agent, monkeypatch)
    for number, buffer in enumerate(rollouts(agent, 4)):
        batch = all_segments(buffer)
        for row in range(len(batch.index.position)):
            env, first = row // (n_steps // LENGTH), row % (n_steps // LENGTH) * LENGTH
            begin = number * n_steps + first
            assert_remembers(batch.state, row, seen[max(0, begin - MEMORY) : begin], env)


def assert_remembers(state, row, before, env):
    empty = MEMORY - len(before)
    assert (state.index.episode[row, :empty] == EMPTY).all()
    for place, (hidden, position, episode) in enumerate(before, start=empty):
        assert torch.equal(state.hidden[:, row, place], hidden[:, env])
        assert state.index.position[row, place] == position[env]
        assert state.index.episode[row, place] == episode[env]


def test_every_step_is_in_exactly_one_segment():
    agent = small_agent(scripts(shifted(ENVS)))
    buffer = next(iter(rollouts(agent, 1)))
    buffer.rewards[:] = torch.arange(ENVS * STEPS).reshape(ENVS, STEPS)
    generator = torch.Generator().manual_seed(0)
    batches = list(buffer.minibatches(5, buffer.rewards, generator, ProcessGroup()))
    assert [len(batch.index.position) for batch in batches] == [5, 5, 2]
    number = torch.cat([batch.advantages for batch in batches]).long()
    assert sorted(number.tolist()) == list(range(ENVS * STEPS))
    for name in ("values", "log_probs", "actions", "previous", "obs", "returns", "weight"):
        stored = getattr(buffer, name).flatten(0, 1)
        assert torch.equal(torch.cat([getattr(batch, name) for batch in batches]), stored[number])
    position = torch.cat([batch.index.position.flatten() for batch in batches])
    assert torch.equal(position, buffer.index.position[:, MEMORY:].flatten()[number])


def test_generator_determines_order():
    buffer = next(iter(rollouts(small_agent(scripts(shifted(ENVS))), 1)))

    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(
            [b.log_probs for b in buffer.minibatches(2, buffer.advantages, generator, ProcessGroup())]
        )

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_storage_without_hidden_states_is_small():
    per_step = 3 * 4 + 3 * 4 + 8 + 5 * 4 + 1  # observation, action before, action, five numbers, end
    per_token = LAYERS * WIDTH * 4 + 2 * 8  # hidden states, position and episode
    for n_steps in (16, 64, 256):
        tokens, buffer = ENVS * (MEMORY + n_steps), new_buffer(n_steps)
        held = [x for x in vars(buffer).values() if isinstance(x, torch.Tensor)]
        held += [buffer.index.position, buffer.index.episode]
        assert sum(x.nbytes for x in held) == tokens * per_token + ENVS * n_steps * per_step


def test_observations_have_dtype_and_shape_of_their_space():
    space = spaces.Dict({"bytes": spaces.Box(0, 255, (2, 5), np.uint8), "number": spaces.Discrete(3)})
    buffer = new_buffer(observation_space=space)
    table, number = buffer.obs["bytes"], buffer.obs["number"]
    assert (table.dtype, table.shape[2:]) == (torch.uint8, (2, 5))
    assert (number.dtype, number.shape[2:]) == (torch.int64, ())
    assert table.shape[:2] == number.shape == buffer.rewards.shape


def test_windows_are_views():
    x = torch.arange(2 * 24.0).reshape(2, 24)
    windows = _windows(x, 1, MEMORY, LENGTH)
    assert windows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert windows.shape == (2, (24 - MEMORY) // LENGTH + 1, MEMORY)
    for number in range(windows.shape[1]):
        begin = number * LENGTH
        assert torch.equal(windows[:, number], x[:, begin : begin + MEMORY])


def test_hidden_states_are_written_in_place():
    """A rollout reuses the buffer of the previous one."""
    agent = small_agent(scripts(shifted(ENVS)))
    places = {buffer.hidden.data_ptr() for buffer in rollouts(agent, 3)}
    assert len(places) == 1


@pytest.mark.parametrize("n_envs", [1, ENVS])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_start_of_a_rollout_shorter_than_the_memory_moves_the_memory(layers, n_envs):
    buffer = StateBuffer(layers, MEMORY, WIDTH, n_envs, LENGTH, torch.device("cpu"))
    for x in (buffer.hidden, buffer.index.position, buffer.index.episode):
        x.copy_(torch.arange(x.numel()).reshape(x.shape))
    hidden, index = buffer.hidden[:, :, LENGTH:].clone(), buffer.index.at(slice(LENGTH, None))
    position, episode = index.position.clone(), index.episode.clone()
    started = buffer.start_rollout(LENGTH)
    assert torch.equal(started.hidden, hidden)
    assert torch.equal(started.index.position, position)
    assert torch.equal(started.index.episode, episode)


def test_no_gradient_flows_into_the_memory():
    agent = small_agent(scripts([[0]] * ENVS))
    *_, buffer = rollouts(agent, 2)
    assert not all_segments(buffer).state.hidden.requires_grad


def test_gradients_flow_through_the_whole_segment():
    agent = small_agent(scripts([[0]] * ENVS))
    batch = all_segments(next(iter(rollouts(agent, 1))))
    obs = batch.obs.clone().requires_grad_()
    latent = last_outputs(agent.policy, obs, batch.previous, batch.index, batch.state)
    latent.unflatten(0, (-1, LENGTH))[:, -1].sum().backward()
    assert (obs.grad.unflatten(0, (-1, LENGTH)).abs().sum(-1) > 0).all()


@pytest.fixture(scope="module")
def with_fillers():
    agent = small_agent(as_vec_env(next_step_scripts(shifted(ENVS))))
    *_, buffer = rollouts(agent, 2)
    return agent, buffer


def test_one_filler_row_follows_each_end(with_fillers):
    _, buffer = with_fillers
    filler = buffer.weight == 0
    assert filler.any()
    position, episode = (x[:, MEMORY:] for x in (buffer.index.position, buffer.index.episode))
    assert torch.equal(filler, episode == EMPTY)
    assert torch.equal(position[:, 1:][filler[:, :-1]], torch.zeros(int(filler[:, :-1].sum())).long())
    ends = buffer.dones & ~filler
    assert torch.equal(ends[:, :-1], filler[:, 1:])
    assert (buffer.rewards[filler] == 0).all()


def gradients(agent, buffer):
    agent.policy.zero_grad()
    PPOLoss(0.2, None, 0.01, 0.5, 0.0)(agent.policy, all_segments(buffer))["loss"].backward()
    return [p.grad.clone() for p in agent.policy.parameters() if p.grad is not None]


def test_filler_rows_have_no_influence_on_gradients(with_fillers):
    agent, buffer = with_fillers
    before = gradients(agent, buffer)
    filler = buffer.weight == 0
    for name in ("obs", "previous", "actions", "log_probs", "values", "advantages"):
        tensor = getattr(buffer, name)
        tensor[filler] = (torch.rand_like(tensor[filler].float()) * 2).to(tensor.dtype)
    buffer.hidden[:, :, MEMORY:][:, filler] = 100.0
    assert same(before, gradients(agent, buffer))
    buffer.obs[~filler] += 0.01
    assert not same(before, gradients(agent, buffer))


def test_new_episode_follows_each_end():
    agent = small_agent(scripts(shifted(ENVS)))
    for buffer in rollouts(agent, 2):
        position, episode = (x[:, MEMORY:] for x in (buffer.index.position, buffer.index.episode))
        ended = buffer.dones[:, :-1]
        assert torch.equal(episode[:, 1:] - episode[:, :-1], ended.long())
        assert torch.equal(position[:, 1:], torch.where(ended, 0, position[:, :-1] + 1))
        assert torch.equal(buffer.previous[:, 1:].any(-1), ~ended)


def test_memory_fill():
    agent = small_agent(scripts([[0]] * ENVS), n_steps=4, batch_size=4)
    assert [buffer.filled for buffer in rollouts(agent, 3)] == [0.5, 1.0, 1.0]
    agent = small_agent(scripts([[0, 1, 0, 0]] * ENVS), n_steps=4, batch_size=4)
    assert [buffer.filled for buffer in rollouts(agent, 3)] == [0.25] * 3


def test_memory_is_not_filled_after_a_reset_step():
    agent = small_agent(as_vec_env(next_step_scripts([[0, 0, 1]] * ENVS)), n_steps=4, batch_size=4)
    for buffer in rollouts(agent, 3):
        assert (buffer.weight[:, -1] == 0).all()
        assert buffer.filled == 0.0


def test_segments_hold_the_chosen_rows(with_fillers):
    _, buffer = with_fillers
    some = buffer.segments(torch.tensor([5, 2]), buffer.advantages)
    every = all_segments(buffer)
    assert torch.equal(some.state.hidden, every.state.hidden[:, [5, 2]])
    assert torch.equal(some.index.position, every.index.position[[5, 2]])


def test_critic_lambda_1_gives_monte_carlo_returns():
    agent = small_agent(scripts(shifted(3)), gamma=0.9, gae_lambda=0.5, critic_lambda=1.0)
    buffer = next(iter(rollouts(agent, 1)))
    not_done = (~buffer.dones).float()
    expected = buffer.rewards[:, :-1] + 0.9 * not_done[:, :-1] * buffer.returns[:, 1:]
    torch.testing.assert_close(buffer.returns[:, :-1], expected)


def test_critic_lambda_defaults_to_gae_lambda():
    buffer = next(iter(rollouts(small_agent(scripts(shifted(3)), gae_lambda=0.5), 1)))
    torch.testing.assert_close(buffer.returns, buffer.advantages + buffer.values)
