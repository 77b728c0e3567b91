"""Inspection of the last segments reproduces acting and training."""

import torch

from rlxf.agents.gtrxl.callbacks.base import SegmentInspection
from tests.agents.gtrxl.worlds import next_step_scripts, rollouts, scripts, shifted, small_agent


def test_last_segments_reproduce_values_of_rollout():
    agent = small_agent(scripts(shifted(3)))
    for buffer in rollouts(agent, 2):
        reading = SegmentInspection.from_buffer(agent.policy, buffer, environments=2)
        y, _ = reading.transformer.encode(reading.tokens, reading.index, reading.state)
        values = agent.policy.heads(y.flatten(0, 1))[1].view(2, -1)
        torch.testing.assert_close(values, buffer.values[:2, -buffer.segment_length :], rtol=1e-4, atol=1e-5)


def test_number_of_environments_is_limited():
    agent = small_agent(scripts(shifted(3)))
    (buffer,) = rollouts(agent, 1)
    assert SegmentInspection.from_buffer(agent.policy, buffer, environments=99).index.shape == (
        3,
        buffer.segment_length,
    )


def test_weights_are_positive_exactly_where_allowed():
    agent = small_agent(next_step_scripts(shifted(3)))
    *_, buffer = rollouts(agent, 2)
    reading = SegmentInspection.from_buffer(agent.policy, buffer, environments=3)
    allowed = reading.relation.allowed
    for weights in reading.weights:
        assert ((weights > 0) == allowed[:, None]).all()
        torch.testing.assert_close(
            weights.sum(-1), allowed.any(-1)[:, None].float().expand(weights.shape[:3])
        )
