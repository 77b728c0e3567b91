"""Longformer, ETC and BigBird reproduce attention with global tokens of published code or its formula."""

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import (
    ETC,
    BigBird,
    Dilated,
    ETCLabels,
    Full,
    HeadPatterns,
    Longformer,
    TokenIndex,
    TransformerSpec,
)
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.layers import build_self_attention
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.positions.base import Position
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import Vector, close, fill, load, put

LONGFORMER, LABELED, BIGBIRD = load("longformer"), load("etc"), load("bigbird")
LABEL_NUMBERS = load("etc_labels")


def attention(pattern: Pattern, width: int, heads: int, position: Position | None = None) -> nn.Module:
    sizes = {"width": width, "heads": heads}
    spec = TransformerSpec(**sizes, causal=False, pattern=pattern, position=position)
    return build_self_attention(spec).double()


def relation(pattern: Pattern, index: TokenIndex, heads: int, causal: bool = False) -> AttentionMask:
    return AttentionMask(index, index, pattern, causal, torch.float64, heads=heads)


def stacked(vector: Vector, weights: list[str], biases: list[str]) -> tuple[Tensor, Tensor]:
    """Concatenate weights and biases of several projections."""
    return torch.cat([vector[name].T for name in weights]), torch.cat([vector[name] for name in biases])


def identity(linear: nn.Module) -> None:
    fill(linear, torch.eye(len(linear.weight), dtype=torch.float64))


# Longformer.

X, MASK = LONGFORMER["in_x"], LONGFORMER["in_attention_mask"]
DILATION, HALF = LONGFORMER["cfg_dilation"].tolist(), int(LONGFORMER["cfg_window"]) // 2
HEADS = len(DILATION)
QKV = ("query", "key", "value")
LOCAL = stacked(LONGFORMER, [f"w_{name}" for name in QKV], [f"w_b_{name}" for name in QKV])
GLOBAL = stacked(LONGFORMER, [f"w_{name}_global" for name in QKV], [f"w_b_{name}_global" for name in QKV])


def global_first(mask: Tensor) -> tuple[TokenIndex, int]:
    """Return an index in which the marked tokens have the first positions, and their number.

    The other tokens keep their distances; the position of a global token has no effect.
    """
    is_global = mask > 0
    count = int(is_global.sum(1).max())
    later = torch.arange(mask.shape[1]) + count
    position = torch.where(is_global, is_global.cumsum(1) - 1, later)
    return TokenIndex(position, torch.where(mask < 0, EMPTY, 0)), count


def test_longformer():
    index, count = global_first(MASK)
    pattern = Longformer(2 * HALF, global_tokens=count)
    module = attention(pattern, X.shape[2], HEADS)
    fill(module.others.qkv, *LOCAL)
    fill(module.globals.qkv, *GLOBAL)
    identity(module.out)
    y, token = module(X, None, relation(pattern, index, HEADS)), MASK >= 0
    close(y[token], LONGFORMER["out"][token], 1e-6)


@pytest.mark.parametrize("row", range(len(MASK)))
def test_longformer_at_the_positions_of_the_vector(row):
    """Each row of the vector marks other tokens as global; they keep their positions."""
    x, mask = X[row : row + 1], MASK[row : row + 1]
    positions = tuple((mask[0] > 0).nonzero()[:, 0].tolist())
    pattern = Longformer(2 * HALF, global_tokens=positions)
    module = attention(pattern, X.shape[2], HEADS)
    fill(module.others.qkv, *LOCAL)
    fill(module.globals.qkv, *GLOBAL)
    identity(module.out)
    index = TokenIndex(torch.arange(mask.shape[1])[None], torch.where(mask < 0, EMPTY, 0))
    y = module(x, None, relation(pattern, index, HEADS))
    close(y[mask >= 0], LONGFORMER["out"][row : row + 1][mask >= 0], 1e-6)


def test_longformer_without_global_tokens():
    y = windowed(Dilated(HALF + 1, 1), causal=False)
    close(y, LONGFORMER["out_local"], 1e-6)


@pytest.mark.parametrize(("causal", "out"), [(False, "dilated"), (True, "dilated_causal")])
def test_dilated_windows(causal, out):
    heads: Pattern = Dilated(HALF + 1, DILATION[0])
    for number, dilation in enumerate(DILATION[1:], start=1):
        heads = HeadPatterns(heads, Dilated(HALF + 1, dilation), HEADS - number)
    close(windowed(heads, causal), LONGFORMER[f"out_formula_{out}"])
    allowed = relation(heads, TokenIndex.range(1, X.shape[1]), HEADS).allowed_by_head[0]
    assert torch.equal(allowed, LONGFORMER["out_mask_dilated"])


