"""Updates with captured losses equal others, with a capture on the CPU that runs a function again."""

import warnings
from dataclasses import replace

import pytest
import torch

from rlxf.agents.common import captured_function, compiled_losses
from rlxf.agents.gtrxl.compiled_losses import has_consecutive_steps
from rlxf.agents.gtrxl.training_algorithm import PPOTraining
from rlxf.attention import Routing
from rlxf.training import NumericalError, linear
from tests.agents.captures import capture_on_cpu
from tests.agents.gtrxl.worlds import MIXED, scripts, shifted, small_agent, small_core


@pytest.fixture
def captures(monkeypatch):
    """Capture on the CPU; return a list with an entry for each capture."""
    made = []
    monkeypatch.setattr(
        compiled_losses, "capture", lambda *given: made.append(given) or capture_on_cpu(*given)
    )
    return made


def agents(**changes):
    """Return two equal agents, of which the first captures."""
    pair = [small_agent(scripts(shifted(3)), **changes) for _ in range(2)]
    pair[0]._algorithm = PPOTraining(pair[0].policy, pair[0].order, captures=True)
    return pair


def learn(agent, steps):
    """Train an agent with the same random numbers as another one."""
    agent.set_random_seed(5)
    return agent.learn(steps, reset_num_timesteps=False)


def learn_both(pair, steps):
    """Train two agents with the same random numbers, one after the other."""
    for agent in pair:
        learn(agent, steps)


def assert_equal_weights(one, other):
    for x, y in zip(one.policy.state_dict().values(), other.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_coefficients_that_change_are_not_captured(captures):
    schedules = {
        "clip_range": linear(0.2, 0.05),
        "ent_coef": linear(0.1, 0.0),
        "clip_range_vf": linear(0.3, 0.1),
    }
    pair = agents(**schedules, learning_rate=1e-3, n_epochs=3)
    learn_both(pair, 6 * 48)
    assert_equal_weights(*pair)
    assert len(captures) == 1


def test_replaced_parameters_are_captured_again(captures):
    pair = agents()
    learn_both(pair, 48)
    for agent in pair:
        weight = agent.policy.value_net.weight
        agent.policy.value_net.weight = torch.nn.Parameter(weight.detach().clone())
    learn_both(pair, 48)
    assert_equal_weights(*pair)
    assert len(captures) == 2


def test_frozen_parameters_are_captured_again(captures):
    pair = agents()
    learn_both(pair, 48)
    for agent in pair:
        agent.policy.token.weight.requires_grad_(False)
        agent.policy.token.weight.grad = None
    learn_both(pair, 48)
    assert pair[0].policy.token.weight.grad is None
    assert_equal_weights(*pair)
    assert len(captures) == 2


def test_buffers_are_updated_once_for_each_minibatch(captures):
    def count(module, *_):
        module.calls += module.training

    pair = agents()
    for agent in pair:
        agent.policy.token.register_buffer("calls", torch.zeros(1))
        agent.policy.token.register_forward_hook(count)
        learn(agent, 48)
    assert pair[0].policy.token.calls == pair[1].policy.token.calls > 0


def test_minibatches_of_two_sizes(captures):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = agents(batch_size=20)
    learn_both(pair, 96)
    assert_equal_weights(*pair)
    assert len(captures) == 2


def test_micro_batches_are_not_captured(captures):
    pair = agents(gradient_accumulation_steps=2)
    learn_both(pair, 48)
    assert_equal_weights(*pair)
    assert not captures


def test_a_target_of_the_kl_divergence_stops_captured_updates(captures):
    pair = agents(target_kl=1e-9, n_epochs=4)
    learn_both(pair, 96)
    assert_equal_weights(*pair)
    assert captures
    for x, y in zip(*(agent.policy.parameters() for agent in pair), strict=True):
        torch.testing.assert_close(x.grad, y.grad)  # those of the last step, not of the stopped minibatch


def test_a_kernel_with_statistics_is_named_once(captures):
    one, other = agents(core=replace(small_core(), kernel=Routing(2)))
    with pytest.warns(UserWarning, match="not captured as CUDA graphs, because .*keeps statistics") as caught:
        learn(one, 96)
    learn(other, 96)
    assert sum("not captured" in str(each.message) for each in caught) == 1
    assert_equal_weights(one, other)
    assert not captures


def test_an_operation_that_cannot_be_captured_is_named(monkeypatch):
    def fail(run, device):
        raise captured_function.CompilationError("an operation cannot be captured as a CUDA graph: reason")

    monkeypatch.setattr(compiled_losses, "capture", fail)
    one, other = agents()
    with pytest.warns(UserWarning, match="because an operation cannot be captured as a CUDA graph: reason"):
        learn(one, 96)
    learn(other, 96)
    assert_equal_weights(one, other)


def test_losses_that_are_not_finite_are_named(captures):
    agent = agents()[0]
    learn(agent, 48)
    *_, callback = agent._setup_learn(100)
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    agent.rollout_buffer.returns.fill_(float("inf"))
    update = agent._algorithm.start_update(agent.objective(), 1.0, None)
    minibatches = agent._algorithm.minibatches(agent.rollout_buffer, 4, agent.rollout_buffer.advantages)
    with pytest.raises(NumericalError, match=r"inf|nan"):
        update.epoch(minibatches)


def test_empty_slots_among_the_steps_are_irregular():
    agent = small_agent(scripts([MIXED] * 3))
    *_, callback = agent._setup_learn(100)
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    batch = agent.rollout_buffer.segments(torch.arange(3), agent.rollout_buffer.advantages)
    assert has_consecutive_steps(batch)
    batch.index.episode[1, 2] = -1
    assert not has_consecutive_steps(batch)


def test_only_an_agent_on_a_gpu_captures(monkeypatch):
    assert small_agent(scripts(shifted(3)), compile=True)._algorithm._compiled is None
    monkeypatch.setattr(captured_function, "GRAPH_DEVICES", ("cpu",))
    assert small_agent(scripts(shifted(3)))._algorithm._compiled is not None
    assert small_agent(scripts(shifted(3)), cuda_graphs=False)._algorithm._compiled is None
