"""Subjects of `bench.py attention`: attention sublayers, including projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attention_packages import installed
from benchmarks.attention_sizes import AROUND, BLOCK, CHUNK, HEADS, ROUNDS, SIZE, SUMMARIES, root
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
from rlxf.attention.attention_mask import AttentionMask

LAYERS = 2
SPARSE_BY = 4096
"""Number of tokens from which a subject should be faster than dense attention."""


@dataclass(frozen=True)
class Subject:
    """Attention sublayer to be measured.

    Args:
        build: function of a length L that builds the sublayer, on the CPU: x (1, L, C) -> (1, L, C).
        at_most: maximum exponent of L in its time; None: no claim.
        faster_from: number of tokens from which it should be faster than dense attention.
        layers: number of different layers that are called in turn; their mean is measured.
        begins_with: tokens of a first pass, after which memory is measured.
    """

    build: Callable[[int], nn.Module]
    at_most: float | None = None
    faster_from: int = SPARSE_BY
    layers: int = 1
    begins_with: int = 128


class DenseAttention(nn.Module):
    """Dense causal attention with torch's scaled_dot_product_attention, which skips masked pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = plain_attention()

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        q, k, v = self.attention.split(self.attention.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention.out(y.transpose(1, 2).flatten(2))
        return out


def plain_attention() -> Attention:
    """Return an attention module, of which only the projections are used."""
    attention = TransformerSpec(width=HEADS * SIZE, heads=HEADS, layers=1).build().blocks[0].attention
    assert isinstance(attention, Attention)
    return attention


class Sublayers(nn.Module):
    """Attention of the layers of a transformer, causal by default; each call computes the next layer.

    It includes the attention mask, which the layers of a transformer can share.

    Args:
        choices: fields of the spec of the transformer.
    """

    def __init__(self, **choices: Any):
        super().__init__()
        spec = TransformerSpec(width=HEADS * SIZE, heads=HEADS, layers=LAYERS, **choices)
        self.transformer, self.calls = spec.build(), 0

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        layer = self.calls % LAYERS
        self.calls += 1
        block: Any = self.transformer.blocks[layer]
        y: Tensor = block.attention(x, None, self.masks(x)[layer])
        return y

    def masks(self, x: Tensor) -> list[AttentionMask]:
        """Return the attention mask of each layer for x (1, L, C)."""
        index = TokenIndex.range(1, x.shape[1]).to(x.device)
        return self.transformer.attention_masks(index, index)


class SublayersWithKeptMasks(Sublayers):
    """`Sublayers` whose calls share the attention masks of a length."""

    def __init__(self, **choices: Any):
        super().__init__(**choices)
        self.kept: dict[int, list[AttentionMask]] = {}

    def masks(self, x: Tensor) -> list[AttentionMask]:
        """Return the attention mask of each layer for x (1, L, C)."""
        length = x.shape[1]
        if length not in self.kept:
            self.kept[length] = super().masks(x)
        return self.kept[length]


SUBJECTS: dict[str, Subject] = {
    "all pairs": Subject(lambda length: DenseAttention()),
    "Window": Subject(lambda length: Sublayers(pattern=Window(129)), 1.15),
    "Dilated": Subject(lambda length: Sublayers(pattern=Dilated(129, 4)), 1.15),
    "Local1D": Subject(lambda length: Sublayers(pattern=Local1D(64, 64)), 1.15),
    "Longformer": Subject(lambda length: Sublayers(pattern=Longformer(AROUND)), 1.15),
    "ETC": Subject(lambda length: Sublayers(pattern=ETC(128)), 1.15),
    "BigBird": Subject(lambda length: Sublayers(pattern=BigBird(32)), 1.15),
    "Blockwise": Subject(lambda length: Sublayers(pattern=Blockwise(64)), 1.15),
    "Longformer, bidirectional": Subject(
        lambda length: Sublayers(pattern=Longformer(AROUND), causal=False), 1.15
    ),
    "BigBird, bidirectional": Subject(
        lambda length: Sublayers(pattern=BigBird(BLOCK, global_blocks=2), causal=False), 1.15
    ),
    "Linformer": Subject(lambda length: Sublayers(kernel=Linformer(length, SUMMARIES), causal=False), 1.15),
    "Linformer, separate heads": Subject(
        lambda length: Sublayers(kernel=Linformer(length, SUMMARIES, sharing="none"), causal=False),
        1.15,
    ),
    "Linformer, causal": Subject(lambda length: Sublayers(kernel=Linformer(128, 16))),
    "Linformer, causal, long blocks": Subject(
        lambda length: Sublayers(kernel=Linformer(root(16 * length), 16)), 1.65
    ),
    "LSH": Subject(
        lambda length: Sublayers(kernel=LSH(ROUNDS, max(2, 2 * length // CHUNK))), 1.3, faster_from=8192
    ),
    "Routing": Subject(lambda length: Sublayers(kernel=Routing(root(length))), 1.65, faster_from=8192),
    "Performer": Subject(lambda length: Sublayers(kernel=Performer()), 1.15),
    "Performer, bidirectional": Subject(lambda length: Sublayers(kernel=Performer(), causal=False), 1.15),
    "RFA": Subject(lambda length: Sublayers(kernel=RFA()), 1.15),
    "RFA with a gate": Subject(lambda length: Sublayers(kernel=RFA(gate=True)), 1.15),
    "Strided": Subject(lambda length: Sublayers(pattern=Strided(root(length))), 1.65, layers=LAYERS),
    "FixedColumns": Subject(lambda length: Sublayers(pattern=FixedColumns(root(length), 4)), 1.65),
}
"""Subjects by name."""

SUBJECTS |= {
    f"package {name}": Subject(build, begins_with=least) for name, (build, least) in installed().items()
}
