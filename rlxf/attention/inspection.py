"""Attention weights and gate activations of a transformer."""

from collections import defaultdict
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
    """Return the update gates of a segment in each pass. Arguments as in `attention_weights`.

    Returns:
        Name of each gate -> `Gate.update_gate` of the segment's tokens, (B, T, C), undefined at empty slots.
        The name is that of the module, such as ``blocks.0.attention_norm.residual``, with the number of the
        pass in place of that of its layer. A pass that no token takes, because all have halted, has zeros.
        Empty if no residual has an update gate.
    """
    calls = _gate_calls(transformer, x, index, state, context)
    activations: dict[str, Tensor] = {}
    for number, layer in enumerate(transformer.order):
        for name in (name for name in calls if name.startswith(f"blocks.{layer}.")):
            values = transformer.by_token(calls[name], index, state)
            taken = transformer.order[:number].count(layer)
            key = name.replace(str(layer), str(number), 1)
            activations[key] = values[taken] if taken < len(values) else torch.zeros_like(values[0])
    return activations


def _gate_calls(
    transformer: Transformer, x: Tensor, index: TokenIndex, state: State | None, context: Context | None
) -> dict[str, list[Tensor]]:
    """Return the update gate of each call of each gate, in order, by the name of its module."""
    names = {module: name for name, module in transformer.named_modules() if isinstance(module, Gate)}
    calls: dict[str, list[Tensor]] = defaultdict(list)

    def record(gate: Gate, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        if (activation := gate.update_gate(*inputs)) is not None:
            calls[names[gate]].append(activation)

    with ExitStack() as hooks:
        for gate in names:
            hooks.callback(gate.register_forward_hook(record).remove)
        transformer.encode(x, index, state, context)
    return calls
