"""Subjects of `bench.py attention`: attention sublayers, including projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention_packages import installed
from benchmarks.attention_sizes import AROUND, BLOCK, CHUNK, HEADS, ROUNDS, SIZE, SUMMARIES, Pass, root
from rlxf.attention import (
    ETC,
    LSH,
    RFA,
    BigBird,
    Blockwise,
    Dilated,
    FixedColumns,
    Linformer,
    Local1D,
    Longformer,
    Performer,
    Routing,
    Strided,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.attention import Attention
from rlxf.attention.patterns.base import Pattern

LAYERS = 2
SPARSE_BY = 4096
"""Number of tokens from which a subject should be faster than dense attention."""


@dataclass(frozen=True)
class Subject:
    """Attention sublayer to be measured.

    Args:
        build: function that builds the forward pass for a length.
        at_most: maximum exponent of L in its time; None: no claim.
        faster_from: number of tokens from which it should be faster than dense attention.
        layers: number of different layers that are called in turn; their mean is measured.
        begins_with: tokens of a first pass, after which memory is measured.
    """

    build: Callable[[int], Pass]
    at_most: float | None = None
    faster_from: int = SPARSE_BY
    layers: int = 1
    begins_with: int = 128


def dense_attention(length: int) -> Pass:
    """Return dense causal attention with torch's scaled_dot_product_attention, which skips masked pairs."""
    attention = TransformerSpec(width=HEADS * SIZE, heads=HEADS, layers=1).build().blocks[0].attention
    assert isinstance(attention, Attention)

    def attend(x: Tensor) -> Tensor:
        q, k, v = attention.split(attention.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = attention.out(y.transpose(1, 2).flatten(2))
        return out

    return attend


def with_pattern(pattern: Pattern) -> Pass:
    """Return the attention of a causal transformer with a pattern; its layers are called in turn."""
    return with_techniques(pattern=pattern)


def with_techniques(**choices: Any) -> Pass:
    """Return the attention of a transformer, causal by default; its layers are called in turn."""
    transformer = TransformerSpec(width=HEADS * SIZE, heads=HEADS, layers=LAYERS, **choices).build()
    turns = iter(range(10**9))

    def attend(x: Tensor) -> Tensor:
        layer, index = next(turns) % LAYERS, TokenIndex.range(1, x.shape[1])
        relation = transformer.attention_masks(index, index)[layer]
        block: Any = transformer.blocks[layer]
        return block.attention(x, None, relation)

    return attend


SUBJECTS: dict[str, Subject] = {
    "every pair": Subject(dense_attention),
    "Window": Subject(lambda length: with_pattern(Window(129)), 1.15),
    "Dilated": Subject(lambda length: with_pattern(Dilated(129, 4)), 1.15),
    "Local1D": Subject(lambda length: with_pattern(Local1D(64, 64)), 1.15),
    "Longformer": Subject(lambda length: with_pattern(Longformer(AROUND)), 1.15),
    "ETC": Subject(lambda length: with_pattern(ETC(128)), 1.15),
    "BigBird": Subject(lambda length: with_pattern(BigBird(32)), 1.15),
    "Blockwise": Subject(lambda length: with_pattern(Blockwise(64)), 1.15),
    "Longformer, both ways": Subject(
        lambda length: with_techniques(pattern=Longformer(AROUND), causal=False), 1.15
    ),
    "BigBird, both ways": Subject(
        lambda length: with_techniques(pattern=BigBird(BLOCK, global_blocks=2), causal=False), 1.15
    ),
    "Linformer": Subject(
        lambda length: with_techniques(kernel=Linformer(length, SUMMARIES), causal=False), 1.15
    ),
    "Linformer, heads by themselves": Subject(
        lambda length: with_techniques(kernel=Linformer(length, SUMMARIES, sharing="none"), causal=False),
        1.15,
    ),
    "Linformer, causal": Subject(lambda length: with_techniques(kernel=Linformer(128, 16))),
    "Linformer, causal, long blocks": Subject(
        lambda length: with_techniques(kernel=Linformer(root(16 * length), 16)), 1.65
    ),
    "LSH": Subject(
        lambda length: with_techniques(kernel=LSH(ROUNDS, max(2, 2 * length // CHUNK))), 1.3, faster_from=8192
    ),
    "Routing": Subject(lambda length: with_techniques(kernel=Routing(root(length))), 1.65, faster_from=8192),
    "Performer": Subject(lambda length: with_techniques(kernel=Performer()), 1.15),
    "Performer, both ways": Subject(lambda length: with_techniques(kernel=Performer(), causal=False), 1.15),
    "RFA": Subject(lambda length: with_techniques(kernel=RFA()), 1.15),
    "RFA that forgets": Subject(lambda length: with_techniques(kernel=RFA(gate=True)), 1.15),
    "Strided": Subject(lambda length: with_pattern(Strided(root(length))), 1.65, layers=LAYERS),
    "FixedColumns": Subject(lambda length: with_pattern(FixedColumns(root(length), 4)), 1.65),
}
"""Subjects by name."""

SUBJECTS |= {
    f"package {name}": Subject(build, begins_with=least) for name, (build, least) in installed().items()
}
