"""Tests of XL memory against a list of the last tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import XL, State, TokenIndex
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
