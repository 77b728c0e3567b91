"""Tests of universal transformers and adaptive computation time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    ACT,
    XL,
    Fixed,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Universal,
    UniversalSinusoid,
)
from rlxf.attention.token_index import EMPTY
from tests.attention.passes import act, assert_close_for_dtype
from tests.attention.specs import new_model
from tests.attention.worlds import END, GAP, ON, index_of, numbers, random_index, random_segment

SPEC = TransformerSpec(
    width=8, heads=2, layers=4, feed_forward=12, position=UniversalSinusoid(), depth=Universal()
)
ACT_SPEC = replace(SPEC, depth=ACT(ponder_cost=0.5, bias=-1.0))


def record_pass_lengths(model: Transformer) -> list[int]:
    """Record the number of tokens in each call of the first feed-forward sublayer."""
    lengths: list[int] = []
    model.blocks[0].feed_forward.register_forward_hook(
        lambda _, inputs, __: lengths.append(inputs[0].shape[1])
    )
    return lengths


# One layer


def test_universal_transformer_equals_stack_with_tied_weights():
    one, stack = new_model(SPEC).double(), new_model(replace(SPEC, depth=Fixed())).double()
    for block in stack.blocks:
        block.load_state_dict(one.blocks[0].state_dict())
    stack.norm.load_state_dict(one.norm.state_dict())
    run = random_segment(SPEC, random_index(3, 9))
    assert_close_for_dtype(one(run.x, run.index)[0], stack(run.x, run.index)[0])
    assert len(one.blocks) == 1


def test_pass_embedding_encodes_position_and_pass():
    module = UniversalSinusoid(base=50.0).build_embedding(4, 1)
    position = torch.tensor([[0, 3, 7]])
    for number in range(3):
        actual = module.pass_embedding(torch.zeros(1, 3, 4, dtype=torch.float64), position, number)
        for slot, t in enumerate([0, 3, 7]):
            for m in range(2):
                rate = 50.0 ** (-2 * m / 4)
                angles = torch.tensor([t * rate, (number + 1) * rate], dtype=torch.float64)
                assert_close_for_dtype(actual[0, slot, 2 * m], angles.sin().sum())
                assert_close_for_dtype(actual[0, slot, 2 * m + 1], angles.cos().sum())


# Halting


def reference_act(model: Transformer, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
    """Compute ACT (Graves) token by token for one row: outputs (T, C), and N + R of each token (T,)."""
    spec, depth = model.spec, model.depth
    (length,) = index.position[0].shape
    masks = model.attention_masks(index, index)
    state, outputs = x, [torch.zeros(spec.width, dtype=x.dtype) for _ in range(length)]
    sums, ponder, halted = [0.0] * length, [torch.zeros(())] * length, [False] * length
    for number in range(spec.layers):
        entered = state + model.embedding.pass_embedding(state, index.position, number)
        after = model.blocks[0].apply_feed_forward(model.blocks[0].attend(entered, None, masks[number]))
        rows = []
        for t in range(length):
            if halted[t]:
                rows.append(state[0, t])
                continue
            p = torch.sigmoid(entered[0, t] @ depth.w + depth.b)
            halted[t] = bool(sums[t] + p >= 1 - depth.spec.epsilon) or number == spec.layers - 1
            outputs[t] = outputs[t] + (1 - sums[t] if halted[t] else p) * after[0, t]
            ponder[t] = number + 1 + 1 - sums[t]
            sums[t] = sums[t] + p
            rows.append(after[0, t])
        state = torch.stack(rows)[None]
    return model.norm(torch.stack(outputs)), torch.stack([torch.as_tensor(one) for one in ponder])


@pytest.mark.parametrize("seed", range(4))
def test_halting_equals_reference_loop(seed):
    model = new_model(ACT_SPEC, seed).double()
    run = random_segment(ACT_SPEC, TokenIndex.range(1, 7))
    y, _ = model(run.x, run.index)
    expected, ponder = reference_act(model, run.x, run.index)
    assert_close_for_dtype(y[0], expected)
    penalty = model.penalty()
    assert_close_for_dtype(penalty, 0.5 * ponder.mean())
    weights = (model.depth.w, model.depth.b)
    for actual, expected_gradient in zip(
        torch.autograd.grad((y**2).sum() + penalty, weights),
        torch.autograd.grad((expected**2).sum() + 0.5 * ponder.mean(), weights),
        strict=True,
    ):
        assert_close_for_dtype(actual, expected_gradient)


def test_steps_equal_segments_with_different_halting_depths():
    model = new_model(ACT_SPEC).double()
    run = random_segment(ACT_SPEC, random_index(4, 12))
    depths = set()
    learned, _ = model(run.x, run.index)
    cache = model.cache(model.initial_state(4), run.length)
    for t in range(run.length):
        y, _ = model.step(run.x[:, t], run.index.at(slice(t, t + 1)), cache)
        here = run.filled[:, t]
        assert_close_for_dtype(y[here], learned[:, t][here].detach())
        depths.add(float(model.depth.mean_depth()))
    assert len(depths) > 2


def test_passes_without_active_tokens_are_skipped():
    model = new_model(replace(ACT_SPEC, memory=XL(3))).double()
    with torch.no_grad():
        model.depth.b.fill_(50.0)
    run, actual = random_segment(ACT_SPEC, random_index(2, 6)), record_pass_lengths(model)
    learned, state = model(run.x, run.index)
    assert actual == [6]
    acted, hidden = act(model, run, model.cache(model.initial_state(2), 6))
    assert actual == [6] + 6 * [1]
    assert_close_for_dtype(acted[run.filled], learned[run.filled].detach())
    kept = model.spec.memory(model.initial_state(2), hidden, run.index)
    assert_close_for_dtype(
        kept.hidden[:, kept.index.episode != EMPTY], state.hidden[:, state.index.episode != EMPTY]
    )


def test_ponder_cost_is_independent_of_selected_outputs():
    model, costs = new_model(ACT_SPEC).double(), []
    run = random_segment(ACT_SPEC, random_index(2, 6))
    for output_slice in (None, slice(4, None)):
        model.encode(run.x, run.index, output_slice=output_slice)
        costs.append((model.penalty(), model.depth.mean_depth()))
    assert_close_for_dtype(costs[0][0], costs[1][0])
    assert_close_for_dtype(costs[0][1], costs[1][1])


def test_acting_stops_when_the_selected_token_halts():
    """The output equals that of a full segment pass, although other tokens have not halted."""
    model, depths = new_model(replace(ACT_SPEC, depth=ACT(bias=0.5))).double(), set()
    run = random_segment(ACT_SPEC, TokenIndex.range(8, 7))
    learned = model.encode(run.x, run.index, output_slice=slice(6, None))[0].detach()
    actual = record_pass_lengths(model)
    for row in range(8):
        actual.clear()
        here = TokenIndex(run.index.position[row : row + 1], run.index.episode[row : row + 1])
        assert_close_for_dtype(
            model.early_outputs(run.x[row : row + 1], here, output_slice=slice(6, None))[0], learned[row]
        )
        assert len(actual) == int(model.pop_mean_acting_depth())
        depths.add(len(actual))
    assert len(depths) > 1


def test_pass_counts_are_exact_in_bfloat16():
    model = new_model(replace(ACT_SPEC, layers=300)).bfloat16()
    with torch.no_grad():
        model.depth.w.zero_()
        model.depth.b.fill_(-50.0)
    model(random_segment(ACT_SPEC, TokenIndex.range(1, 1)).x.bfloat16(), TokenIndex.range(1, 1))
    assert model.mean_depth() == 300


def test_empty_slots_have_no_ponder_cost():
    model = new_model(ACT_SPEC).double()
    gaps = index_of([[ON, GAP, ON, GAP, GAP, ON, END]])
    x = numbers(1, 7, 8)
    model(x, gaps)
    penalty, depth = model.penalty(), model.depth.mean_depth()
    filled = gaps.episode[0] != EMPTY
    model(x[:, filled], gaps.at(filled))
    assert_close_for_dtype(penalty, model.penalty())
    assert_close_for_dtype(depth, model.depth.mean_depth())


def test_penalty_is_returned_once_and_only_with_gradients():
    model = new_model(ACT_SPEC)
    run = random_segment(ACT_SPEC, TokenIndex.range(1, 3), torch.float32)
    model(run.x, run.index)
    assert model.penalty() is not None
    assert model.penalty() is None
    with torch.no_grad():
        model(run.x, run.index)
    assert model.penalty() is None


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"ponder_cost": -0.1}, ValueError),
        ({"ponder_cost": float("nan")}, ValueError),
        ({"epsilon": 0.0}, ValueError),
        ({"epsilon": 1.0}, ValueError),
        ({"bias": "1"}, TypeError),
    ],
)
def test_invalid_options_raise(options, kind):
    with pytest.raises(kind, match=next(iter(options))):
        ACT(**options)
