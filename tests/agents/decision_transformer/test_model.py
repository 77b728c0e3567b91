"""Tests of the model: causality, padding, memory, losses, gradients, and vectors of Hugging Face."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.context_window import ContextWindow
from rlxf.agents.offline.trajectory_model import memory_steps
from rlxf.attention import MinGRU, TransformerSpec
from rlxf.attention.token_index import EMPTY
from rlxf.data import Windows
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    LENGTHS,
    OBSERVATIONS,
    K,
    shown,
    small_agent,
    some_trajectories,
)
from tests.attention.oracle import close, count, fill, load, put

LONGEST = max(LENGTHS)


def windows(agent, starts):
    return Windows(agent.trajectories, K, burn_in=agent.policy.burn_in_steps).starting_at(starts)


@torch.no_grad()
def outputs(agent, batch):
    return agent.policy.eval().outputs(agent.policy.steps(batch))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("part", ["observations", "actions", "return_to_go"])
def test_outputs_are_causal(core, part):
    agent = small_agent(some_trajectories(lengths=(30,)), core=CORES[core])
    batch = windows(agent, [14])
    first = agent.policy.burn_in_steps
    before = outputs(agent, batch)
    for k in range(K):
        changed = replace(batch, **{part: getattr(batch, part).clone()})
        getattr(changed, part)[:, first + k] += 1.0
        affected = (outputs(agent, changed) - before).abs().amax(dim=(0, 2)) > 0
        assert not affected[:k].any()
        assert affected[k] == (part != "actions"), "a state token must not attend to the action of its step"
        assert affected[k + 1 : k + 2].all()


LONG_CORES = [name for name, core in CORES.items() if core.dropout == 0 and name != "learned positions"]
"""Cores without a limit of positions, and without dropout, which draws numbers for all columns."""


@pytest.mark.parametrize("core", LONG_CORES)
@pytest.mark.parametrize("length", [LONGEST - 2, LONGEST, 200])
def test_columns_of_padding_do_not_change_losses(core, length):
    """A batch has at most as many columns as the longest episode has steps, with burn-in or without."""
    agent = small_agent(context_length=length, core=CORES[core], state_loss_weight=0.5)
    model, data = agent.policy.eval(), agent.trajectories
    every = model.windows(data).starting_at(np.arange(data.steps))
    batch = model.needed_columns(model.windows(data)).starting_at(np.arange(data.steps))
    assert batch.mask.shape[1] == min(LONGEST, length + model.burn_in_steps)
    assert model.loss_count(batch) == model.loss_count(every)
    losses, expected = model.losses(batch), model.losses(every)
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", ["published", "memory"])
def test_a_context_longer_than_all_episodes_is_trained_like_the_longest_one(core, monkeypatch):
    columns, losses = [], DecisionTransformerModel.losses

    def record(model, batch):
        columns.append(batch.mask.shape[1])
        return losses(model, batch)

    monkeypatch.setattr(DecisionTransformerModel, "losses", record)
    settings = {"core": CORES[core], "validation_fraction": 0.25}
    agents = [small_agent(context_length=length, **settings).learn(3) for length in (LONGEST, 200)]
    assert columns == [LONGEST] * 6
    for one, other in zip(*(agent.policy.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    values = [agent.validation_losses()["loss"] for agent in agents]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    _, state = agents[1].predict(shown(agents[1].trajectories, np.array([0])))
    assert state.mask.shape[1] == 200 + agents[1].policy.burn_in_steps


@pytest.mark.parametrize("core", [name for name, core in CORES.items() if core.memory is not None])
@pytest.mark.parametrize("starts", [[0], [2], [0, 2]])
def test_burn_in_skips_columns_of_padding(core, starts, monkeypatch):
    agent = small_agent(core=replace(CORES[core], dropout=0.0))
    model, batch, calls = agent.policy, windows(agent, starts), []
    remember = model.transformer.next_state
    monkeypatch.setattr(model.transformer, "next_state", lambda *args: calls.append(args) or remember(*args))
    without_padding = outputs(agent, batch)
    assert [tokens.shape[1] for tokens, _ in calls] == [3 * max(starts)] * any(starts)
    monkeypatch.setattr(model, "_padding", lambda steps: 0)
    real = batch.mask[:, model.burn_in_steps :]
    torch.testing.assert_close(without_padding[real], outputs(agent, batch)[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_padding_changes_neither_outputs_nor_loss_nor_gradients(core):
    agent = small_agent(core=replace(CORES[core], dropout=0.0))
    batch = windows(agent, [6, 9, 10, 0])
    padding = ~batch.mask
    changed = replace(
        batch, **{name: getattr(batch, name).clone() for name in ("observations", "actions", "return_to_go")}
    )
    for part in (changed.observations, changed.actions, changed.return_to_go):
        part[padding] = 1e4
    results = []
    for each in (batch, changed):
        agent.policy.zero_grad()
        loss = agent.policy.losses(each)["loss"]
        loss.backward()
        results.append([loss, *(p.grad for p in agent.policy.parameters() if p.grad is not None)])
    for original, other in zip(*results, strict=True):
        torch.testing.assert_close(original, other, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_unpadded_steps():
    agent = small_agent()
    batch = windows(agent, [6, 9, 10, 0])
    head = agent.policy.loss.head
    y = outputs(agent, batch)
    errors = [
        head.error(y[b, k], batch.actions[b, k]) for b in range(4) for k in range(K) if batch.mask[b, k]
    ]
    assert len(errors) < 4 * K
    with torch.no_grad():
        torch.testing.assert_close(agent.policy.losses(batch)["loss"], torch.stack(errors).mean())


@pytest.mark.parametrize("objective", [None, MaximumEntropy()], ids=["imitation", "maximum entropy"])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", ["vector", "image"])
def test_every_weight_gets_a_gradient(observations, actions, objective):
    data = some_trajectories(OBSERVATIONS[observations], ACTIONS[actions])
    agent = small_agent(data, objective=objective)
    agent.policy.losses(windows(agent, [0, 11, 15, 20]))["loss"].backward()
    untrained = [name for name, p in agent.policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert not untrained


def test_token_positions_count_from_the_first_unpadded_step():
    index = (
        small_agent().policy.steps(windows(small_agent(), [7])).index
    )  # two real steps and three of padding
    assert index.episode.tolist() == [[EMPTY] * 9 + [0] * 6]
    assert index.position[0, 9:].tolist() == list(range(6))


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_burn_in_steps_fill_the_memory_without_gradient(steps):
    agent = small_agent(some_trajectories(lengths=(30,)), core=replace(CORES["memory"], memory=None))
    with_memory = small_agent(some_trajectories(lengths=(30,)), core=CORES["memory"])
    assert with_memory.policy.burn_in_steps == memory_steps(CORES["memory"]) == 3
    assert agent.policy.burn_in_steps == 0
    batch = windows(with_memory, [20])
    context = with_memory.policy.steps(batch)
    context = replace(context, features=context.features.clone().requires_grad_())
    with_memory.policy.eval().outputs(context).sum().backward()
    assert (context.features.grad[:, :3] == 0).all()
    assert (context.features.grad[:, 3:].abs().amax(dim=(0, 2)) > 0).all()


def test_time_steps_beyond_the_last_embedding_share_it():
    agent = small_agent(episode_length=6)
    batch = windows(agent, [20])
    late, last = (replace(batch, time_steps=torch.full_like(batch.time_steps, t)) for t in (4_000, 5))
    assert torch.equal(outputs(agent, late), outputs(agent, last))
    assert not torch.equal(
        outputs(agent, late), outputs(agent, replace(batch, time_steps=last.time_steps - 1))
    )


def test_weights_are_initialized_as_in_gpt2():
    agent = small_agent(core=decision_transformer(width=64, layers=8))
    fresh = type(agent)(agent.trajectories, core=agent.core, seed=0, device="cpu").policy
    for name, part in fresh.named_modules():
        if isinstance(part, nn.Linear) and not name.startswith("features"):
            branch = name.endswith(("attention.out", "feed_forward.outer"))
            assert part.weight.std().item() == pytest.approx(0.02 / 4 if branch else 0.02, rel=0.3), name
            assert not part.bias.any()
    assert fresh.tokens.time.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_recurrent_mixers_keep_their_time_constants():
    """With biases of 0, a gate of `MinGRU` would halve the state at each token."""
    agent = small_agent(core=TransformerSpec(width=8, layers=1, heads=2, recurrence=MinGRU(horizon=100)))
    gate = agent.policy.transformer.blocks[0].mixer.gate
    assert gate.bias[0].sigmoid().item() == pytest.approx(1 / 100, rel=0.5)  # after some updates
    assert gate.weight.std().item() > 0.1


def test_the_default_core_is_causal_without_positions():
    core = decision_transformer()
    assert core == TransformerSpec(width=128, layers=3, heads=1, dropout=0.1)
    assert core.causal
    assert core.position is None


VECTOR = load("decision_transformer")
HEADS = 2  # the number of heads cannot be inferred from the arrays


def weights(name: str) -> tuple[Tensor, Tensor]:
    key = "w_" + name.replace(".", "__")
    return VECTOR[f"{key}__weight"], VECTOR[f"{key}__bias"]


def fill_transposed(module: nn.Linear, name: str) -> None:
    weight, bias = weights(name)
    fill(module, weight.T, bias)


@pytest.fixture(scope="module")
def model() -> DecisionTransformerModel:
    length, width = VECTOR["w_embed_timestep__weight"].shape
    inner = VECTOR["w_encoder__h__0__mlp__c_fc__weight"].shape[1]
    layers = count(VECTOR, "encoder.h")
    core = decision_transformer(width=width, layers=layers, heads=HEADS, feed_forward=inner)
    states = spaces.Box(-np.inf, np.inf, tuple(VECTOR["in_states"].shape[2:]))
    actions = spaces.Box(-1.0, 1.0, VECTOR["in_actions"].shape[2:])
    data = some_trajectories(states, actions)
    model = DecisionTransformer(data, core=core, return_scale=1.0, episode_length=length).policy
    model.features.normalization = nn.Identity()
    model = model.cpu().double().eval()
    put(model.tokens.time.weight, VECTOR["w_embed_timestep__weight"])
    fill(model.tokens.return_embedding, *weights("embed_return"))
    fill(model.tokens.state_embedding, *weights("embed_state"))
    fill(model.tokens.action_embedding, *weights("embed_action"))
    fill(model.tokens.norm, *weights("embed_ln"))
    for number, block in enumerate(model.transformer.blocks):
        layer = f"encoder.h.{number}"
        fill(block.attention_norm.norm, *weights(f"{layer}.ln_1"))
        fill_transposed(block.attention.qkv, f"{layer}.attn.c_attn")
        fill_transposed(block.attention.out, f"{layer}.attn.c_proj")
        fill(block.feed_forward_norm.norm, *weights(f"{layer}.ln_2"))
        fill_transposed(block.feed_forward.inner, f"{layer}.mlp.c_fc")
        fill_transposed(block.feed_forward.outer, f"{layer}.mlp.c_proj")
    fill(model.transformer.norm, *weights("encoder.ln_f"))
    fill(model.loss.head.net, *weights("predict_action.0"))
    return model


def steps() -> ContextWindow:
    mask = VECTOR["in_attention_mask"].bool()
    returns = VECTOR["in_returns_to_go"][..., 0]
    return ContextWindow(VECTOR["in_states"], VECTOR["in_actions"], returns, VECTOR["in_timesteps"], mask)


def test_actions_equal_the_reference(model):
    mask = steps().mask
    actions = model.loss.head.choose(model.outputs(steps()), deterministic=True)
    assert not mask.all(), "the test vector must contain padding"
    close(actions[mask], VECTOR["out_action"][mask])


def test_all_reference_weights_for_actions_are_used(model):
    others = re.compile("w_predict_(state|return)")
    used = sum(value.numel() for key, value in VECTOR.items() if key[:2] == "w_" and not others.match(key))
    assert used == sum(parameter.numel() for parameter in model.parameters())


def test_padding_does_not_affect_outputs(model):
    original = steps()
    padding = ~original.mask
    changed = ContextWindow(*(part.clone() for part in vars(original).values()))
    for part in (changed.features, changed.actions, changed.return_to_go):
        part[padding] = 1e4
    with torch.no_grad():
        close(model.outputs(changed)[original.mask], model.outputs(original)[original.mask])
