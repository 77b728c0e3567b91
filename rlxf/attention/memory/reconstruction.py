"""Auxiliary losses of learned compression: reconstruction of the compressed tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from rlxf.attention.memory.compression import content_attention

Loss = Literal["attention-reconstruction", "auto-encoding"]
Measure = Literal["mean-square", "norm"]


class Content(Protocol):
    """Interface of a layer's content-based queries, keys and values, without position encoding."""

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        ...

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        ...


@dataclass(frozen=True, eq=False)
class Compressed:
    """Inputs of a reconstruction loss in one layer.

    Args:
        tokens: N blocks of c tokens, (B, N, c, C).
        summaries: compressed blocks, (B, N, C).
        asking: tokens of the segment, (B, T, C).
        seen: mask of the blocks that a token of the segment sees compressed, (B, T, N) bool.
        layer: layer that compresses the blocks.
    """

    tokens: Tensor
    summaries: Tensor
    asking: Tensor
    seen: Tensor
    layer: Content


class Reconstruction(nn.Module, ABC):
    """Base of the auxiliary losses of a learned compression.

    Args:
        width: features of a token C.
        ratio: compression ratio c.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.ratio = ratio

    @abstractmethod
    def forward(self, compressed: Compressed) -> Tensor:
        """Return the reconstruction errors (n, ...) of the visible compressed blocks; 0 is lossless."""


class AttentionReconstruction(Reconstruction):
    """Difference of content-based attention of the segment: ``attn(h, tokens) - attn(h, summaries)``."""

    def forward(self, compressed: Compressed) -> Tensor:
        """Return the errors (n, H, D) of the n queries that see a compressed block."""
        has_blocks = compressed.seen.any(-1)
        mask = compressed.seen | ~has_blocks[..., None]
        with torch.no_grad():
            q = compressed.layer.content_query(compressed.asking)
            original = compressed.layer.content(compressed.tokens.flatten(1, 2))
            target = content_attention(q, *original, mask.repeat_interleave(self.ratio, dim=-1))
        output = content_attention(q, *compressed.layer.content(compressed.summaries), mask)
        return (target - output).transpose(1, 2)[has_blocks]


class AutoEncoding(Reconstruction):
    """Auto-encoding error ``tokens - decode(summaries)``.

    ``decode`` is a transposed convolution with kernel size and stride c.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__(width, ratio)
        self.decoder = nn.ConvTranspose1d(width, width, ratio, stride=ratio)

    def forward(self, compressed: Compressed) -> Tensor:
        """Return the errors (n, c, C) of the n blocks that some query sees compressed."""
        visible = compressed.seen.any(1)
        return self.lost(compressed.tokens[visible], compressed.summaries[visible][:, None])

    def lost(self, tokens: Tensor, summaries: Tensor) -> Tensor:
        """Return tokens (N, L, C) minus their reconstruction from summaries (N, L / c, C)."""
        decoded: Tensor = self.decoder(summaries.transpose(1, 2))
        return tokens - decoded.transpose(1, 2)


LOSSES: dict[Loss, type[Reconstruction]] = {
    "attention-reconstruction": AttentionReconstruction,
    "auto-encoding": AutoEncoding,
}
"""Reconstruction losses by name."""

MEASURES: dict[Measure, Callable[[Tensor], Tensor]] = {
    "mean-square": lambda error: error.square().mean(),
    "norm": torch.linalg.vector_norm,
}
"""Functions that reduce reconstruction errors to a scalar, by name."""


def reaching_only(loss: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """Return a scalar loss of the same value whose gradient reaches only the given weights."""
    targets = list(weights)
    gradients = torch.autograd.grad(loss, targets, materialize_grads=True)
    value = loss.detach()
    for weight, gradient in zip(targets, gradients, strict=True):
        value = value + ((weight - weight.detach()) * gradient).sum()
    return value
