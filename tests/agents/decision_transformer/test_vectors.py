"""Test vectors of Hugging Face's model without position embedding: equal weights give equal actions."""

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.trajectory_model import ContextWindow
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.attention.oracle import close, count, fill, load, put

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