def windowed(pattern: Pattern, causal: bool) -> Tensor:
    module = attention(Full(), X.shape[2], HEADS)
    fill(module.qkv, *LOCAL)
    identity(module.out)
    return module(X, None, relation(pattern, TokenIndex.range(*X.shape[:2]), HEADS, causal))


# ETC: global tokens precede the long input.

LONG, FIRST = LABELED["in_long"], LABELED["in_global"]
COUNT, WIDTH = FIRST.shape[1:]
SIDES = LABELED["w_rel_long"].shape[1]


def swapped(table: Tensor) -> Tensor:
    """Swap the last two rows: in the vector, the label of the same segment precedes that of others."""
    return torch.cat([table[:-2], table[-2:].flip(0)])


def load_etc(module: nn.Module) -> None:
    """Load the vector's weights into attention with four pairs of projections."""
    for side, name, short in ((module.others, "long", "l"), (module.globals, "global", "g")):
        pairs = [f"w_{short}2{other}_{kind}" for other in "lg" for kind in "kv"]
        fill(side.qkv, torch.cat([LABELED[key].T for key in (f"w_{short}_q", *pairs)]))
        fill(side.out, LABELED[f"w_{short}_o"].T)
        put(side.position.keys, swapped(LABELED[f"w_rel_{name}"]))
        put(side.position.biases, swapped(LABELED[f"w_bias_{name}"]))


