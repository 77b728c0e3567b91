"""Tests of XL memory against a list of the last tokens, and of sinks and memory tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import (
    ACT,
    CALM,
    GRU,
    RATE,
    RMT,
    XL,
    AdaptiveSpan,
    LearnedAbsolute,
    State,
    StreamingXL,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.token_index import EMPTY
from tests.attention.worlds import ANYWHERE, numbers, segmented_index

LAYERS, WIDTH = 2, 3


@given(drawn=segmented_index(moves=ANYWHERE), length=st.integers(1, 8), start=st.integers(0, 8))
@settings(max_examples=50)
def test_xl_keeps_the_last_tokens_oldest_first(drawn, length, start):
    index, lengths = drawn
    batch, total = index.shape
    hidden = numbers(LAYERS, batch, total, WIDTH)
    state = State.empty(LAYERS, batch, start, hidden, WIDTH)
    empty_slot = (torch.zeros(LAYERS, batch, WIDTH, dtype=hidden.dtype), EMPTY)
    kept, start_of_segment = [empty_slot] * start, 0
    for length_of_segment in lengths:
        segment = slice(start_of_segment, start_of_segment + length_of_segment)
        part = TokenIndex(index.position[:, segment], index.episode[:, segment])
        state = XL(length)(state, hidden[:, :, segment], part)
        kept += [
            (hidden[:, :, t], index.episode[:, t])
            for t in range(start_of_segment, start_of_segment + length_of_segment)
        ]
        start_of_segment += length_of_segment
    for slot, (token, episode) in enumerate(kept[-length:]):
        assert torch.equal(state.hidden[:, :, slot], token)
        assert (state.index.episode[:, slot] == episode).all()
    assert state.hidden.shape == (LAYERS, batch, len(kept[-length:]), WIDTH)


def test_rows_of_a_state_are_copies():
    state = State.empty(LAYERS, 3, 4, torch.zeros(0, dtype=torch.float64), WIDTH)
    chosen = state.rows(torch.tensor([2, 0]))
    assert chosen.hidden.shape == (LAYERS, 2, 4, WIDTH)
    chosen.hidden.fill_(1.0)
    chosen.index.episode.fill_(7)
    assert (state.hidden == 0).all()
    assert (state.index.episode == EMPTY).all()


def test_rows_by_mask_are_rows_by_number():
    hidden = numbers(LAYERS, 3, 4, WIDTH)
    state = XL(4)(State.empty(LAYERS, 3, 4, hidden, WIDTH), hidden, State.empty(1, 3, 4, hidden, 1).index)
    by_mask, by_number = state.rows(torch.tensor([True, False, True])), state.rows(torch.tensor([0, 2]))
    assert torch.equal(by_mask.hidden, by_number.hidden)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"memory": StreamingXL(4), "pattern": Window(5)}, "would hide some of them; use pattern=Full"),
        (
            {"memory": StreamingXL(4), "kernel": AdaptiveSpan()},
            "use kernel=Softmax\\(\\) or memory=XL",
        ),
        ({"memory": RMT(4), "pattern": Window(5)}, "would hide some of them; use pattern=Full"),
        ({"memory": RMT(4), "depth": ACT()}, "but ACT\\(.*\\) decides by token; use depth=Fixed"),
        ({"memory": RMT(4), "depth": CALM()}, "but CALM\\(.*\\) decides by token; use depth=Fixed"),
        ({"memory": RMT(4), "recurrence": GRU(), "attention_layers": (0,)}, "use memory=XL"),
        ({"memory": RMT(4), "cross_attention": True}, "use memory=XL\\(M\\) in a decoder"),
        ({"memory": RMT(4, 2), "position": LearnedAbsolute(7)}, "use max_length=8"),
        ({"memory": RATE(4, valve_heads=3)}, "must divide the width 64; use valve_heads=1"),
    ],
)
def test_incompatible_choices_raise(choices, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**choices)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingXL(4, 0), "StreamingXL sinks must be at least 1, got 0"),
        (lambda: RMT(1), "RMT segment must be at least 2, got 1"),
        (lambda: RATE(4, 0), "RATE tokens must be at least 1, got 0"),
        (lambda: RMT(4, mask="full"), "RMT mask must be one of"),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_streaming_memory_keeps_the_first_tokens_of_a_long_episode():
    model = TransformerSpec(width=8, heads=2, memory=StreamingXL(3, 2)).build().double()
    x, state = numbers(2, 60, 8), None
    for start in range(0, 60, 5):
        index = TokenIndex.range(2, 5, start)
        _, state = model(x[:, start : start + 5], index, state)
    assert torch.equal(state.recurrent.memory["first"][:, 0], x[:, :2])
    assert state.index.position.tolist() == [[57, 58, 59]] * 2


def test_memory_tokens_train_what_earlier_segments_write():
    """The gradient of the last segment reaches a token of the first one only through the memory."""
    model = TransformerSpec(width=8, heads=2, memory=RMT(3, 2)).build().double()
    x = numbers(1, 9, 8).requires_grad_()
    y, _ = model(x, TokenIndex.range(1, 9))
    (gradient,) = torch.autograd.grad(y[:, -1].sum() + (y[:, -1] ** 3).sum(), x)
    assert (gradient[:, :3].abs() > 1e-12).any()
