"""Updates in bf16-mixed precision stay near float32; acting, weights and losses are float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf import BehaviorCloning, DecisionTransformer, GTrXLPPO
from rlxf.agents.common import precision
from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.agents.gtrxl import losses
from rlxf.attention import Reversible, TokenIndex
from rlxf.attention.linear import matmul_dtype, mixed_linear
from rlxf.training import ResumeError
from tests.agents.decision_transformer.test_resume import SaveAt
from tests.agents.decision_transformer.worlds import CORES, small_pretraining
from tests.agents.decision_transformer.worlds import small_agent as small_dt
from tests.agents.gtrxl.worlds import (
    RECURRENT_CORES,
    all_segments,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.agents.mlp.worlds import small_mlp
from tests.attention.specs import ALONE, GTRXL

MIXED = {"precision": "bf16-mixed"}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 0.02, 0.1
"""Largest differences from float32: of the loss, relative to it or to 1, and of the norm of the gradient.

bfloat16 has 8 bits, so a product has a relative error of up to 2^-8 = 0.4%.
"""
RATIO_TOLERANCE = 0.05
"""Largest difference of PPO's ratio from 1 in the first minibatch, for the noisy weights of `small_agent`."""


@pytest.fixture(autouse=True)
def _fast_bfloat16(monkeypatch):
    """Suppress the warning about devices that emulate bfloat16."""
    monkeypatch.setattr(precision, "_emulates_bfloat16", lambda device: False)


def loss_and_gradients(losses_of, module):
    """Return the loss and the gradient as one vector."""
    module.zero_grad()
    loss = losses_of()["loss"]
    loss.backward()
    present = [x.grad.flatten() for x in module.parameters() if x.grad is not None]
    assert {x.dtype for x in present} == {torch.float32}
    assert loss.dtype == torch.float32
    return loss.item(), torch.cat(present)


def assert_near(one, other):
    """Compare loss and gradient in bf16-mixed precision with those in float32."""
    assert one[0] == pytest.approx(other[0], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    assert 0 < (one[1] - other[1]).norm() < GRADIENT_TOLERANCE * other[1].norm()


PPO_CORES = {
    "GTrXL": small_core(),
    "reversible": replace(small_core(), residual=Reversible()),
    "chunks": replace(small_core(), feed_forward_chunk=3),
    "SwiGLU and RMSNorm": replace(small_core(), activation="swiglu", norm_type="rms_norm"),
    "post-norm": replace(small_core(), norm="post"),
    "GatedDeltaNet": RECURRENT_CORES["GatedDeltaNet"],
}


@pytest.mark.parametrize("core", PPO_CORES.values(), ids=PPO_CORES)
def test_ppo_loss_and_gradient_are_near_float32(core):
    agent = small_agent(scripts(shifted(3)), core=core, loud=False, learning_rate=1e-4)
    *_, buffer = rollouts(agent, 2)
    batch, objective, policy = all_segments(buffer), agent.objective(), agent.policy
    policy.set_training_mode(True)
    expected = loss_and_gradients(lambda: objective(policy, batch), policy)
    policy.precision = "bf16-mixed"
    assert_near(loss_and_gradients(lambda: objective(policy, batch), policy), expected)


OFFLINE = {
    **{name: lambda core=CORES[name]: small_dt(core=core) for name in ("published", "RoPE", "GTrXL")},
    "maximum entropy": lambda: small_dt(objective=MaximumEntropy()),
    "episode": lambda: small_dt(core=CORES["GTrXL"], context="episode"),
    "BehaviorCloning": small_mlp,
    "ReturnConditionedMLP": lambda: small_mlp("ReturnConditionedMLP"),
    "MaskedPretraining": small_pretraining,
}


@pytest.mark.parametrize("make", OFFLINE.values(), ids=OFFLINE)
def test_offline_loss_and_gradient_are_near_float32(make):
    agent = make()
    batch = agent._batch(agent._training_windows(agent.windows(agent._data())))
    model = agent.policy.train()

    def both():
        torch.manual_seed(0)
        return loss_and_gradients(lambda: model.losses(batch), model)

    expected = both()
    model.precision = "bf16-mixed"
    assert_near(both(), expected)
    model.eval()  # validation and acting
    near = model.validation_losses(batch)["loss"].item()
    model.precision = "float32"
    assert near == model.validation_losses(batch)["loss"].item()


def test_ratio_is_near_one_in_the_first_minibatch(monkeypatch):
    ratios = []
    objective = losses.clipped_objective
    monkeypatch.setattr(
        losses, "clipped_objective", lambda ratio, *others: ratios.append(ratio) or objective(ratio, *others)
    )
    agent = small_agent(scripts(shifted(3)), learning_rate=1e-3, n_epochs=1, batch_size=48, **MIXED)
    agent.learn(3 * 16)
    assert 1e-5 < (ratios[0] - 1).abs().max() < RATIO_TOLERANCE


def test_training_state_is_float32():
    agent = small_agent(scripts(shifted(3)), **MIXED)
    *_, buffer = rollouts(agent, 2)
    agent.train()
    tensors = [*agent.policy.parameters(), buffer.hidden, buffer.advantages, buffer.values, buffer.log_probs]
    states = agent.policy.optimizer.state.values()
    tensors += [x for state in states for x in state.values()]
    assert {x.dtype for x in tensors} == {torch.float32}
    assert agent.policy.value_net.variance.dtype == torch.float64


def test_acting_has_the_bits_of_float32():
    agents = [small_agent(scripts(shifted(3)), **changes) for changes in ({}, MIXED)]
    observation = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    for agent in agents:
        agent.policy.set_training_mode(False)
    one, other = (agent.action_logits(observation)[0] for agent in agents)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*ALONE, "GTrXL"])
