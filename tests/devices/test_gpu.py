"""Tests that need a CUDA GPU: ``RLXF_TEST_DEVICE=cuda python -m pytest tests/devices``."""

import numpy as np
import pytest
import torch

from rlxf.agents.gtrxl.network_step import CompiledStep
from rlxf.envs.tmaze_tensor import TMazeTensor
from tests.agents.gtrxl.test_network_step import CORES, actions, agent_of, largest_difference
from tests.agents.gtrxl.worlds import OBSERVATIONS, small_agent
from tests.devices import accelerator
from tests.devices.agents import Meter, differences

pytestmark = pytest.mark.skipif(accelerator.NAME != "cuda", reason="RLXF_TEST_DEVICE is not cuda")


@pytest.fixture(autouse=True, scope="module")
def full_precision():
    accelerator.install()


@pytest.mark.filterwarnings("error:the acting step is not captured")
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_steps_as_cuda_graphs_equal_eager_ones(core):
    assert largest_difference(agent_of(core=core, device="cuda"), CompiledStep("cuda")) < 1e-5


@pytest.mark.filterwarnings("error:the acting step is not captured")
@pytest.mark.parametrize("policy", OBSERVATIONS)
def test_each_policy_has_a_cuda_graph(policy):
    assert largest_difference(agent_of(policy, device="cuda"), CompiledStep("cuda")) < 1e-5


@pytest.mark.filterwarnings("error:the acting step is not captured")
def test_rollouts_and_predictions_with_cuda_graphs_equal_eager_ones():
    one, other = (agent_of(cuda_graphs=graphs, device="cuda").learn(64) for graphs in (True, False))
    weights = [agent.policy.state_dict().values() for agent in (one, other)]
    for x, y in zip(*weights, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    other.policy.load_state_dict(one.policy.state_dict())
    np.testing.assert_array_equal(actions(one), actions(other))


def test_a_step_that_cannot_be_captured_is_eager(monkeypatch):
    agent = agent_of(device="cuda")
    extractor = agent.policy.features_extractor.forward
    monkeypatch.setattr(
        agent.policy.features_extractor, "forward", lambda obs: extractor(obs) + torch.ones(1).to("cuda")
    )
    with pytest.warns(UserWarning, match="the acting step is not captured as a CUDA graph, because"):
        agent.learn(16)
    assert all(x.isfinite().all() for x in agent.policy.parameters())


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_rollouts_of_tensors_do_not_wait(cuda_graphs):
    """The goals of new episodes are drawn on the host, so a rollout within one episode is counted."""
    env = TMazeTensor(8, 20, device="cuda")
    agent = small_agent(env, n_envs=8, device="cuda", n_steps=16, cuda_graphs=cuda_graphs)
    with accelerator.waits() as count:
        meter = Meter(count)
        agent.learn(2 * 8 * 16, meter)
    assert set(differences(meter.steps[:2])) == {0}, meter.steps


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_training_is_finite_with_each_precision(precision):
    agent = agent_of(device="cuda", precision=precision).learn(64)
    assert all(x.isfinite().all() for x in agent.policy.parameters())


def test_equal_seeds_give_equal_bits():
    one, other = (agent_of(device="cuda").learn(64).policy.state_dict().values() for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
