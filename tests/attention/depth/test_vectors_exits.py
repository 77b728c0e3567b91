"""Depth-adaptive classifiers and oracles, and CALM's confidence, reproduce the formulas of the vectors."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import CALM, DepthAdaptive, ExitTargets, TokenIndex
from rlxf.attention.depth.calm import probability_margin
from tests.attention.oracle import close, fill, load, put

ADAPTIVE, CONFIDENT = load("depth_adaptive"), load("calm_ltt")
STATES = ADAPTIVE["in_h"]
PASSES, TOKENS, WIDTH = STATES.shape
VERDICT = ExitTargets(
    ADAPTIVE["out_LL"][:, None],
    ADAPTIVE["out_C"][:, None] > 0.5,
    ADAPTIVE["out_C"][:, None] > 0.5,
    TokenIndex.range(1, TOKENS),
)


def adaptive(classifier: str, oracle: str = "likelihood") -> DepthAdaptive:
    penalty, sigma = (float(ADAPTIVE[f"cfg_{name}"]) for name in ("lambda", "sigma"))
    return DepthAdaptive(classifier, oracle, penalty, sigma)


def test_sequence():
    module = adaptive("sequence").build(WIDTH, PASSES).double()
    fill(module.net, ADAPTIVE["w_mult"].T, ADAPTIVE["w_mult_b"])
    opening = ADAPTIVE["in_encoder"].mean(dim=0).expand(1, TOKENS, -1)
    close(module.log_q(opening, STATES[:, None]).exp()[0], ADAPTIVE["out_q_seq"].expand(TOKENS, -1))
    loss = ADAPTIVE["out_xent_seq_lik"]
    close(module.auxiliary_loss(opening, STATES[:, None], VERDICT), loss)


def test_multinomial():
    module = adaptive("multinomial").build(WIDTH, PASSES).double()
    fill(module.net, ADAPTIVE["w_mult"].T, ADAPTIVE["w_mult_b"])
    close(module.log_q(None, STATES[:, None]).exp()[0], ADAPTIVE["out_q_tok"])


def test_geometric():
    module = adaptive("geometric").build(WIDTH, PASSES).double()
    put(module.w, ADAPTIVE["w_geo"])
    put(module.b, ADAPTIVE["w_geo_b"])
    close(module.log_q(None, STATES[:, None]).exp()[0], ADAPTIVE["out_q_geo"].T)
    close(module.auxiliary_loss(None, STATES[:, None], VERDICT), ADAPTIVE["out_xent_tok_geo_lik"].mean())


@pytest.mark.parametrize(
    ("classifier", "oracle", "name"),
    [
        ("sequence", "likelihood", "seq_lik"),
        ("sequence", "correctness", "seq_corr"),
        ("multinomial", "likelihood", "tok_lik"),
        ("geometric", "correctness", "tok_corr"),
    ],
)
def test_oracles(classifier, oracle, name):
    expected = ADAPTIVE[f"out_{name}"].expand(TOKENS)
    assert adaptive(classifier, oracle).oracle_pass(VERDICT)[0].tolist() == expected.tolist()


def test_softmax_response():
    close(probability_margin([CONFIDENT["in_logits"].softmax(dim=-1)]), CONFIDENT["out_softmax_diff"])


def confidences(confidence: str) -> Tensor:
    """Return the confidences after each pass but the last, (N - 1, tokens), of the states of the vector."""
    states = CONFIDENT["in_h"][:, None]
    module = CALM(confidence).build(states.shape[-1], len(states)).double()
    before = [torch.zeros_like(states[0]), *states[:-1]]
    results = [module.confidence(n, *pair, None) for n, pair in enumerate(zip(before, states, strict=True))]
    return torch.stack(results[:-1])[:, 0]


def test_state_saturation():
    close(confidences("state")[1:], CONFIDENT["out_state"][:-1])
    assert (confidences("state")[0] == -1).all()


def test_exit_after_the_first_confident_pass():
    confidences = CONFIDENT["out_softmax_diff"][:-1]
    for threshold, expected in zip(CONFIDENT["in_lambdas"], CONFIDENT["out_exits"], strict=True):
        module = CALM("softmax", float(threshold)).build(1, PASSES).double()
        rule = module.exit_rule(torch.zeros(0), None)
        exits = torch.stack(
            [rule(n, value, value, lambda value=value: value) for n, value in enumerate(confidences)]
        )
        first = torch.where(exits.any(0), exits.long().argmax(0), len(confidences))
        assert first.tolist() == expected.tolist()