def test_every_technique_runs_near_float32(name):
    spec = GTRXL if name == "GTrXL" else ALONE[name]
    torch.manual_seed(0)
    model = spec.build().eval()
    x, index = torch.randn(2, 9, spec.width), TokenIndex.range(2, 9)
    expected = model.outputs(x, index)
    with matmul_dtype(torch.bfloat16):
        actual = model.outputs(x, index)
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_products_are_in_bfloat16_only_inside_of_the_context():
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    exact = torch.nn.functional.linear(x, weight, bias)
    with matmul_dtype(torch.bfloat16):
        rounded = mixed_linear(x, weight, bias)
        with matmul_dtype(None):
            assert torch.equal(mixed_linear(x, weight, bias), exact)
    slow = torch.nn.functional.linear(*(part.bfloat16() for part in (x, weight, bias))).float()
    assert torch.equal(rounded, slow)
    assert torch.equal(mixed_linear(x, weight, bias), exact)
    assert not torch.equal(rounded, exact)


def test_unknown_precision_is_refused():
    message = "precision must be 'float32' or 'bf16-mixed', got 'bf16'"
    for make in (lambda **o: small_agent(scripts(shifted(3)), **o), small_dt, small_mlp, small_pretraining):
        with pytest.raises(ValueError, match=message):
            make(precision="bf16")


def test_emulation_of_bfloat16_is_reported(monkeypatch):
    monkeypatch.setattr(precision, "_emulates_bfloat16", lambda device: True)
    with pytest.warns(UserWarning, match="precision='bf16-mixed' is slower than float32 here: cpu"):
        small_mlp(**MIXED)


def test_precision_is_stored_and_can_be_replaced(tmp_path):
    small_agent(scripts(shifted(3)), **MIXED).save(tmp_path / "gtrxl.zip")
    small_mlp(**MIXED).save(tmp_path / "bc.zip")
    for kind, name in ((GTrXLPPO, "gtrxl.zip"), (BehaviorCloning, "bc.zip")):
        assert kind.load(tmp_path / name).precision == "bf16-mixed"
        loaded = kind.load(tmp_path / name, precision="float32")
        assert (loaded.precision, loaded.policy.precision) == ("float32", "float32")


def test_run_in_another_precision_is_not_resumed(tmp_path):
    small_dt(**MIXED).learn(4, SaveAt(2, tmp_path / "cut.zip", stop=True))
    with pytest.raises(ResumeError, match="its precision is bf16-mixed, the agent's None"):
        small_dt().learn(4, resume_from=tmp_path / "cut.zip")
    resumed = small_dt(**MIXED).learn(4, resume_from=tmp_path / "cut.zip")
    assert isinstance(resumed, DecisionTransformer)
