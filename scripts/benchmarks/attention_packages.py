"""Attention layers of other packages for comparison, if they are installed; none is a dependency."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.attention_sizes import AROUND, BLOCK, CHUNK, HEADS, ROUNDS, SIZE, SUMMARIES, root


def packaged_linformer(length: int) -> nn.Module:
    """Return the attention of the package linformer; heads share the projections E and F."""
    from linformer import LinformerSelfAttention  # its only use

    attend: nn.Module = LinformerSelfAttention(HEADS * SIZE, length, SUMMARIES, HEADS)
    return attend


def packaged_reformer(length: int) -> nn.Module:
    """Return the attention of the package reformer-pytorch, with its definition of causality."""
    from reformer_pytorch import LSHSelfAttention  # its only use

    attend: nn.Module = LSHSelfAttention(
        HEADS * SIZE, heads=HEADS, bucket_size=CHUNK, n_hashes=ROUNDS, causal=True, full_attn_thres=0
    )
    return attend


def packaged_routing(length: int) -> nn.Module:
    """Return the attention of the package routing-transformer, with its definition of causality."""
    from routing_transformer.routing_transformer import SelfAttention  # its only use

    attention = SelfAttention(
        HEADS * SIZE, 1, length, HEADS, local_attn_heads=0, window_size=length // root(length), causal=True
    )
    return FirstOutput(attention)


class FirstOutput(nn.Module):
    """Module that returns the first output of another one."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        y: Tensor = self.module(x)[0]
        return y


def packaged_performer(length: int) -> nn.Module:
    """Return the attention of performer-pytorch, bidirectional: its causal form stores a matrix per token."""
    from performer_pytorch import SelfAttention  # its only use

    attend: nn.Module = SelfAttention(HEADS * SIZE, heads=HEADS, dim_head=SIZE)
    return attend


def packaged_local(length: int) -> nn.Module:
    """Return the attention of the package local-attention, causal, over the current and previous block."""
    from local_attention.transformer import LocalMHA  # its only use

    attend: nn.Module = LocalMHA(dim=HEADS * SIZE, window_size=BLOCK, dim_head=SIZE, heads=HEADS, causal=True)
    return attend


class HFLongformer(nn.Module):
    """Longformer attention of HF transformers, bidirectional; the first token is global."""

    def __init__(self, length: int):
        super().__init__()
        from transformers import LongformerConfig  # its only use
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        config = LongformerConfig(**hf_sizes(length), attention_window=[AROUND])
        self.attention, self.out = LongformerSelfAttention(config, 0), nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        global_mask = torch.zeros(x.shape[:2], device=x.device)
        global_mask[:, 0] = 1.0
        y = self.attention(
            x,
            global_mask,
            is_index_masked=global_mask < 0,
            is_index_global_attn=global_mask > 0,
            is_global_attn=True,
        )
        z: Tensor = self.out(y[0])
        return z


class HFBigBird(nn.Module):
    """BigBird attention of HF transformers, bidirectional; first and last block are global, 3 random."""

    def __init__(self, length: int):
        super().__init__()
        from transformers import BigBirdConfig  # its only use
        from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

        self.config = BigBirdConfig(**hf_sizes(length), block_size=BLOCK, num_random_blocks=3)
        self.attention, self.masks = BigBirdBlockSparseAttention(self.config, 0), BigBirdModel
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """x (1, L, C) -> (1, L, C)."""
        blocks, band, from_mask, to_mask = self.masks.create_masks_for_block_sparse_attn(
            torch.ones(x.shape[:2], device=x.device), BLOCK
        )
        y = self.attention(
            x,
            band_mask=band,
            from_mask=from_mask,
            to_mask=to_mask,
            from_blocked_mask=blocks,
            to_blocked_mask=blocks,
        )
        z: Tensor = self.out(y[0])
        return z


def hf_sizes(length: int) -> dict[str, Any]:
    """Return the common arguments of both HF configurations."""
    return {
        "hidden_size": HEADS * SIZE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": length,
    }


PACKAGES: dict[str, tuple[str, Callable[[int], nn.Module], int]] = {
    "linformer": ("linformer", packaged_linformer, 128),
    "performer_pytorch": ("performer_pytorch", packaged_performer, 128),
    "reformer_pytorch": ("reformer_pytorch", packaged_reformer, 128),
    "routing_transformer": ("routing_transformer", packaged_routing, 128),
    "local_attention": ("local_attention", packaged_local, 128),
    "transformers, Longformer": ("transformers", HFLongformer, AROUND),
    "transformers, BigBird": ("transformers", HFBigBird, 8 * BLOCK),
}
"""By name: required module, function that builds the attention, and minimum number of tokens."""


def installed() -> dict[str, tuple[Callable[[int], nn.Module], int]]:
    """Return builder and minimum number of tokens of each installed package."""
    return {name: (build, least) for name, (module, build, least) in PACKAGES.items() if find_spec(module)}
