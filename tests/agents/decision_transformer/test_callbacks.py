"""Attention maps of a `DecisionTransformer`: the weights that are drawn, and errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf import BehaviorCloning, DecisionTransformer, TransformerSpec
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.decision_transformer.callbacks import ContextAttentionCallback, window_figure
from rlxf.attention import XL, Add, RoPE, Strided, Window
from rlxf.attention.inspection import attention_weights
from tests.datasets import ID, record_cartpole

CORES = {
    "window": (decision_transformer(width=8, layers=2, heads=2), "window"),
    "memory": (
        TransformerSpec(width=8, layers=2, heads=2, position=RoPE(), residual=Add(), memory=XL(6)),
        "window",
    ),
    "episode": (
        TransformerSpec(
            width=8, layers=2, heads=2, position=RoPE(), pattern=Window(7), residual=Add(), memory=XL(6)
        ),
        "episode",
    ),
}


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


@pytest.mark.parametrize("kind", CORES)
def test_the_map_shows_the_weights_of_the_training(kind, cartpole):
    core, context = CORES[kind]
    agent = DecisionTransformer(cartpole, core=core, context=context, context_length=3, batch_size=2, seed=0)
    policy = agent.policy.eval()
    start = cartpole.offsets[2] + 6  # of 12 steps
    steps = policy.steps(policy.windows(cartpole).starting_at([start]))
    inputs = policy.transformer_inputs(steps)
    memory = 0 if inputs["state"] is None else inputs["state"].index.shape[1]
    assert (memory > 0) == (kind != "window")
    expected = torch.cat([layer[0] for layer in attention_weights(policy.transformer, **inputs)])
    drawn = panels(window_figure(policy, steps))
    assert len(drawn) == len(expected) == 4
    for panel, weights in zip(drawn, expected, strict=True):
        (image,) = panel.images
        shown = image.get_array().filled(0)
        assert weights[:, : -shown.shape[1]].sum() == 0
        np.testing.assert_array_equal(shown, weights[:, -shown.shape[1] :].detach().numpy())


def test_weights_outside_of_the_mask_of_the_first_layer_are_drawn(cartpole):
    core = replace(CORES["window"][0], pattern=Strided(stride=2))
    agent = DecisionTransformer(cartpole, core=core, context_length=4, batch_size=2, seed=0)
    policy = agent.policy.eval()
    steps = policy.steps(policy.windows(cartpole).starting_at([cartpole.offsets[2]]))
    weights = torch.stack(attention_weights(policy.transformer, **policy.transformer_inputs(steps)))[:, 0]
    drawn = [panel.images[0].get_array().filled(-1) for panel in panels(window_figure(policy, steps))]
    assert all(shown[weights.gt(0).any(0).any(0).numpy()].min() >= 0 for shown in drawn)
    assert sum(shown.clip(0).sum() for shown in drawn) == pytest.approx(float(weights.sum()), abs=1e-4)


@pytest.mark.parametrize("length", [2, 12])
def test_a_window_at_the_end_of_an_episode_has_no_padding(length, minari_root):
    record_cartpole((length,))
    agent = DecisionTransformer(ID, core=CORES["window"][0], context_length=8, batch_size=2, seed=0)
    callback = ContextAttentionCallback(1)
    callback.init_callback(agent)
    figure = callback._figure()
    shown = panels(figure)[0].images[0].get_array()
    assert shown.shape[1] == 3 * min(length, 8)
    assert figure.legends == []


def test_a_map_leaves_the_mode_of_the_model_unchanged(cartpole):
    core = decision_transformer(width=8, layers=1, heads=1, dropout=0.5)
    agent = DecisionTransformer(cartpole, core=core, context_length=3, batch_size=2, seed=0)
    callback = ContextAttentionCallback(1)
    callback.init_callback(agent)
    agent.policy.train()
    first, second = (panels(callback._figure())[0].images[0].get_array() for _ in range(2))
    np.testing.assert_array_equal(first, second)  # without dropout
    assert agent.policy.training


def test_other_agents_are_refused(cartpole):
    agent = BehaviorCloning(cartpole, batch_size=2, seed=0)
    with pytest.raises(TypeError, match="needs a DecisionTransformer agent, got BehaviorCloning"):
        agent.learn(1, callback=ContextAttentionCallback(1))
