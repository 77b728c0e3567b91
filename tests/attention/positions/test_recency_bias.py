"""Initial scores of distances with ``XLRelative(recency_bias=...)``."""

import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.attention import TransformerSpec, XLRelative
from rlxf.attention.positions.alibi import slopes
from rlxf.attention.positions.xl_relative import XLRelativeBias
from tests.agents.decision_transformer.worlds import some_trajectories


def scores(module, distances):
    """Return the scores (H, R) of distances (R,) for queries of 0."""
    table = module.table(torch.as_tensor(distances, dtype=torch.float32), None)
    return (module.v[:, None] @ table)[:, 0].detach()


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (128, 8), (128, 1), (96, 3), (96, 6)])
@pytest.mark.parametrize("size", [0.5, 4.0])
def test_scores_fall_from_the_bias_like_exponential_functions(width, heads, size):
    module = XLRelative(recency_bias=size).build(width, heads)
    distances = torch.arange(0, 129)
    slope = slopes(heads).float()[:, None]
    expected = torch.exp(-slope * distances)
    found = scores(module, distances) / size
    torch.testing.assert_close(found[:, 0], torch.ones(heads))
    assert (found - expected).abs().max() < 0.45
    assert (found - expected).abs().mean() < 0.1
    assert (found - expected)[slope * distances <= 1].abs().max() < 0.3


def test_future_tokens_have_the_scores_of_past_ones():
    module = XLRelative(recency_bias=4.0).build(64, 4)
    torch.testing.assert_close(scores(module, [-3, -1]), scores(module, [3, 1]))


def test_without_a_bias_no_distance_is_preferred():
    assert (scores(XLRelative().build(64, 4), range(9)) == 0).all()


def test_the_bias_draws_no_random_numbers_and_adds_no_weights():
    states = []
    for size in (0.0, 4.0):
        torch.manual_seed(0)
        module = XLRelative(recency_bias=size).build(64, 4)
        states.append((torch.get_rng_state(), {name: x.shape for name, x in module.state_dict().items()}))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_a_new_model_attends_most_to_the_current_token():
    spec = TransformerSpec(width=64, heads=4, layers=1, position=XLRelative(recency_bias=4.0))
    torch.manual_seed(0)
    module = spec.build().blocks[0].attention.position
    own, far = scores(module, [0])[:, 0], scores(module, range(100, 120)).mean(dim=1)
    assert (own - far > 1).all()


def test_it_is_learned():
    module = XLRelative(recency_bias=4.0).build(64, 4)
    scores_of_one = module.table(torch.ones(1), None)
    (module.v[:, None] @ scores_of_one).sum().backward()
    assert module.v.grad.abs().sum() > 0
    assert module.r.weight.grad.abs().sum() > 0


def test_decision_transformers_keep_it_after_the_initialization_of_linear_layers():
    core = TransformerSpec(width=16, layers=2, heads=2, position=XLRelative(recency_bias=4.0))
    agent = DecisionTransformer(some_trajectories(), core=core, context_length=4, device="cpu")
    modules = [module for module in agent.policy.modules() if isinstance(module, XLRelativeBias)]
    assert len(modules) == 2
    for module in modules:
        torch.testing.assert_close(scores(module, [0])[:, 0], torch.full((2,), 4.0))
