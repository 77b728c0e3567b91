"""The passes of a segment through reversible layers, which are computed back for the gradient."""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from rlxf.attention.passes import SegmentPasses, unasked


@dataclass(eq=False)
class Sublayer:
    """A sublayer of a `Reversible` layer: it reads one half of the stream and is added to the other.

    Args:
        writes: the half that it is added to, 0 or 1.
        branch: what it makes of the other half, (B, T, C) -> (B, T, C).
        weights: what it reads beside that, and learns.
        signal: what is added to both halves before it, given one of them; None for nothing.
    """

    writes: int
    branch: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]
    signal: Callable[[Tensor], Tensor | None] = lambda half: None

    def forth(self, halves: list[Tensor]) -> None:
        """Add to a half, in place of it."""
        signal = self.signal(halves[0])
        if signal is not None:
            halves[:] = [half + signal for half in halves]
        halves[self.writes] = halves[self.writes] + self.branch(halves[1 - self.writes])

    def back(self, halves: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Undo `forth`, turn the gradients of what it gave into those of what it got; give the weights'."""
        read = halves[1 - self.writes].detach().requires_grad_()
        with torch.enable_grad():
            added = self.branch(read)
        halves[self.writes] = halves[self.writes] - added.detach()
        of_read, *of_weights = torch.autograd.grad(
            added, (read, *self.weights), gradients[self.writes], allow_unused=True
        )
        gradients[1 - self.writes] = gradients[1 - self.writes] + of_read
        signal = self.signal(halves[0])
        if signal is not None:
            halves[:] = [half - signal for half in halves]
        return tuple(of_weights)


@dataclass(eq=False, kw_only=True)
class ReversiblePasses(SegmentPasses):
    """`SegmentPasses` that keep what the last pass needs for its gradient, and of all others nothing.

    ``hidden`` is without gradient but for the last pass. The graph does not hold it.
    """

    def through(self, x: Tensor) -> Tensor:
        """See `Passes`."""
        last = self.count - 1
        if last:
            held = replace(self, hidden=unasked())  # by the graph, through the sublayers
            sublayers = [one for number in range(last) for one in held._sublayers(number)]
            weights = list(dict.fromkeys(weight for one in sublayers for weight in one.weights))
            x = _Through.apply(x, sublayers, self.hidden, *weights)  # type: ignore[no-untyped-call]
        return self.run(last, self.enter(last, x))

    def _sublayers(self, number: int) -> tuple[Sublayer, Sublayer]:
        block, relation = self.blocks[number], self.relations[number]
        order = [] if relation.position is None else _weights(relation.position)

        def look(half: Tensor) -> Tensor:
            # What is learned of positions is kept in a relation with its graph: each graph has its own.
            own = replace(relation) if order else relation
            memory = self.recall.tokens(number, half)
            return block.look(block.join_attention.read(half), memory, own)

        def consider(half: Tensor) -> Tensor:
            return block.consider(block.join_feed_forward.read(half))

        def signal(half: Tensor) -> Tensor | None:
            return self.embedding.signal(half, self.index.position, number)

        attention = _weights(block.join_attention, block.attention)
        feed_forward = _weights(block.join_feed_forward, block.feed_forward)
        return (
            Sublayer(0, look, [*attention, *order], signal),
            Sublayer(1, consider, feed_forward),
        )


def _weights(*modules: nn.Module) -> list[Tensor]:
    """What modules learn."""
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


class _Through(torch.autograd.Function):
    """Sublayers in order. Backward each is undone, with the same random numbers, before those under it.

    What those that write the first half read is added to ``hidden``.

    What is small and lasts, random states and gradients of weights, gets its room before what is large and
    passes. Else it would end up in gaps that this leaves, into which, on CPU, no later one would fit again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sublayers: list[Sublayer], hidden: MutableSequence[Tensor], *weights: Tensor
    ) -> Tensor:
        halves, ctx.states = list(x.chunk(2, dim=-1)), [RandomState.now(x) for _ in sublayers]
        for sublayer, state in zip(sublayers, ctx.states, strict=True):
            state.renew(x)
            sublayer.forth(halves)
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
        found, reached = {weight: torch.zeros_like(weight) for weight in ctx.weights}, set()
        now = RandomState.now(y)
        for sublayer, state in zip(reversed(ctx.sublayers), reversed(ctx.states), strict=True):
            state.set()
            for weight, part in zip(sublayer.weights, sublayer.back(halves, gradients), strict=True):
                if part is not None:
                    found[weight] += part
                    reached.add(weight)
        now.set()
        of_weights = (found[weight] if weight in reached else None for weight in ctx.weights)
        return torch.cat(gradients, dim=-1), None, None, *of_weights


@dataclass(frozen=True, eq=False)
class RandomState:
    """Where torch's global generators stand: the one on CPU, and those of other devices."""

    cpu: Tensor
    devices: list[int]
    others: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> "RandomState":
        """At present, for x's device."""
        return cls(torch.get_rng_state(), *get_device_states(x))

    def renew(self, x: Tensor) -> None:
        """Take down where they stand now, in place."""
        now = RandomState.now(x)
        for own, new in zip((self.cpu, *self.others), (now.cpu, *now.others), strict=True):
            own.copy_(new)

    def set(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.others)
