"""Compression functions of the Compressive Transformer and their auxiliary losses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from rlxf.attention.kernels.softmax import dot_product_attention

Method = Literal["mean", "max", "convolution", "dilated", "most-used"]

Usage = Callable[[Tensor], Tensor]
"""Function from tokens (N, L, C) of N blocks to the attention that each token receives, (N, L)."""


class BlockModule(nn.Module, ABC):
    """Base of the modules that read blocks of c tokens.

    Args:
        width: features of a token C.
        ratio: compression ratio c.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.ratio = ratio


class Compression(BlockModule):
    """Base of the functions that compress c tokens to one."""

    @abstractmethod
    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """Compress tokens (N, L, C), oldest first, L a multiple of c -> (N, L / c, C)."""


class Mean(Compression):
    """Mean pooling over c tokens."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        return tokens.unflatten(1, (-1, self.ratio)).mean(2)


class Max(Compression):
    """Max pooling over c tokens, per feature."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        return tokens.unflatten(1, (-1, self.ratio)).amax(2)


class Convolution(Compression):
    """Convolution over time with kernel size and stride c: ``sum_t W_t x_t + b``.

    W is initialized orthogonally, so that tokens of unit variance give outputs of unit variance.
    """

    dilation = 1

    def __init__(self, width: int, ratio: int):
        super().__init__(width, ratio)
        size = -(-ratio // self.dilation)
        self.convolution = nn.Conv1d(width, width, size, stride=ratio, dilation=self.dilation)
        nn.init.orthogonal_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        y: Tensor = self.convolution(tokens.transpose(1, 2))
        return y.transpose(1, 2)


class Dilated(Convolution):
    """Convolution with dilation 2: it reads every second token, from the first one.

    The paper does not specify the dilated convolution. The kernel size c / 2, rounded up, is our choice.
    """

    dilation = 2


class MostUsed(Compression):
    """Selection of the tokens that receive the most attention, a fraction 1 / c of them."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        return most_used(tokens, usage(tokens), tokens.shape[1] // self.ratio)


def most_used(tokens: Tensor, usage: Tensor, kept: int) -> Tensor:
    """Select the ``kept`` tokens of (N, L, C) with the largest usage (N, L), in temporal order."""
    chosen = usage.topk(kept, dim=1).indices.sort(dim=1).values
    return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[2]))


def content_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Compute ``softmax(q k / sqrt(D)) v``, content-based attention without position encoding.

    Args:
        q: queries, (B, H, Tq, D).
        k: keys, (B, H, Tk, D).
        v: values, (B, H, Tk, V).
        allowed: attention mask (B, Tq, Tk) bool with at least one key per query; None for no mask.
    """
    return dot_product_attention(q, k, v, None if allowed is None else allowed[:, None])


def attention_received(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean attention that each of L tokens receives: q, k (N, H, L, D) -> (N, L)."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights.mean(dim=(1, 2))


COMPRESSIONS: dict[Method, type[Compression]] = {
    "mean": Mean,
    "max": Max,
    "convolution": Convolution,
    "dilated": Dilated,
    "most-used": MostUsed,
}
"""Compression modules by name."""


Loss = Literal["attention-reconstruction", "auto-encoding"]
Measure = Literal["mean-square", "norm"]


class ContentLayer(Protocol):
    """Interface of a layer's content-based queries, keys and values, without position encoding."""

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        ...

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        ...


@dataclass(frozen=True, eq=False)
class ReconstructionInput:
    """Inputs of a reconstruction loss in one layer.

    Args:
        tokens: N blocks of c tokens, (B, N, c, C).
        summaries: compressed blocks, (B, N, C).
        queries: tokens of the segment, (B, T, C).
        visible: mask of the compressed blocks that a token of the segment attends to, (B, T, N) bool.
        layer: layer that compresses the blocks.
    """

    tokens: Tensor
    summaries: Tensor
    queries: Tensor
    visible: Tensor
    layer: ContentLayer


class Reconstruction(BlockModule):
    """Base of the auxiliary losses of a learned compression."""

    @abstractmethod
    def forward(self, compressed: ReconstructionInput) -> Tensor:
        """Return the reconstruction errors (n, ...) of the visible compressed blocks; 0 is lossless."""


class AttentionReconstruction(Reconstruction):
    """Difference of content-based attention of the segment: ``attn(h, tokens) - attn(h, summaries)``."""

    def forward(self, compressed: ReconstructionInput) -> Tensor:
        """Return the errors (n, H, D) of the n queries that attend to a compressed block."""
        has_blocks = compressed.visible.any(-1)
        mask = compressed.visible | ~has_blocks[..., None]
        with torch.no_grad():
            q = compressed.layer.content_query(compressed.queries)
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

    def forward(self, compressed: ReconstructionInput) -> Tensor:
        """Return the errors (n, c, C) of the n blocks that some query attends to in compressed form."""
        visible = compressed.visible.any(1)
        return self.errors(compressed.tokens[visible], compressed.summaries[visible][:, None])

    def errors(self, tokens: Tensor, summaries: Tensor) -> Tensor:
        """Return tokens (N, L, C) minus their reconstruction from summaries (N, L / c, C)."""
        decoded: Tensor = self.decoder(summaries.transpose(1, 2))
        return tokens - decoded.transpose(1, 2)


LOSSES: dict[Loss, type[Reconstruction]] = {
    "attention-reconstruction": AttentionReconstruction,
    "auto-encoding": AutoEncoding,
}
"""Reconstruction losses by name."""


def mean_square(error: Tensor) -> Tensor:
    """Return the mean of the squared errors, a scalar."""
    return error.square().mean()


MEASURES: dict[Measure, Callable[[Tensor], Tensor]] = {
    "mean-square": mean_square,
    "norm": torch.linalg.vector_norm,
}
"""Functions that reduce reconstruction errors to a scalar, by name."""


class LayerCompression(nn.Module):
    """Compression function of one layer, and its auxiliary loss if the function has parameters.

    Args:
        width: features of a token C.
        ratio: compression ratio c.
        method: compression function.
        loss: auxiliary loss.
        measure: size of a reconstruction error.
        loss_coef: coefficient of the auxiliary loss.
    """

    def __init__(
        self, width: int, ratio: int, method: Method, loss: Loss, measure: Measure, loss_coef: float
    ):
        super().__init__()
        self.measure = MEASURES[measure]
        self.loss_coef = loss_coef
        self.compression = COMPRESSIONS[method](width, ratio)
        learns = any(True for _ in self.compression.parameters())
        self.reconstruction = LOSSES[loss](width, ratio) if learns else None

    def forward(self, tokens: Tensor, layer: ContentLayer) -> Tensor:
        """Compress blocks of tokens (B, N, c, C) of a layer: (B, N, C)."""

        def usage(x: Tensor) -> Tensor:
            return attention_received(layer.content_query(x), layer.content(x)[0])

        y: Tensor = self.compression(tokens.flatten(0, 1), usage)
        return y[:, 0].unflatten(0, tokens.shape[:2])

    def penalty(self, compressed: ReconstructionInput) -> Tensor | None:
        """Return the auxiliary loss of one pass, whose gradient reaches only this module.

        None if the method has no parameters, 0 if no query attends to a compressed block: all ranks of a
        process group must compute the same terms of the loss.
        """
        if self.reconstruction is None:
            return None
        if not bool(compressed.visible.any()):
            return compressed.summaries.new_zeros(())
        loss = self.measure(self.reconstruction(compressed))
        return restrict_gradient(self.loss_coef * loss, self.parameters())


def restrict_gradient(loss: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """Return a scalar loss of the same value whose gradient reaches only the given weights.

    It has no gradient if all of them are frozen.
    """
    targets = [weight for weight in weights if weight.requires_grad]
    if not loss.requires_grad or not targets:
        return loss.detach()
    gradients = torch.autograd.grad(loss, targets, materialize_grads=True)
    value = loss.detach()
    for weight, gradient in zip(targets, gradients, strict=True):
        value = value + ((weight - weight.detach()) * gradient).sum()
    return value
