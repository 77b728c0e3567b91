"""Which tokens are chosen, and what becomes of them."""

import pytest
import torch
from scipy.stats import binom

from rlxf.agents.decision_transformer.steps import TOKENS
from rlxf.agents.pretraining.masking import Masking

STEPS = 200_000


def real_and_padding() -> torch.Tensor:
    """A few rows of many steps; every seventh is padding."""
    return torch.arange(STEPS).view(4, -1) % 7 != 0


def drawn(share=0.15, seed=0) -> Masking:
    return Masking.draw(real_and_padding(), share, torch.Generator().manual_seed(seed))


def within_bounds(count, number, probability):
    """Whether a count is one that 999,999 of a million draws would not exceed."""
    low, high = binom.interval(1 - 1e-6, number, probability)
    return low <= count <= high


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("kind", range(TOKENS))
def test_so_many_of_each_kind_are_chosen(share, kind):
    chosen = drawn(share).chosen[..., kind].sum().item()
    assert within_bounds(chosen, int(real_and_padding().sum()), share)


def test_of_those_80_percent_are_masked_10_swapped_and_10_left():
    masking = drawn()
    chosen = int(masking.chosen.sum())
    left = masking.chosen & ~masking.masked & ~masking.swapped
    for what, share in ((masking.masked, 0.8), (masking.swapped, 0.1), (left, 0.1)):
        assert within_bounds(int(what.sum()), chosen, share)


def test_padding_is_never_chosen_nor_put_anywhere():
    masking, real = drawn(1.0), real_and_padding()
    assert (masking.chosen == real[..., None]).all()
    assert real.flatten()[masking.other].all()


def test_no_token_is_replaced_that_was_not_chosen_or_twice():
    masking = drawn()
    assert not (masking.masked & masking.swapped).any()
    assert not ((masking.masked | masking.swapped) & ~masking.chosen).any()


def test_what_is_put_in_place_comes_from_all_of_the_batch():
    other = drawn().other
    counts = torch.bincount(other.flatten() // (STEPS // 4), minlength=4)
    assert all(within_bounds(count, other.numel(), 1 / 4) for count in counts.tolist())


def test_the_same_generator_gives_the_same_masks():
    first, again, different = drawn(), drawn(), drawn(seed=1)
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(different, name)), name


def test_hiding_by_a_loop():
    generator = torch.Generator().manual_seed(1)
    contents, masks = torch.randn(2, 6, TOKENS, 4), torch.randn(TOKENS, 4)
    masking = Masking.draw(torch.ones(2, 6, dtype=torch.bool), 1.0, generator)
    assert masking.masked.any()
    assert masking.swapped.any()
    hidden = masking.hide(contents, masks)
    for place in torch.cartesian_prod(*map(torch.arange, (2, 6, TOKENS))).tolist():
        row, step, kind = place
        expected = contents[row, step, kind]
        if masking.masked[row, step, kind]:
            expected = masks[kind]
        if masking.swapped[row, step, kind]:
            other_row, other_step = divmod(int(masking.other[row, step, kind]), 6)
            expected = contents[other_row, other_step, kind]
        assert torch.equal(hidden[row, step, kind], expected), place
