"""Helpers that run a transformer segment by segment (learning) and token by token (acting)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlxf.attention import Full, KVCache, Softmax, State, TokenIndex, Transformer
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.layers import Layer
from rlxf.attention.positions.base import Position
from rlxf.attention.technique import LayerPasses
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import close, fill
from tests.attention.worlds import Segment


def learn(model: Transformer, world: Segment, lengths: Sequence[int]) -> tuple[Tensor, State | None]:
    """Return all outputs (B, T, C), computed segment by segment, and the last state."""
    outputs, state = [], None
    for segment in world.cut(lengths):
        y, state = model(segment.x, segment.index, state, segment.context)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def act(model: Transformer, world: Segment, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Return outputs (B, T, C) and inputs of the layers (L, B, T, C), computed token by token."""
    steps = []
    for t in range(world.length):
        here = TokenIndex(world.index.position[:, t : t + 1], world.index.episode[:, t : t + 1])
        steps.append(model.step(world.x[:, t], here, cache))
    y, hidden = zip(*steps, strict=True)
    return torch.stack(y, dim=1), torch.stack(hidden, dim=2)


def assert_attention_equals(
    model: Transformer, run: Segment, slow_attention: Callable[[Layer, Tensor, TokenIndex, int], Tensor]
) -> None:
    """Compare the attention outputs of the first layer with a reference, token by token.

    Args:
        model: the model.
        run: segment that is its input, without memory.
        slow_attention: returns the output (C,) for a layer, tokens (T, C), their index (1, T) and a slot.
    """
    block, outputs = model.blocks[0], []
    hook = block.attention.register_forward_hook(lambda module, inputs, y: outputs.append(y))
    model.encode(run.x, run.index)
    hook.remove()
    for b, t in (run.index.episode != EMPTY).nonzero().tolist():
        row = run.index.rows(torch.tensor([b]))
        close(outputs[0][b, t], slow_attention(block, run.x[b], row, t))


def assert_close_for_dtype(actual: Tensor, expected: Tensor) -> None:
    """Assert that tensors agree: to 1e-5 in float32, to 1e-10 in float64.

    The tolerance is relative to the largest number, because small numbers may be differences of large ones.
    """
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}[expected.dtype]
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, largest))


def over_heads(q: Tensor, position: Position) -> Attention:
    """Create attention for projected q (B, H, T, D) whose output is the concatenation of its heads."""
    heads, size = q.shape[1], q.shape[3]
    module = Attention(AttentionArguments(heads * size, heads, position, Softmax())).to(q.dtype)
    fill(module.out, torch.eye(heads * size, dtype=q.dtype))
    return module


def after_memory(q: Tensor, k: Tensor) -> AttentionMask:
    """Return the causal mask of queries q (B, H, T, D) over keys k (B, H, M + T, D) of one episode."""
    key = TokenIndex.range(k.shape[0], k.shape[2])
    return AttentionMask(key.last(q.shape[2]), key, Full(), True, q.dtype)


def attend(
    module: Attention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None = None
) -> Tensor:
    """Return the outputs (B, Tq, C) of attention without a gate: q (B, H, Tq, D), k and v (B, H, Tk, D)."""
    return module._merge_heads(module.average(q, k, v, mask, table), q, mask)


class BackwardsMixin:
    """Residual that runs the layers in reverse order."""

    def run_passes(self, passes: LayerPasses, x: Tensor) -> Tensor:
        for number in reversed(range(passes.count)):
            x = passes.run(number, passes.start_pass(number, x))
        return x
