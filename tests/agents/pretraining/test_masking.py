"""Tests of the random masking of tokens."""

import pytest
import torch
from scipy.stats import binom

from rlxf.agents.offline.trajectory_model import TOKENS
from rlxf.agents.pretraining.model import Masking

STEPS = 200_000


def real_and_padding() -> torch.Tensor:
    """Return a mask of 4 rows of steps in which every seventh is padding."""
    return torch.arange(STEPS).view(4, -1) % 7 != 0


def drawn(share=0.15, seed=0) -> Masking:
    return Masking.draw(real_and_padding(), share, torch.Generator().manual_seed(seed))


def within_bounds(count, number, probability):
    """Return whether a count is within the binomial interval of probability 1 - 1e-6."""
    low, high = binom.interval(1 - 1e-6, number, probability)
    return low <= count <= high


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("kind", range(TOKENS))
def test_the_fraction_of_chosen_tokens_of_each_kind(share, kind):
    chosen = drawn(share).chosen[..., kind].sum().item()
    assert within_bounds(chosen, int(real_and_padding().sum()), share)


def test_80_percent_are_masked_10_swapped_and_10_unchanged():
    masking = drawn()
    chosen = int(masking.chosen.sum())
    unchanged = masking.chosen & ~masking.masked & ~masking.swapped
    for mask, fraction in ((masking.masked, 0.8), (masking.swapped, 0.1), (unchanged, 0.1)):
        assert within_bounds(int(mask.sum()), chosen, fraction)


def test_padding_is_neither_chosen_nor_a_replacement():
    masking, real = drawn(1.0), real_and_padding()
    assert (masking.chosen == real[..., None]).all()
    assert real.flatten()[masking.replacement_step].all()


def test_only_chosen_tokens_are_replaced_and_only_once():
    masking = drawn()
    assert not (masking.masked & masking.swapped).any()
    assert not ((masking.masked | masking.swapped) & ~masking.chosen).any()


def test_replacements_come_from_the_whole_batch():
    other = drawn().replacement_step
    counts = torch.bincount(other.flatten() // (STEPS // 4), minlength=4)
    assert all(within_bounds(count, other.numel(), 1 / 4) for count in counts.tolist())


def test_equal_generators_give_equal_masks():
    first, again, different = drawn(), drawn(), drawn(seed=1)
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(different, name)), name


def test_hide_equals_a_loop():
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
            other_row, other_step = divmod(int(masking.replacement_step[row, step, kind]), 6)
            expected = contents[other_row, other_step, kind]
        assert torch.equal(hidden[row, step, kind], expected), place
