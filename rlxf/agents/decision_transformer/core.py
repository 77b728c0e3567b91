"""The core that a Decision Transformer is, and what the agent asks of any core."""

import torch
from torch import nn

from rlxf.attention import Add, Transformer, TransformerSpec
from rlxf.attention.residuals.base import Residual

STD = 0.02
"""Of the weights at the start, as in GPT-2."""


def decision_transformer(
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 1,
    feed_forward: int | None = None,
    dropout: float = 0.1,
    residual: Residual | None = None,
) -> TransformerSpec:
    """GPT-2 without positions: order enters through the time step that each token carries.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3 and appendix A; the sizes are those for
    OpenAI Gym.

    Args:
        width: features of a token C.
        layers: number of layers.
        heads: attention heads; must divide the width.
        feed_forward: features inside the feed-forward sublayer; None for four times the width.
        dropout: probability of dropping an attention weight or a feature in training.
        residual: how a sublayer's output joins the stream; None for ``Add()``.
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
    """The core to build: the given one if it can act, else `decision_transformer`.

    Raises:
        ValueError: if the core looks ahead, or at another context.
    """
    if core is None:
        return decision_transformer()
    if not core.causal or core.cross_attention:
        raise ValueError(
            "a Decision Transformer acts from what was before: its core needs causal=True and "
            f"cross_attention=False, got causal={core.causal}, cross_attention={core.cross_attention}"
        )
    return core


def remembered_steps(core: TransformerSpec) -> int:
    """Steps of three tokens that fill the core's memory; 0 without memory."""
    return 0 if core.memory is None else -(-core.memory.holds // 3)


@torch.no_grad()
def start_as_gpt2(module: nn.Module) -> None:
    """Linear and embedding weights from ``N(0, 0.02^2)``, biases 0.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


@torch.no_grad()
def shrink_branches(transformer: Transformer) -> None:
    """Divide what each of the 2 L sublayers adds to the stream by ``sqrt(2 L)``; source as above."""
    for name, part in transformer.named_modules():
        if name.endswith((".attention.out", ".feed_forward.outer")) and isinstance(part, nn.Linear):
            part.weight /= (2 * transformer.spec.layers) ** 0.5
