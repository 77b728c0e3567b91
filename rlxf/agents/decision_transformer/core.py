"""Transformer core of the Decision Transformer, its validation and its weight initialization."""

import torch
from torch import nn

from rlxf.attention import Add, Transformer, TransformerSpec
from rlxf.attention.residuals.base import Residual

STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""


def decision_transformer(
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 1,
    feed_forward: int | None = None,
    dropout: float = 0.1,
    residual: Residual | None = None,
) -> TransformerSpec:
    """Return the spec of a GPT-2 without positional encoding; tokens carry an embedding of their time step.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3 and appendix A; the sizes are those for
    OpenAI Gym.

    Args:
        width: number of features C of a token.
        layers: number of layers.
        heads: number of attention heads; must divide the width.
        feed_forward: hidden width of the feed-forward sublayer; None for four times the width.
        dropout: dropout probability of attention weights and features in training.
        residual: combination of a sublayer's output with its input; None for ``Add()``.
    """
    return TransformerSpec(
        width=width,
        layers=layers,
        heads=heads,
        feed_forward=feed_forward,
        residual=Add() if residual is None else residual,
        dropout=dropout,
    )


def resolve_core(core: TransformerSpec | None) -> TransformerSpec:
    """Return the given core, or `decision_transformer` if it is None.

    Raises:
        ValueError: if the core is not causal or has cross-attention.
    """
    if core is None:
        return decision_transformer()
    if not core.causal or core.cross_attention:
        raise ValueError(
            "a Decision Transformer is autoregressive: its core needs causal=True and "
            f"cross_attention=False, got causal={core.causal}, cross_attention={core.cross_attention}"
        )
    return core


def memory_steps(core: TransformerSpec) -> int:
    """Return the number of steps, of three tokens each, that fill the core's memory; 0 without memory."""
    return 0 if core.memory is None else -(-core.memory.holds // 3)


@torch.no_grad()
def init_gpt2_weights(module: nn.Module) -> None:
    """Initialize linear and embedding weights from ``N(0, 0.02^2)`` and biases with 0.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


@torch.no_grad()
def scale_residual_projections(transformer: Transformer) -> None:
    """Scale the output projections of the 2 L sublayers by ``1 / sqrt(2 L)``; source: `init_gpt2_weights`."""
    for name, part in transformer.named_modules():
        if name.endswith((".attention.out", ".feed_forward.outer")) and isinstance(part, nn.Linear):
            part.weight /= (2 * transformer.spec.layers) ** 0.5
