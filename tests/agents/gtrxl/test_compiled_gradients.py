"""Losses and gradients of compiled programs equal those of autograd, for all techniques that permit it."""

import shutil
import warnings
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlxf.agents.common import gradient_programs
from rlxf.agents.common.compiled_function import CompiledFunction
from rlxf.agents.common.gradient_programs import CompiledGradients, Gradients, record
from rlxf.agents.gtrxl.compiled_losses import CompiledPPOLosses
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention import TokenIndex
from rlxf.attention.relative import is_aligned
from rlxf.utils.errors import CompilationError
from tests.agents.gtrxl.test_compiled_losses import learn
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    GOES_ON,
    OBSERVATIONS,
    limited_to_memory,
    recurrent_core,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.agents.techniques import CHOICES, DEPEND_ON_VALUES, merged_choices

REFUSED = DEPEND_ON_VALUES | {
    "cannot be recorded": [
        *(
            f"position {name}"
            for name in ("LearnedAbsolute", "LearnedPerLayer", "Multiplicative", "Floater", "Tupe", "XPos")
        ),
        *("kernel AdaptiveSpan", "kernel Linformer"),
        *(f"recurrence {name}" for name in ("InfiniAttention", "LSTM", "GRU")),
    ],
}
"""Part of a reason -> the options whose updates are not compiled for it."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs the C++ compiler g++")


def core_with(choice):
    """Return a small core with options; recurrent layers and memories of their own replace XL's memory.

    It has one layer, which is recorded in half of the time, unless a depth or a pattern may concern several.
    """
    layers = 2 if choice.keys() & {"depth", "pattern"} else 1
    core = recurrent_core(layers=layers, recurrence=None) if "memory" in choice else small_core(layers=layers)
    return limited_to_memory(core, **choice)


NOT_COMPILED = list(chain(*REFUSED.values()))
COMPILED = merged_choices([name for name in CHOICES if name not in NOT_COMPILED], core_with)


def minibatches(agent):
    """Yield minibatches of two rollouts whose episodes end at other steps, with an update between them."""
    for buffer in rollouts(agent, 2):
        last = buffer.n_envs * buffer.n_steps // buffer.segment_length
        yield buffer.segments(torch.arange(last - 6, last), buffer.advantages.clone())


def gradients(agent, batch, compiled=None):
    """Return losses and gradients of a minibatch, from a program or from autograd; None without a program."""
    agent.policy.set_training_mode(True)
    agent.policy.optimizer.zero_grad()
    torch.manual_seed(9)
    if compiled is None:
        losses = agent.objective()(agent.policy, batch)
        losses["loss"].backward()
    else:
        program = compiled(agent.policy, agent.objective(), batch)
        if program is None:
            return None
        losses, set_gradients = program
        set_gradients()
        trained = [x for x in agent.policy.parameters() if x.grad is not None]
        assert all(x.grad.stride() == x.stride() for x in trained)  # the fused Adam requires it
    values = {name: value.detach() for name, value in losses.items()}
    return values | {name: x.grad for name, x in agent.policy.named_parameters()}


def assert_equal_programs(agent, compiled, rtol=1e-4, atol=1e-5):
    """Compare minibatches with autograd, before and after an update, with a program made from the first."""
    for batch in minibatches(agent):
        own = gradients(agent, batch, compiled)
        torch.testing.assert_close(own, gradients(agent, batch), rtol=rtol, atol=atol)


@pytest.fixture
def uncompiled(monkeypatch):
    """Record operations without compiling them."""
    monkeypatch.setattr(gradient_programs, "CompiledFunction", lambda module, examples: module)


@pytest.mark.parametrize("choice", [*COMPILED, *NOT_COMPILED])
def test_gradients_with_each_technique(choice, uncompiled):
    """Gradients equal those of autograd, or a warning names why there is no program.

    Positions of one environment grow, so that a program is used with larger ones than it was made with.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = scripts([*shifted(2), [GOES_ON] * 40])
        agent = small_agent(scripted, core=core_with((COMPILED | CHOICES)[choice]), n_epochs=1)
    compiled = CompiledPPOLosses("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in minibatches(agent):
            own = gradients(agent, batch, compiled)
            assert (own is None) == (choice not in COMPILED)
            if own is not None:
                torch.testing.assert_close(own, gradients(agent, batch), rtol=1e-4, atol=1e-5)
    messages = [str(each.message) for each in caught if "updates are not compiled" in str(each.message)]
    reasons = [reason for reason, choices in REFUSED.items() if choice in choices]
    assert [any(reason in message for message in messages) for reason in reasons] == [True] * len(messages)


def test_random_numbers_of_the_recording_are_drawn_again():
    before = torch.get_rng_state()
    record(lambda x: x * torch.rand(3), [torch.ones(3)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_decision_by_values_is_refused():
    with pytest.raises(CompilationError, match=r"cannot be recorded: .*data-dependent"):
        record(lambda x: x * 2 if x.sum() > 0 else x, [torch.ones(3)])


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy, np.asarray, int])
def test_reading_a_value_is_refused(read):
    with pytest.raises(CompilationError, match="cannot be recorded"):
        record(lambda x: x * torch.as_tensor(read(x.sum())), [torch.ones(3)])


def test_a_buffer_that_is_replaced_is_refused(uncompiled):
    class Average(nn.Linear):
        def losses(self, tensors):
            self.mean = 0.5 * self.mean + tensors["x"].mean()
            return {"loss": self(tensors["x"]).sum() * self.mean}

    model = Average(3, 1)
    model.register_buffer("mean", torch.ones(()))
    with pytest.raises(CompilationError, match=r"replace buffers, instead .* in place: model\.mean"):
        CompiledGradients(Gradients(model, model.losses), {"x": torch.ones(2, 3)})


class SharedModules(nn.Module):
    """A module with two names, and a parameter and a buffer of two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.same_module = self.first
        self.same_weight = nn.Linear(3, 3)
        self.same_weight.weight = self.first.weight
        self.norm, self.same_buffer = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.same_buffer.running_mean = self.norm.running_mean

    def forward(self, x):
        for layer in (self.first, self.same_module, self.same_weight, self.norm, self.same_buffer):
            x = torch.tanh(layer(x))
        return x


def slots(module):
    """Return the parameters and buffers of each module, also those with several names."""
    return [id(x) for part in module.modules() for x in (*part._parameters.values(), *part._buffers.values())]


def test_shared_modules_and_parameters(uncompiled):
    module, x = SharedModules().eval(), torch.randn(4, 3)
    program = CompiledGradients(
        Gradients(module, lambda tensors: {"loss": module(tensors["x"]).sum()}), {"x": x}
    )
    before = slots(module)
    for _ in range(2):
        _, set_gradients = program({"x": x})
        set_gradients()
        found = {name: p.grad for name, p in module.named_parameters()}
        module.zero_grad()
        module(x).sum().backward()
        torch.testing.assert_close(found, {name: p.grad for name, p in module.named_parameters()})
        with torch.no_grad():
            module.first.weight.add_(0.1)
        assert program.is_current
        assert slots(module) == before


def test_a_decision_by_positions_needs_known_values():
    index = TokenIndex.range(2, 4)

    def function(position):
        query = replace(index, position=position)
        return position * is_aligned(query, query)

    with pytest.raises(CompilationError, match="a decision depends on the positions or episodes"):
        record(function, [index.position.clone()])

    def with_known(position):
        query = replace(index, position=position).with_values(index)
        return position * is_aligned(query.last(3), query.concatenate(query))

    program = record(with_known, [index.position.clone()])
    assert not program(index.position.clone()).any()


class SharedGradient(nn.Module):
    """Linear map with two biases, whose gradients are equal; one parameter is not used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.second = nn.Parameter(torch.zeros(2))
        self.unused = nn.Parameter(torch.zeros(2))
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.4)

    def losses(self, tensors):
        y = self.dropout(self.norm(self.linear(tensors["x"]) + self.second))
        return {"loss": (y * tensors["weight"]).sum(), "mean": y.mean()}


