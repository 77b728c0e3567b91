"""Tests of training and acting with every attention technique."""

from dataclasses import replace

import numpy as np

from rlxf.attention import TransformerSpec
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
