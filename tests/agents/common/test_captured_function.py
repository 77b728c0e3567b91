"""Tests of captured functions, with a capture on the CPU that runs a function again in the same memory."""

import pickle

import pytest
import torch
from torch import nn

from rlxf.agents.common import captured_function
from rlxf.agents.common.captured_function import CapturedFunction, foreach_copy
from rlxf.agents.gtrxl import network_step
from rlxf.agents.gtrxl.network_step import CompiledStep
from tests.agents.captures import capture_on_cpu
from tests.agents.gtrxl.test_network_step import CORES, actions, agent_of, largest_difference
from tests.agents.gtrxl.worlds import OBSERVATIONS, with_eager_updates


class Accumulator(nn.Module):
    """Linear layer of an input and a sum that it updates in place; it also counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, total, calls):
        total += x
        calls += 1
        return self.layer(x + total), -total


@pytest.fixture
def captures(monkeypatch):
    """Capture on the CPU; return a list with an entry for each capture."""
    made = []
    monkeypatch.setattr(
        captured_function, "capture", lambda *given: made.append(given) or capture_on_cpu(*given)
    )
    monkeypatch.setattr(network_step, "CompiledFunction", CapturedFunction)
    return made


def arguments(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator) for _ in range(2)] + [torch.tensor([4])]


@torch.no_grad()
def assert_equal_to(module, function, given):
    """Assert that results and arguments are those of the module."""
    expected_arguments = [x.clone() for x in given]
    expected, results = module(*expected_arguments), function(*given)
    torch.testing.assert_close(list(results), list(expected))
    torch.testing.assert_close(given, expected_arguments)


def test_results_and_changed_arguments(captures):
    module = Accumulator()
    function = CapturedFunction(module, examples := arguments())
    torch.testing.assert_close(examples, arguments())
    one, other = arguments(1), arguments(2)
    for given in (one, other, one, one, other):
        assert_equal_to(module, function, given)
    assert len(captures) == 1


def test_results_stay_after_the_next_call(captures):
    function = CapturedFunction(Accumulator(), arguments())
    results = function(*arguments(1))
    kept = [x.clone() for x in results]
    function(*arguments(2))
    torch.testing.assert_close(list(results), kept)


def test_parameters_that_change_in_place_and_that_are_replaced(captures):
    module = Accumulator()
    function = CapturedFunction(module, arguments())
    with torch.no_grad():
        module.layer.weight += 1
    assert_equal_to(module, function, arguments(1))
    assert len(captures) == 1
    module.layer.weight = nn.Parameter(torch.randn(3, 3))
    assert_equal_to(module, function, arguments(2))
    assert len(captures) == 2


def test_inference_mode_and_tensors_made_in_it(captures):
    module = Accumulator()
    with torch.inference_mode():
        given = arguments(1)
        function = CapturedFunction(module, given)
        assert_equal_to(module, function, given)
    assert_equal_to(module, function, arguments(2))


def test_copies_of_several_dtypes():
    targets = [
        torch.zeros(2),
        torch.zeros(1, dtype=torch.long),
        torch.zeros(3),
        torch.zeros(1, dtype=torch.bool),
    ]
    sources = [torch.ones(2), torch.tensor([7]), torch.full((3,), 2.0), torch.tensor([True])]
    foreach_copy(targets, sources)
    torch.testing.assert_close(targets, sources)
    foreach_copy([], [])


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_captured_steps_equal_eager_ones(core, captures):
    assert largest_difference(agent_of(core=core), CompiledStep("cpu")) < 1e-5
    assert len(captures) == 1


def test_a_step_with_replaced_modules_is_captured_again(captures):
    agent, step = agent_of(), CompiledStep("cpu")
    assert largest_difference(agent, step) < 1e-5
    token = agent.policy.token
    agent.policy.token = nn.Linear(token.in_features, token.out_features)
    assert largest_difference(agent, step) < 1e-5
    assert len(captures) == 2


def test_a_policy_with_a_captured_step_can_be_pickled(captures):
    agent = agent_of(compile=True)
    expected = actions(agent)
    assert len(captures) == 1
    agent.policy = pickle.loads(pickle.dumps(agent.policy))  # noqa: S301
    assert (actions(agent) == expected).all()
    assert len(captures) == 2


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("policy", OBSERVATIONS)
def test_captured_steps_of_each_policy(policy, captures):
    assert largest_difference(agent_of(policy), CompiledStep("cpu")) < 1e-5


def test_rollouts_and_predictions_of_a_captured_agent_equal_those_of_an_eager_one(captures):
    one = with_eager_updates(agent_of(compile=True)).learn(64)
    other = agent_of().learn(64)
    weights = [agent.policy.state_dict().values() for agent in (one, other)]
    for x, y in zip(*weights, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    other.policy.load_state_dict(one.policy.state_dict())
    assert (actions(one) == actions(other)).all()
    assert captures
