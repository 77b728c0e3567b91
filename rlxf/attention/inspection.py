"""Attention weights and gate activations of a transformer."""

from contextlib import ExitStack

import torch
from torch import Tensor

from rlxf.attention.cache import Context
from rlxf.attention.memory.base import State
from rlxf.attention.residuals.base import Gate
from rlxf.attention.token_index import TokenIndex
from rlxf.attention.transformer import Transformer


@torch.no_grad()
def attention_weights(
    transformer: Transformer,
    x: Tensor,
    index: TokenIndex,
    state: State | None = None,
    context: Context | None = None,
) -> list[Tensor]:
    """Return the self-attention weights of a segment. Arguments are those of `Transformer.forward`.

    Args:
        transformer: the model; in training mode the weights include dropout.
        x: tokens, (B, T, C).
        index: their positions and episodes, (B, T).
        state: memory of the M tokens before the segment; None for no memory.
        context: encoder output for cross-attention; None without it.

    Returns:
        One tensor (B, H, T, M + T) per pass with attention, in order. Row i holds the weights of query i over
        the tokens of memory and segment, 0 where masked. A row sums to 1, with softmax1 to at
        most 1, with `Differential` to about 1 - lambda, and to 0 for a token without visible keys. The sum is
        below 1 where the denominator of `RFA` is within its noise. The sum is arbitrary where the projection
        over tokens is learned, as in `Linformer`. The weight of a compressed memory slot is divided evenly
        among its tokens. Global tokens added by the pattern come first among the keys. Weights of memory
        tokens, and of attention sinks before the state, are left out.
    """
    return [layer[:, :, -index.shape[1] :] for layer in transformer.weights(x, index, state, context)]


@torch.no_grad()
def gate_activations(
    transformer: Transformer,
    x: Tensor,
    index: TokenIndex,
    state: State | None = None,
    context: Context | None = None,
) -> dict[str, Tensor]:
    """Return the update gate of every gated residual for a segment. Arguments as in `attention_weights`.

    Returns:
        Module name of each gate -> `Gate.update_gate`, (B, T, C); empty if no residual has an update gate.
    """
    names = {module: name for name, module in transformer.named_modules() if isinstance(module, Gate)}
    activations = {}

    def record(gate: Gate, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        if (activation := gate.update_gate(*inputs)) is not None:
            activations[names[gate]] = activation

    with ExitStack() as hooks:
        for gate in names:
            hooks.callback(gate.register_forward_hook(record).remove)
        transformer.encode(x, index, state, context)
    return activations
