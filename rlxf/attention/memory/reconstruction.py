"""What a learned compression learns from: how well the tokens can be told from what is left of them."""

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
    """A layer's queries, keys and values by content alone."""

    def content_query(self, x: Tensor) -> Tensor:
        """Queries of tokens x (B, T, C), (B, H, T, D), before positions change them."""
        ...

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens x (B, T, C), (B, H, T, D) each, before positions change them."""
        ...


@dataclass(frozen=True, eq=False)
class Compressed:
    """What was compressed in one layer, and who sees it.

    Args:
        tokens: N blocks of c tokens, (B, N, c, C).
        summaries: what was made of them, (B, N, C).
        asking: the tokens of the segment, (B, T, C).
        seen: which blocks a token of the segment sees compressed, (B, T, N) bool.
        layer: the layer.
    """

    tokens: Tensor
    summaries: Tensor
    asking: Tensor
    seen: Tensor
    layer: Content


class Reconstruction(nn.Module, ABC):
    """A loss of a learned compression.

    Args:
        width: features of a token C.
        ratio: tokens c that are made into one.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.ratio = ratio

    @abstractmethod
    def forward(self, compressed: Compressed) -> Tensor:
        """What cannot be told, (n, ...), of all that somebody sees: nothing is lost where it is 0."""


class AttentionReconstruction(Reconstruction):
    """``attn(h, tokens) - attn(h, summaries)``: what the segment's queries find in either, by content."""

    def forward(self, compressed: Compressed) -> Tensor:
        """See `Reconstruction`: (n, H, D), of the n queries that see something compressed."""
        asking = compressed.seen.any(-1)
        seen = compressed.seen | ~asking[..., None]
        with torch.no_grad():
            q = compressed.layer.content_query(compressed.asking)
            old = compressed.layer.content(compressed.tokens.flatten(1, 2))
            wanted = content_attention(q, *old, seen.repeat_interleave(self.ratio, dim=-1))
        found = content_attention(q, *compressed.layer.content(compressed.summaries), seen)
        return (wanted - found).transpose(1, 2)[asking]


class AutoEncoding(Reconstruction):
    """``tokens - decode(summaries)``: ``decode`` is a transposed convolution, kernel and stride c."""

    def __init__(self, width: int, ratio: int):
        super().__init__(width, ratio)
        self.decoder = nn.ConvTranspose1d(width, width, ratio, stride=ratio)

    def forward(self, compressed: Compressed) -> Tensor:
        """See `Reconstruction`: (n, c, C), of the n blocks that somebody sees compressed."""
        seen = compressed.seen.any(1)
        return self.lost(compressed.tokens[seen], compressed.summaries[seen][:, None])

    def lost(self, tokens: Tensor, summaries: Tensor) -> Tensor:
        """Tokens (N, L, C) less what is told of them by summaries (N, L / c, C)."""
        told: Tensor = self.decoder(summaries.transpose(1, 2))
        return tokens - told.transpose(1, 2)


LOSSES: dict[Loss, type[Reconstruction]] = {
    "attention-reconstruction": AttentionReconstruction,
    "auto-encoding": AutoEncoding,
}
"""By name."""

MEASURES: dict[Measure, Callable[[Tensor], Tensor]] = {
    "mean-square": lambda lost: lost.square().mean(),
    "norm": torch.linalg.vector_norm,
}
"""How large what is lost is, by name."""


def reaching_only(loss: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """The same number, a scalar, whose gradient reaches these weights and nothing else."""
    chosen = list(weights)
    gradients = torch.autograd.grad(loss, chosen, materialize_grads=True)
    value = loss.detach()
    for weight, gradient in zip(chosen, gradients, strict=True):
        value = value + ((weight - weight.detach()) * gradient).sum()
    return value
