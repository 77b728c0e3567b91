"""What a transformer does inside, for people to look at. A pass that nobody looks at does none of this."""

from contextlib import ExitStack

import torch
from torch import Tensor

from rlxf.attention.context import Context
from rlxf.attention.index import Index
from rlxf.attention.memory.state import State
from rlxf.attention.residuals.gru import GRU
from rlxf.attention.transformer import Transformer


@torch.no_grad()
def attention_weights(
    transformer: Transformer,
    x: Tensor,
    index: Index,
    state: State | None = None,
    context: Context | None = None,
) -> list[Tensor]:
    """The weights of self-attention in a segment pass; the arguments are those of `Transformer`.

    Args:
        transformer: in training mode its dropout is seen too.
        x: tokens, (B, T, C).
        index: where they stand, (B, T).
        state: what is remembered from before, M tokens; None for nothing.
        context: what a decoder looks at beside its own tokens.

    Returns:
        (B, H, T, M + T) for each pass, in order: row i is what token i takes of each
        token of memory and segment, 0 where it may not look. Rows add up to 1, with softmax1 to at
        most 1, and to 0 for a token that attends to nothing. The sum is below 1 where the denominator
        of an `RFA` is within its noise. It can be any number where the projection of tokens is learned, as in
        `Linformer`. The weight of a compressed memory slot is divided evenly among its tokens. Extra
        tokens of the pattern come first among the keys.
    """
    _, hidden = transformer.encode(x, index, state, context)
    _, whole, _ = transformer.enter(x, index)
    recall = transformer.recall(state, whole)
    relations = recall.related(transformer.relations(whole, recall.key))
    weights = [
        recall.by_token(n, transformer.blocks[layer].weights(h, recall.tokens(n, h), relations[n]))
        for n, (layer, h) in enumerate(zip(transformer.order, hidden, strict=True))
    ]
    return [layer[:, :, -index.shape[1] :] for layer in weights]


@torch.no_grad()
def gate_openness(
    transformer: Transformer,
    x: Tensor,
    index: Index,
    state: State | None = None,
    context: Context | None = None,
) -> dict[str, Tensor]:
    """z of every GRU gate in a segment pass; the arguments are those of `attention_weights`.

    Returns:
        (B, T, C) by the name of the gate's module; nothing where residuals are no GRU gates.
    """
    gates = {module: name for name, module in transformer.named_modules() if isinstance(module, GRU)}
    openness = {}

    def note(gate: GRU, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        openness[gates[gate]] = gate.openness(*inputs)

    with ExitStack() as hooks:
        for gate in gates:
            hooks.callback(gate.register_forward_hook(note).remove)
        transformer.encode(x, index, state, context)
    return openness