def recorded(module, examples):
    """Return a recorded function itself."""
    return module


@pytest.mark.parametrize("form", [recorded, pytest.param(CompiledFunction, marks=needs_compiler)])
def test_layouts_random_numbers_shared_gradients_and_buffers(form, monkeypatch):
    monkeypatch.setattr(gradient_programs, "CompiledFunction", form)
    torch.manual_seed(0)
    own, other = SharedGradient(), SharedGradient()
    other.load_state_dict(own.state_dict())
    examples = {"x": torch.randn(5, 3), "weight": torch.randn(5, 2)}
    program = CompiledGradients(Gradients(own, own.losses), examples)
    assert own.norm.num_batches_tracked == 0
    for _ in range(2):
        tensors = {name: torch.randn_like(x) for name, x in examples.items()}
        torch.manual_seed(1)
        losses, set_gradients = program(tensors | {"x": tensors["x"].t().contiguous().t()})
        set_gradients()
        other.zero_grad()
        torch.manual_seed(1)
        expected = other.losses(tensors)
        expected["loss"].backward()
        torch.testing.assert_close(losses, {name: x.detach() for name, x in expected.items()})
        for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
            assert mine.grad is None or mine.grad.stride() == mine.stride()
        assert own.linear.bias.grad.data_ptr() != own.second.grad.data_ptr()
    torch.testing.assert_close(dict(own.named_buffers()), dict(other.named_buffers()))


def test_bfloat16(uncompiled):
    agent = small_agent(scripts(shifted(3)), precision="bf16-mixed")
    assert_equal_programs(agent, CompiledPPOLosses("cpu"), rtol=2e-2, atol=2e-3)


SPACES = {
    f"{policy}-{name}": (policy, space)
    for policy in OBSERVATIONS
    for name, space in ACTIONS.items()
    if policy == "MlpGTrXLPolicy" or name == "Discrete"
}
"""All action spaces with one policy, and all policies with one action space."""


@pytest.mark.parametrize(("policy", "action_space"), SPACES.values(), ids=SPACES)
def test_all_spaces(policy, action_space, uncompiled):
    env = scripts(shifted(3), OBSERVATIONS[policy], action_space)
    changes = {"use_sde": True} if isinstance(action_space, spaces.Box) else {}
    agent = small_agent(env, policy, core=small_core(layers=1), reconstruction_coef=0.1, **changes)
    assert_equal_programs(agent, CompiledPPOLosses("cpu"))


@needs_compiler
def test_training_with_compile_equals_training_without(monkeypatch):
    """Also compare gradients of the program of the training.

    Its batches have the shapes of `minibatches`: 24 steps are 6 segments.
    """
    programs = []
    monkeypatch.setattr(
        gradient_programs,
        "CompiledFunction",
        lambda *given: programs.append(given) or CompiledFunction(*given),
    )
    policy, core = "MultiInputGTrXLPolicy", small_core(layers=1)
    own, other = (
        small_agent(
            scripts(shifted(3), OBSERVATIONS[policy]), policy, core=core, batch_size=24, compile=compile
        )
        for compile in (True, False)
    )
    own.policy.network_step = None  # compiled steps are those of test_network_step.py
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "updates are not compiled")
        learn(own, 96)
    learn(other, 96)
    assert isinstance(own.policy, GTrXLPolicy)
    for mine, theirs in zip(own.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert_equal_programs(own, own._algorithm._compiled)
    assert len(programs) == 1
