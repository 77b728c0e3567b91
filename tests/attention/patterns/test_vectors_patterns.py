"""Sparse patterns reproduce the masks of published code, and attention with them."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import Blockwise, FixedColumns, Local1D, Local2D, Strided, TokenIndex
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.patterns.base import Pattern
from tests.attention.oracle import Vector, close, load
from tests.attention.passes import over_heads

IMAGE, SPARSE, BLOCKWISE = load("image_transformer"), load("sparse_transformer"), load("blockwise")
SINGLE = 1e-5  # Image Transformer's code computes in float32.


def related(
    pattern: Pattern, position: Tensor, causal: bool, batch: int = 1, heads: int = 1
) -> AttentionMask:
    """Return the attention mask of tokens of one episode at positions (T,), in any order."""
    position = position.expand(batch, -1)
    index = TokenIndex(position, torch.zeros_like(position))
    return AttentionMask(index, index, pattern, causal, torch.float64, heads=heads)


def attended(vector: Vector, name: str, mask: AttentionMask, scale: float = 1.0) -> Tensor:
    """Return the attention output of q, k and v of a vector, (B, H, T, D)."""
    q, k, v = (vector[f"in_{kind}{name}"].double().flatten(2, -2) for kind in "qkv")
    return mask.zero_masked_rows(over_heads(q, None).average(q * scale, k, v, mask, None))


# Image Transformer: its queries are not scaled, ours are divided by sqrt(D).


def relation_1d(margin: str, causal: bool, length: int) -> AttentionMask:
    pattern = Local1D(int(IMAGE["cfg_block_1d"]), int(IMAGE[margin]))
    return related(pattern, torch.arange(length), causal, *IMAGE["in_q1"].shape[:2])


@pytest.mark.parametrize(
    ("name", "margin", "causal"), [("masked", "cfg_block_1d", True), ("unmasked", "cfg_filter_width", False)]
)
def test_local_1d(name, margin, causal):
    out = IMAGE[f"out_1d_{name}"]
    mask = IMAGE["out_mask_1d" if causal else "out_mask_1d_unmasked"]
    length, scale = out.shape[2], IMAGE["in_q1"].shape[-1] ** 0.5
    relation = relation_1d(margin, causal, length)
    assert torch.equal(relation.allowed[0], mask)
    first = {
        key: value[:, :, :length] for key, value in IMAGE.items() if key.startswith("in_") and key[-1] == "1"
    }
    close(attended(first, "1", relation, scale), out.double(), SINGLE)


def generation_order(height: int, width: int, rows: int, columns: int) -> Tensor:
    """Return the position of each pixel, in row order, for an image generated block by block."""
    position, count = torch.zeros(height, width, dtype=torch.long), 0
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            for row in range(top, top + rows):
                for column in range(left, left + columns):
                    position[row, column] = count
                    count += 1
    return position.flatten()


@pytest.mark.parametrize(("name", "causal"), [("masked", True), ("unmasked", False)])
def test_local_2d(name, causal):
    (height, width), shape = IMAGE["in_q2"].shape[2:4], IMAGE["cfg_query_shape"].tolist()
    pattern = Local2D(width, *shape, *IMAGE["cfg_flange"].tolist())
    position = generation_order(height, width, *shape)
    relation = related(pattern, position, causal, *IMAGE["in_q2"].shape[:2])
    assert torch.equal(relation.allowed[0], IMAGE["out_mask_2d" if causal else "out_mask_2d_unmasked"])
    y = attended(IMAGE, "2", relation, IMAGE["in_q2"].shape[-1] ** 0.5)
    close(y, IMAGE[f"out_2d_{name}"].double().flatten(2, 3), SINGLE)


# Sparse Transformer.

L, C = int(SPARSE["cfg_l"]), int(SPARSE["cfg_c"])
HEADS = SPARSE["in_q"].shape[1]


def sparse(pattern: Pattern, heads: int = 1) -> AttentionMask:
    return related(pattern, torch.arange(SPARSE["in_q"].shape[2]), True, heads=heads)


@pytest.mark.parametrize(
    ("pattern", "mask"),
    [
        (Strided(L).for_layer(0), "local"),
        (Strided(L).for_layer(2), "local"),
        (Strided(L, form="text").for_layer(0), "local_paper"),
        (Strided(L).for_layer(1), "strided"),
        (FixedColumns(L, C, combination="by-layer").for_layer(0), "fixed_A1"),
        (FixedColumns(L, C, combination="by-layer").for_layer(1), "fixed_A2"),
        (FixedColumns(L, C), "fixed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sparse_masks(pattern, mask):
    assert torch.equal(sparse(pattern).allowed[0], SPARSE[f"out_mask_{mask}"])


def test_fixed_columns_of_each_head():
    masks = SPARSE["out_mask_fixed_heads"]
    relation = sparse(FixedColumns(L, C, summaries=len(masks)), len(masks))
    assert torch.equal(relation.allowed_by_head[0], masks)


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        (Strided(L).for_layer(0), "local"),
        (Strided(L).for_layer(1), "strided"),
        (Strided(L, combination="merged"), "merged"),
        (Strided(L, combination="by-head"), "heads"),
        (FixedColumns(L, C), "fixed_merged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sparse_attention(pattern, out):
    close(attended(SPARSE, "", sparse(pattern, HEADS)), SPARSE[f"out_{out}"])


# Blockwise.


def test_blockwise():
    mask, permutations = BLOCKWISE["out_mask"], BLOCKWISE["cfg_permutations"]
    blocks = permutations.shape[1]
    pattern = Blockwise(mask.shape[1] // blocks, blocks, tuple(map(tuple, permutations.tolist())))
    batch, heads, length = BLOCKWISE["in_q"].shape[:3]
    relation = related(pattern, torch.arange(length), False, batch, heads)
    assert torch.equal(relation.allowed_by_head[0], mask)
    close(attended(BLOCKWISE, "", relation), BLOCKWISE["out"])
