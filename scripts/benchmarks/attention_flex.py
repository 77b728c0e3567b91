"""Subjects of `bench.py attention` on a GPU only: flex_attention, and rlxf's attention with one mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.attention_sizes import AROUND, HEADS
from benchmarks.attention_subjects import Subject, SublayersWithKeptMasks, plain_attention
from rlxf.attention import BigBird, Blockwise, Longformer, Window
from rlxf.attention.patterns.base import BlockPattern, Pattern, repeat_for_heads

FLEX_BLOCK = 128
"""Block size of flex_attention's masks, in tokens: its default."""
WHOLE_LENGTH = 2**62
"""Tokens of the first pass: all, so that flex_attention is compiled for one length only."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Rule on batch, head, query and key, as numbers: whether the query may attend to the key."""
MakeRule = Callable[[int, torch.device], MaskMod]
"""Function of a length and a device that makes a rule."""


class FlexAttention(nn.Module):
    """Causal attention with flex_attention, which is compiled on a GPU.

    The block mask is made once for each length.

    Args:
        make_rule: function that makes the rule of the mask.
    """

    def __init__(self, make_rule: MakeRule):
        super().__init__()
        self.attention, self.make_rule = plain_attention(), make_rule
        self.block_masks: dict[int, BlockMask] = {}
        self.flex: Callable[..., Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        if self.flex is None:
            self.flex = compiled_flex_attention() if x.is_cuda else flex_attention
        q, k, v = self.attention.split(self.attention.qkv(x))
        y = self.flex(q, k, v, block_mask=self.block_mask(x))
        out: Tensor = self.attention.out(y.transpose(1, 2).flatten(2))
        return out

    def block_mask(self, x: Tensor) -> BlockMask:
        """Return the block mask for the length of x (1, L, C)."""
        length = x.shape[1]
        if length not in self.block_masks:
            rule = self.make_rule(length, x.device)
            self.block_masks[length] = create_block_mask(
                rule, None, HEADS, length, length, device=x.device, BLOCK_SIZE=FLEX_BLOCK
            )
        return self.block_masks[length]


def compiled_flex_attention() -> Callable[..., Any]:
    """Return flex_attention compiled for given lengths.

    Earlier compilations are discarded, because their number is limited for each function; with more, torch
    would compute all pairs.
    """
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def window_rule(pattern: Window) -> MakeRule:
    """Return the causal rule of a window."""
    distance = pattern.max_distance

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key <= distance)

    return lambda length, device: rule


def longformer_rule(pattern: Longformer) -> MakeRule:
    """Return the causal rule of a window and the first tokens, which later ones see at any distance."""
    window, first = pattern.window, pattern.global_tokens
    assert isinstance(window, int)
    assert isinstance(first, int)
    distance = window // 2

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & ((query - key <= distance) | (key < first))

    return lambda length, device: rule


def blockwise_rule(pattern: Blockwise) -> MakeRule:
    """Return the rule of cyclic shifts: in parts of n blocks, block a attends to block (a - h) mod n."""
    block, blocks = pattern.block, pattern.blocks

    def rule(_batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = query // block, key // block
        inside = of_query % blocks
        seen = of_query - inside + (inside - head + blocks) % blocks
        return (query >= key) & (of_key == seen)

    assert blocks >= HEADS
    return lambda length, device: rule


def table_rule(pattern: BlockPattern) -> MakeRule:
    """Return the causal rule of a pattern of blocks, which is read from a table for each head."""
    block = pattern.block

    def make(length: int, device: torch.device) -> MaskMod:
        table = block_table(pattern, length).to(device)

        def rule(_batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & table[head, query // block, key // block]

        return rule

    return make


def block_table(pattern: BlockPattern, length: int) -> Tensor:
    """Return whether blocks of queries attend to blocks of keys in each of H heads, (H, N, N) bool."""
    starts = torch.arange(0, length, pattern.block)
    rules = repeat_for_heads(pattern.for_heads(HEADS), HEADS)
    pairs = (rule.mask_mod(starts[:, None], starts) for rule in rules)
    return torch.stack([each.expand(len(starts), len(starts)) for each in pairs])


WINDOW, LONGFORMER, BLOCKWISE, BIGBIRD = Window(129), Longformer(AROUND), Blockwise(64), BigBird(32)
"""Patterns of the subjects with these names in `attention_subjects`."""
PATTERNS: dict[str, tuple[Pattern, MakeRule]] = {
    "Window": (WINDOW, window_rule(WINDOW)),
    "Longformer": (LONGFORMER, longformer_rule(LONGFORMER)),
    "Blockwise": (BLOCKWISE, blockwise_rule(BLOCKWISE)),
    "BigBird": (BIGBIRD, table_rule(BIGBIRD)),
}
"""By name: pattern, and its causal rule for flex_attention."""


def flex_subject(name: str) -> Subject:
    """Return flex_attention with one of `PATTERNS`."""
    return Subject(lambda length: FlexAttention(PATTERNS[name][1]), begins_with=WHOLE_LENGTH)


def kept_subject(name: str) -> Subject:
    """Return our attention with one of `PATTERNS`, whose mask is made once, as that of flex_attention."""
    return Subject(lambda length: SublayersWithKeptMasks(pattern=PATTERNS[name][0]), begins_with=WHOLE_LENGTH)


CUDA_SUBJECTS: dict[str, Subject] = {f"{name}, mask made once": kept_subject(name) for name in PATTERNS}
CUDA_SUBJECTS |= {f"flex_attention, {name}": flex_subject(name) for name in PATTERNS}
"""Subjects by name."""
