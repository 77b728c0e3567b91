"""Segment passes through reversible layers, whose activations are recomputed in backward."""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from rlxf.attention.layer_stack import SegmentStack, discarded_inputs


@dataclass(eq=False)
class Sublayer:
    """Sublayer of a `Reversible` layer: it reads one half of the stream and adds to the other.

    Args:
        writes: half that the output is added to, 0 or 1.
        branch: function of the other half, (B, T, C) -> (B, T, C).
        weights: trainable parameters that the branch uses.
        signal: position signal that is added to both halves before the sublayer, given one half; None for
            none.
    """

    writes: int
    branch: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]
    signal: Callable[[Tensor], Tensor | None] = lambda half: None

    def forward(self, halves: list[Tensor]) -> None:
        """Apply the sublayer: replace the half that it writes."""
        signal = self.signal(halves[0])
        if signal is not None:
            halves[:] = [half + signal for half in halves]
        halves[self.writes] = halves[self.writes] + self.branch(halves[1 - self.writes])

    def invert(self, halves: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Invert `forward` in place and backpropagate through it.

        Args:
            halves: outputs of the sublayer; replaced by its inputs.
            gradients: gradients of the outputs; replaced by those of the inputs.

        Returns:
            The gradients of ``weights``; None for a weight that the branch did not use.
        """
        source = halves[1 - self.writes].detach().requires_grad_()
        with torch.enable_grad():
            output = self.branch(source)
        halves[self.writes] = halves[self.writes] - output.detach()
        source_gradient, *weight_gradients = torch.autograd.grad(
            output, (source, *self.weights), gradients[self.writes], allow_unused=True
        )
        gradients[1 - self.writes] = gradients[1 - self.writes] + source_gradient
        signal = self.signal(halves[0])
        if signal is not None:
            halves[:] = [half - signal for half in halves]
        return tuple(weight_gradients)


@dataclass(eq=False, kw_only=True)
class ReversibleStack(SegmentStack):
    """`SegmentStack` that stores activations for the backward pass in the last pass only.

    ``hidden`` has a gradient in the last pass only, and the autograd graph does not reference it.
    """

    def run_all(self, x: Tensor) -> Tensor:
        """See `LayerPasses`."""
        last = self.count - 1
        if last:
            # The graph keeps the sublayers alive; this copy keeps it from holding `hidden`, too.
            passes = replace(self, hidden=discarded_inputs())
            sublayers = [sublayer for number in range(last) for sublayer in passes._sublayers(number)]
            weights = list(dict.fromkeys(weight for sublayer in sublayers for weight in sublayer.weights))
            x = _Through.apply(x, sublayers, self.hidden, *weights)  # type: ignore[no-untyped-call]
        return self.run(last, self.start_pass(last, x))

    def _sublayers(self, number: int) -> tuple[Sublayer, Sublayer]:
        block, relation = self.blocks[number], self.masks[number]
        position = [] if relation.position is None else _weights(relation.position)

        def attend(half: Tensor) -> Tensor:
            # A relation caches learned position tables with their graph, so each graph needs its own copy.
            own_relation = replace(relation) if position else relation
            memory = self.recall.tokens(number, half)
            return block.attention_branch(block.attention_norm.normalize(half), memory, own_relation)

        def feed(half: Tensor) -> Tensor:
            return block.feed_branch(block.feed_forward_norm.normalize(half))

        def signal(half: Tensor) -> Tensor | None:
            return self.embedding.signal(half, self.index.position, number)

        attention = _weights(block.attention_norm, block.attention)
        feed_forward = _weights(block.feed_forward_norm, block.feed_forward)
        return (
            Sublayer(0, attend, [*attention, *position], signal),
            Sublayer(1, feed, feed_forward),
        )


def _weights(*modules: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of modules."""
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


class _Through(torch.autograd.Function):
    """Autograd function that applies sublayers in order. Backward inverts them in reverse order.

    Backward restores the random state of each sublayer, so dropout is the same. The inputs of sublayers that
    write the first half, which are the inputs of the layers, are appended to ``hidden``.

    Small long-lived tensors (random states, gradients of weights) are allocated before large temporary ones.
    Otherwise they would fragment the CPU heap, and later large tensors would not fit into the gaps.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sublayers: list[Sublayer], hidden: MutableSequence[Tensor], *weights: Tensor
    ) -> Tensor:
        halves, ctx.states = list(x.chunk(2, dim=-1)), [RandomState.now(x) for _ in sublayers]
        for sublayer, state in zip(sublayers, ctx.states, strict=True):
            state.renew(x)
            sublayer.forward(halves)
            if sublayer.writes == 0:
                hidden.append(halves[1])
        ctx.sublayers, ctx.weights = sublayers, weights
        y = torch.cat(halves, dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        halves, gradients = list(y.chunk(2, dim=-1)), list(gradient.chunk(2, dim=-1))
        totals, used = {weight: torch.zeros_like(weight) for weight in ctx.weights}, set()
        current = RandomState.now(y)
        for sublayer, state in zip(reversed(ctx.sublayers), reversed(ctx.states), strict=True):
            state.set()
            for weight, part in zip(sublayer.weights, sublayer.invert(halves, gradients), strict=True):
                if part is not None:
                    totals[weight] += part
                    used.add(weight)
        current.set()
        weight_gradients = (totals[weight] if weight in used else None for weight in ctx.weights)
        return torch.cat(gradients, dim=-1), None, None, *weight_gradients


@dataclass(frozen=True, eq=False)
class RandomState:
    """State of torch's global random generators on CPU and on other devices."""

    cpu: Tensor
    devices: list[int]
    others: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> "RandomState":
        """Return the current state for CPU and the device of x."""
        return cls(torch.get_rng_state(), *get_device_states(x))

    def renew(self, x: Tensor) -> None:
        """Overwrite this state with the current one, in place."""
        current = RandomState.now(x)
        for own, new in zip((self.cpu, *self.others), (current.cpu, *current.others), strict=True):
            own.copy_(new)

    def set(self) -> None:
        """Restore this state in torch's generators."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.others)
