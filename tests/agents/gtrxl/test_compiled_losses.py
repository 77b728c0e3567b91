"""Updates with captured or compiled losses equal others.

A capture on the CPU runs a function again. Most compiled programs are recorded, but not compiled.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from rlxf.agents.common import captured_function, gradient_programs, module_programs
from rlxf.agents.gtrxl.compiled_losses import CompiledPPOLosses, has_consecutive_steps
from rlxf.agents.gtrxl.training_algorithm import PPOTraining
from rlxf.attention import Routing
from rlxf.training import NumericalError, linear
from tests.agents.captures import capture_on_cpu
from tests.agents.gtrxl.worlds import MIXED, scripts, shifted, small_agent, small_core
from tests.agents.trainings import assert_equal_weights

FORMS = {"captured": "captured as CUDA graphs", "compiled": "compiled"}
"""Form of a program -> its description in warnings."""


class Programs(list):
    """List with an entry for each program.

    Args:
        form: one of `FORMS`.
    """

    def __init__(self, form):
        super().__init__()
        self.form = form


@pytest.fixture(params=FORMS)
def programs(request, monkeypatch):
    """Capture on the CPU, or record operations without compiling them; return the list of programs."""
    made = Programs(request.param)
    monkeypatch.setattr(module_programs, "supports_graphs", lambda device: made.form == "captured")
    monkeypatch.setattr(
        gradient_programs, "capture", lambda *given: made.append(given) or capture_on_cpu(*given)
    )
    monkeypatch.setattr(
        gradient_programs, "CompiledFunction", lambda module, examples: made.append(module) or module
    )
    return made


def agents(**changes):
    """Return two equal agents, of which the first compiles or captures its updates.

    Their learning rate is small, because Adam amplifies rounding errors of gradients near 0. One layer is
    recorded in half of the time of two.
    """
    settings = {"learning_rate": 1e-4, "core": small_core(layers=1)} | changes
    pair = [small_agent(scripts(shifted(3)), **settings) for _ in range(2)]
    pair[0]._algorithm = PPOTraining(pair[0].policy, pair[0].order, compiles=True)
    return pair


def learn(agent, steps):
    """Train an agent with the same random numbers as another one."""
    agent.set_random_seed(5)
    return agent.learn(steps, reset_num_timesteps=False)


def learn_both(pair, steps):
    """Train two agents with the same random numbers, one after the other."""
    for agent in pair:
        learn(agent, steps)


def test_coefficients_that_change_are_arguments(programs):
    schedules = {
        "clip_range": linear(0.2, 0.05),
        "ent_coef": linear(0.1, 0.0),
        "clip_range_vf": linear(0.3, 0.1),
    }
    pair = agents(**schedules, learning_rate=1e-3, n_epochs=3)
    learn_both(pair, 6 * 48)
    assert_equal_weights(*pair)
    assert len(programs) == 1


def test_replaced_parameters_need_another_program(programs):
    pair = agents(core=small_core())
    learn_both(pair, 48)
    for agent in pair:
        weight = agent.policy.value_net.weight
        agent.policy.value_net.weight = torch.nn.Parameter(weight.detach())
    learn_both(pair, 48)
    assert_equal_weights(*pair)
    assert len(programs) == 2


def test_frozen_parameters_need_another_program(programs):
    pair = agents()
    learn_both(pair, 48)
    for agent in pair:
        agent.policy.token.weight.requires_grad_(False)
    before = pair[0].policy.token.weight.clone()
    learn_both(pair, 48)
    assert torch.equal(pair[0].policy.token.weight, before)
    assert pair[0].policy.token.weight.grad is None
    assert_equal_weights(*pair)
    assert len(programs) == 2


def test_replaced_modules_need_another_program(programs):
    pair = agents()
    learn_both(pair, 48)
    for agent in pair:
        policy = agent.policy
        torch.manual_seed(3)
        policy.token = nn.Linear(policy.token.in_features, policy.token.out_features)
        policy.optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5)
    before = pair[0].policy.token.weight.clone()
    learn_both(pair, 48)
    assert not torch.equal(pair[0].policy.token.weight, before)
    assert_equal_weights(*pair)
    assert len(programs) == 2


def hook(policy):
    return policy.transformer.norm.register_forward_hook(lambda module, inputs, y: 2 * y)


def hook_of_the_backward_pass(policy):
    return policy.transformer.norm.register_full_backward_hook(lambda *_: None)


def hook_of_a_gradient(policy):
    return policy.transformer.norm.weight.register_hook(torch.zeros_like)


@pytest.mark.parametrize("register", [hook, hook_of_the_backward_pass, hook_of_a_gradient])
def test_models_with_hooks_have_no_program(register, programs):
    pair = agents()
    learn_both(pair, 48)
    assert len(programs) == 1
    programs.clear()
    handles = [register(agent.policy) for agent in pair]
    with pytest.warns(
        UserWarning, match=f"not {FORMS[programs.form]}, because the .*transformer.norm.* has a hook"
    ) as caught:
        learn_both(pair, 96)
    assert sum("updates are not" in str(each.message) for each in caught) == 1
    assert_equal_weights(*pair)
    weight = pair[0].policy.transformer.norm.weight
    weight.data = weight.data.clone()  # needs another program
    learn_both(pair, 48)
    assert not programs
    for handle in handles:
        handle.remove()
    learn_both(pair, 48)
    assert_equal_weights(*pair)
    assert len(programs) == 1


class CountedLinear(nn.Linear):
    """Linear layer that counts its calls during training."""

    def forward(self, x):
        self.calls += self.training
        return super().forward(x)


def test_buffers_are_updated_once_for_each_minibatch(programs):
    pair = agents()
    for agent in pair:
        agent.policy.token.register_buffer("calls", torch.zeros(1))
        agent.policy.token.__class__ = CountedLinear
        learn(agent, 48)
    assert pair[0].policy.token.calls == pair[1].policy.token.calls > 0
    assert len(programs) == 1


def test_minibatches_of_two_sizes(programs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = agents(batch_size=20)
    learn_both(pair, 96)
    assert_equal_weights(*pair)
    assert len(programs) == 2


def test_micro_batches_have_no_program(programs):
    pair = agents(gradient_accumulation_steps=2)
    learn_both(pair, 48)
    assert_equal_weights(*pair)
    assert not programs


def test_a_target_of_the_kl_divergence_stops_updates(programs):
    pair = agents(target_kl=1e-9, n_epochs=4)
    learn_both(pair, 96)
    assert_equal_weights(*pair)
    assert programs
    for x, y in zip(*(agent.policy.parameters() for agent in pair), strict=True):
        torch.testing.assert_close(x.grad, y.grad)  # those of the last step, not of the stopped minibatch


def test_a_kernel_with_statistics_is_named_once(programs):
    one, other = agents(core=replace(small_core(), kernel=Routing(2)))
    message = f"not {FORMS[programs.form]}, because .*keeps statistics"
    with pytest.warns(UserWarning, match=message) as caught:
        learn(one, 96)
    learn(other, 96)
    assert sum("updates are not" in str(each.message) for each in caught) == 1
    assert_equal_weights(one, other)
    assert not programs


def test_an_operation_without_a_program_is_named(programs, monkeypatch):
    def fail(*_):
        raise captured_function.CompilationError("an operation has no program: reason")

    monkeypatch.setattr(gradient_programs, "capture", fail)
    monkeypatch.setattr(gradient_programs, "CompiledFunction", fail)
    one, other = agents()
    message = f"not {FORMS[programs.form]}, because an operation has no program: reason"
    with pytest.warns(UserWarning, match=message):
        learn(one, 96)
    learn(other, 96)
    assert_equal_weights(one, other)


def test_losses_that_are_not_finite_are_named(programs):
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


def test_compile_counts_on_a_cpu_and_cuda_graphs_on_a_gpu(monkeypatch):
    assert small_agent(scripts(shifted(3)), compile=True)._algorithm._compiled is not None
    assert small_agent(scripts(shifted(3)))._algorithm._compiled is None
    monkeypatch.setattr(captured_function, "GRAPH_DEVICES", ("cpu",))
    assert small_agent(scripts(shifted(3)))._algorithm._compiled is not None
    assert small_agent(scripts(shifted(3)), cuda_graphs=False, compile=True)._algorithm._compiled is None


def test_a_policy_on_another_device_has_no_program(programs):
    one, other = agents()
    one._algorithm._compiled = CompiledPPOLosses("meta")
    learn_both([one, other], 48)
    assert_equal_weights(one, other)
    assert not programs