def test_etc():
    pattern = ETC(int(LABELED["cfg_radius"]), COUNT)
    max_distance = (len(LABELED["w_rel_long"]) - 3) // 2
    position = ETCLabels(max_distance, COUNT, segment=LONG.shape[1] // COUNT)
    module = attention(pattern, WIDTH, SIDES, position)
    load_etc(module)
    x = torch.cat([FIRST, LONG], dim=1)
    mask = relation(pattern, TokenIndex.range(*x.shape[:2]), SIDES)
    assert torch.equal(mask.allowed[0, COUNT:], LABELED["cfg_mask_long"])
    assert mask.allowed[0, :COUNT].all()
    index, labels = torch.arange(x.shape[1]), LABELED["cfg_labels_long"]
    ours = position.label(index[:, None], index, index[:, None] - index)
    assert torch.equal(ours[COUNT:, COUNT:], labels[:, COUNT:])
    assert torch.equal(
        ours[COUNT:, :COUNT] == 2 * max_distance + 2, labels[:, :COUNT] == 2 * max_distance + 1
    )
    y = module(x, None, mask)
    close(y[:, :COUNT], LABELED["out_global"])
    close(y[:, COUNT:], LABELED["out_long"])


SENTENCE, CLIP = LABEL_NUMBERS["in_sentence"], int(LABEL_NUMBERS["cfg_clip"])
LENGTHS = tuple(SENTENCE.bincount().tolist())


def label_numbers(**options) -> Tensor:
    """Return the labels of all pairs of tokens, those of the global input first."""
    index = torch.arange(len(LENGTHS) + len(SENTENCE))
    return ETCLabels(CLIP, len(LENGTHS), LENGTHS, **options).label(
        index[:, None], index, index[:, None] - index
    )


def test_label_numbers_of_the_authors():
    ours, count = label_numbers(), len(LENGTHS)
    assert torch.equal(ours[count:, count:], LABEL_NUMBERS["out_full"])
    assert torch.equal(ours[:count, :count], LABEL_NUMBERS["out_g2g"])
    assert torch.equal(ours[count:, :count], LABEL_NUMBERS["out_l2g"])
    assert torch.equal(ours[:count, count:], LABEL_NUMBERS["out_g2l"])
    outside = label_numbers(outside=int(LABEL_NUMBERS["cfg_outside"]))
    assert torch.equal(outside[count:, count:], LABEL_NUMBERS["out_outside"])
    assert torch.equal(outside[:count], ours[:count])
    assert torch.equal(outside[:, :count], ours[:, :count])


def test_masks_of_the_authors():
    """Labels of local pairs within the radius, and the mask of the segment of each global token."""
    radius, count = int(LABEL_NUMBERS["cfg_radius"]), len(LENGTHS)
    pattern = ETC(radius, count, global_input="given", segments=LENGTHS)
    mask = relation(pattern, TokenIndex.range(1, count + len(SENTENCE)), 1).allowed[0]
    local = torch.where(mask[count:, count:], label_numbers()[count:, count:], -1)
    assert torch.equal(local, LABEL_NUMBERS["out_l2l"])
    assert torch.equal(mask[:count, count:], LABEL_NUMBERS["out_hard_g2l"])
    assert mask[:, :count].all()


def test_global_input():
    """The transformer takes the vector's global tokens as its first tokens and returns their outputs."""
    pattern = ETC(int(LABELED["cfg_radius"]), COUNT, global_input="given")
    max_distance = (len(LABELED["w_rel_long"]) - 3) // 2
    spec = TransformerSpec(
        width=WIDTH,
        heads=SIDES,
        layers=1,
        pattern=pattern,
        position=ETCLabels(max_distance, COUNT, segment=LONG.shape[1] // COUNT),
        causal=False,
        norm="post",
        final_norm=False,
    )
    model = spec.build().double()
    load_etc(model.blocks[0].attention)
    block = model.blocks[0]
    with torch.no_grad():
        for part in block.feed_forward.parameters():
            part.zero_()
    x = torch.cat([FIRST, LONG], dim=1)
    expected = torch.cat([LABELED["out_global"], LABELED["out_long"]], dim=1)
    norm = torch.nn.functional.layer_norm
    y = model.outputs(x, TokenIndex.range(*x.shape[:2]))
    close(y, norm(norm(x + expected, (WIDTH,)), (WIDTH,)))


def test_label_numbers_of_the_paper():
    """Labels for K = 2, two global tokens and two tokens each; rows are queries."""
    index = torch.arange(6)
    label = ETCLabels(2, 2, segment=2).label(index[:, None], index, index[:, None] - index)
    assert label.tolist() == [
        [0, 1, 6, 6, 5, 5],
        [3, 0, 5, 5, 6, 6],
        [6, 5, 0, 1, 2, 2],
        [6, 5, 3, 0, 1, 2],
        [5, 6, 4, 3, 0, 1],
        [5, 6, 4, 4, 3, 0],
    ]


def test_labels_and_pattern_must_have_the_same_global_tokens():
    with pytest.raises(ValueError, match=r"ETCLabels\(.*\) and ETC\(.*\) disagree .* set .*global_tokens=3"):
        TransformerSpec(pattern=ETC(4, 3), position=ETCLabels())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ETCLabels(outside=3), "ETCLabels outside=3 needs the lengths of sentences; set segment"),
        (lambda: ETCLabels(2, segment=2, outside=7), "ETCLabels outside must be at most 6, got 7"),
        (lambda: ETCLabels(segment=()), r"ETCLabels segment must be a length or a tuple .* got \(\)"),
        (lambda: ETC(segments=(2, 0)), "ETC segments must be at least 1, got 0"),
        (lambda: ETC(global_input="both"), r"ETC global_input must be one of .* got 'both'"),
        (
            lambda: TransformerSpec(pattern=ETC(segments=4)),
            r"ETC\(.* causal=True hides all later tokens .* set segments=None or causal=False",
        ),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# BigBird.

BLOCK, RANDOM_BLOCKS = int(BIGBIRD["cfg_block"]), BIGBIRD["in_random_blocks"]


def test_big_bird():
    x, token, heads = BIGBIRD["in_x"], BIGBIRD["in_attention_mask"] > 0, len(RANDOM_BLOCKS)
    drawn = tuple(((), *(tuple(row) for row in head), ()) for head in RANDOM_BLOCKS.tolist())
    pattern = BigBird(BLOCK, window=3, random=RANDOM_BLOCKS.shape[2], global_blocks=1, given_blocks=drawn)
    module = attention(Full(), x.shape[2], heads)
    names = ("q", "k", "v")
    fill(module.qkv, *stacked(BIGBIRD, [f"w_{name}" for name in names], [f"w_b{name}" for name in names]))
    identity(module.out)
    whole = TokenIndex.range(*token.shape)
    assert torch.equal(relation(pattern, whole, heads).allowed_by_head[0], BIGBIRD["out_mask"])
    index = TokenIndex(whole.position, torch.where(token, 0, EMPTY))
    y = module(x, None, relation(pattern, index, heads))
    close(y[token], BIGBIRD["out"][token])
