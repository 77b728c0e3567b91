"""Tests of training and acting with every attention technique."""

from dataclasses import replace

import numpy as np
import torch

from rlxf.attention import ConvFormer, TransformerSpec
from tests.agents.decision_transformer.worlds import SIZES, shown, small_agent, some_trajectories
from tests.agents.techniques import all_have_moved, each, weights


@each
def test_all_weights_change_in_two_updates(choice):
    core, data = replace(TransformerSpec(**SIZES), **choice), some_trajectories()
    agent = small_agent(data, core=core)
    before = weights(agent.policy)
    agent.learn(2)
    all_have_moved(before, agent.policy)
    actions, _ = agent.predict(shown(data, np.array([0, 3])))
    assert np.isfinite(actions).all()


def test_kinds_of_filters_are_the_kinds_of_tokens():
    """Token i of a step, a return, an observation or an action, has filter i, also after padding."""
    data = some_trajectories()
    agent, calls = small_agent(data, core=TransformerSpec(**SIZES, recurrence=ConvFormer(6, kinds=3))), []
    agent.policy.transformer.blocks[0].mixer.register_forward_hook(
        lambda _, inputs, y: calls.append(inputs[1])
    )
    agent.learn(1)
    state = None
    for step in range(7):
        _, state = agent.predict(shown(data, np.array([step, 14 + step])), state)
    assert any(not runs.valid.all() for runs in calls)
    for runs in calls:
        kind = torch.arange(runs.position.shape[1]).expand_as(runs.position) % 3
        assert torch.equal(runs.position[runs.valid] % 3, kind[runs.valid])
