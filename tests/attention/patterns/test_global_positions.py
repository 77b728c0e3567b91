"""Global tokens at listed positions (ETC, BigBirdETC) and listed global blocks (BigBird)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    ETC,
    BigBird,
    BigBirdETC,
    ETCLabels,
    Longformer,
    TokenIndex,
    Transformer,
    TransformerSpec,
)
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.global_attention import number_of_kind
from tests.attention.oracle import close
from tests.attention.specs import new_model
from tests.attention.worlds import numbers

LENGTH, WIDTH, HEADS = 14, 8, 2
SPEC = TransformerSpec(width=WIDTH, heads=HEADS, layers=1, feed_forward=12)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def allowed(pattern: Pattern, causal: bool) -> Tensor:
    """Return the mask (H, T, T) of a transformer."""
    model = replace(SPEC, pattern=pattern, causal=causal).build()
    index = TokenIndex.range(1, LENGTH)
    (mask,) = model.attention_masks(index, index)
    return mask.allowed_by_head[0].expand(HEADS, -1, -1)


@CAUSAL
@pytest.mark.parametrize("farthest", [None, 6])
def test_etc_mask(causal, farthest):
    tokens, radius = (2, 5, 11), 2
    mask = allowed(ETC(radius, (5, 11, 2), farthest, global_input="given"), causal)
    for i in range(LENGTH):
        for j in range(LENGTH):
            seen = abs(i - j) <= radius or ((i in tokens or j in tokens) and abs(i - j) <= (farthest or 99))
            assert bool(mask[0, i, j]) == (seen and (j <= i or not causal))


def test_global_tokens_see_their_own_segments():
    """Global token n belongs to segment n of the tokens that are not global."""
    tokens = (0, 5, 6)
    mask = allowed(ETC(1, tokens, global_input="given", segments=(4, 2, 3)), causal=False)
    others = [i for i in range(LENGTH) if i not in tokens]
    segments = (others[:4], others[4:6], others[6:9])
    for token, segment in zip(tokens, segments, strict=True):
        assert mask[0, token].nonzero()[:, 0].tolist() == sorted([*tokens, *segment])


@CAUSAL
def test_big_bird_mask(causal):
    mask = allowed(BigBird(2, 3, 0, (1, 4)), causal)
    for i in range(LENGTH):
        for j in range(LENGTH):
            a, b = i // 2, j // 2
            seen = abs(a - b) <= 1 or a in (1, 4) or b in (1, 4)
            assert bool(mask[0, i, j]) == (seen and (j <= i or not causal))


def test_blocks_of_listed_global_tokens_are_not_drawn():
    local = BigBirdETC(2, 1, 1, (4, 5, 8, 10, 11)).local
    mask = local.for_heads(1)[0].mask_mod(torch.arange(40)[:, None], torch.arange(40))
    drawn = mask & (torch.arange(40)[:, None] // 2 != torch.arange(40) // 2)
    assert not drawn[:, [4, 5, 10, 11]].any()
    assert drawn[:, 8].any()


@CAUSAL
@pytest.mark.parametrize("tokens", [(0, 1, 2), (1, 4, 9)], ids=str)
def test_etc_equals_the_slow_definition(causal, tokens):
    """Queries of both kinds have their own projections of keys and values of both kinds."""
    spec = replace(SPEC, pattern=ETC(2, tokens, global_input="given"), causal=causal)
    model, x = new_model(spec).double(), numbers(1, LENGTH, WIDTH)
    (block,) = model.blocks
    index = TokenIndex.range(1, LENGTH)
    (mask,) = model.attention_masks(index, index)
    y = block.attention(x, None, mask)[0]
    for i in range(LENGTH):
        seen = [
            j
            for j in range(LENGTH)
            if (abs(i - j) <= 2 or i in tokens or j in tokens) and (j <= i or not causal)
        ]
        part = block.attention.globals if i in tokens else block.attention.others
        q, k, v, global_k, global_v = part.qkv(x[0]).split(WIDTH, dim=-1)
        keys = torch.stack([(global_k if j in tokens else k)[j] for j in seen]).unflatten(-1, (HEADS, -1))
        values = torch.stack([(global_v if j in tokens else v)[j] for j in seen]).unflatten(-1, (HEADS, -1))
        query = q[i].unflatten(-1, (HEADS, -1))
        weights = (keys * query).sum(-1).div((WIDTH // HEADS) ** 0.5).softmax(0)
        close(y[i], part.out((weights[..., None] * values).sum(0).flatten()))


@CAUSAL
@pytest.mark.parametrize(
    ("listed", "counted"),
    [
        (ETC(2, (0, 1, 2), global_input="given"), ETC(2, 3, global_input="given")),
        (BigBirdETC(2, 1, 2, (0, 1, 2), global_input="given"), BigBirdETC(2, 1, 2, 3, global_input="given")),
        (BigBird(2, 1, 2, (0, 1)), BigBird(2, 1, 2, 2)),
    ],
    ids=["ETC", "BigBirdETC", "BigBird"],
)
def test_listed_first_tokens_equal_a_number(causal, listed, counted):
    x, index = numbers(2, LENGTH, WIDTH), TokenIndex.range(2, LENGTH)
    outputs = []
    for pattern in (listed, counted):
        model: Transformer = new_model(replace(SPEC, pattern=pattern, causal=causal)).double()
        outputs.append(model(x, index)[0])
    assert torch.equal(*outputs)


def test_labels_of_listed_tokens():
    """Labels of the pairs do not depend on where a global token is, except by distance."""
    tokens, first = (2, 5), ETCLabels(3, 2, segment=(2, 3))
    listed = ETCLabels(3, [5, 2], segment=(2, 3))
    position = torch.arange(10)
    labels = listed.label(position[:, None], position, position[:, None] - position)
    number = number_of_kind(position, tokens)
    for i in range(10):
        for j in range(10):
            if (i in tokens) == (j in tokens):
                expected = min(j - i, 3) if j >= i else 3 + min(i - j, 3)
            else:
                a, b = (number[p] + (0 if p in tokens else 2) for p in (i, j))
                expected = int(first.label(a, b, a - b))
            assert int(labels[i, j]) == expected


@pytest.mark.parametrize("pattern", [ETC(1, (0, 3)), BigBirdETC(2, global_tokens=(0, 3))], ids=repr)
def test_learned_global_tokens_have_no_positions(pattern):
    message = r"lists positions of tokens, and with causal=False .* set global_input='given' or .*_tokens=2"
    with pytest.raises(ValueError, match=message):
        replace(SPEC, pattern=pattern, causal=False)
    assert replace(SPEC, pattern=pattern).pattern == pattern


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ETC(1, ()), r"global_tokens must be different positions, at least one, got \(\)"),
        (lambda: BigBirdETC(global_tokens=(1, 1)), "global_tokens must be different positions"),
        (lambda: BigBird(global_blocks=(2, 2)), "BigBird global_blocks must be different blocks"),
        (lambda: BigBird(global_blocks=(-1,)), "block in BigBird global_blocks must be at least 0, got -1"),
        (lambda: Longformer(global_tokens=0), "Longformer global_tokens must be at least 1, got 0"),
    ],
)
def test_positions_are_different_and_not_negative(make, message):
    with pytest.raises(ValueError, match=message):
        make()
