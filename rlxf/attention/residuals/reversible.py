"""Reversible layers: the inputs of a layer are recomputed from its outputs."""

from collections.abc import Callable, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from rlxf.attention.autograd import first_derivative_only
from rlxf.attention.layer_stack import SegmentStack, discarded_inputs
from rlxf.attention.linear import keep_matmul_dtype
from rlxf.attention.norm import NormType, PreNorm
from rlxf.attention.residuals.base import Residual, Sum
from rlxf.attention.technique import LayerPasses, SpecView
from rlxf.utils.errors import CompilationError


@dataclass(frozen=True)
class Reversible(Residual):
    """``y_1 = x_1 + Attention(x_2)``, ``y_2 = x_2 + FeedForward(y_1)``: two streams, updated in turn.

    Both streams start as the token x, and their mean is the output. The backward pass recomputes
    ``x_2 = y_2 - FeedForward(y_1)`` and ``x_1 = y_1 - Attention(x_2)``, so only the last layer stores
    activations for its gradient. Activation memory thus does not grow with the number of layers, for a third
    more computation. Weights, their gradients and a memory state still grow with it. Dropout is the same in
    both directions. Attention, memories and caches read x_2.

    Calls that return inputs of layers (`Transformer.encode`), or the state after a segment, keep the inputs
    of all layers without gradient. A learned memory keeps them until its penalty is computed. The depths
    `ACT`, `CALM` and `DepthAdaptive`, which evaluate each pass, store activations as usual.

    Source: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3.
    """

    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    cost: ClassVar[str] = "L, a third more in training"

    def check_capture(self, choices: SpecView) -> None:
        """Raise CompilationError if dropout has to be repeated in the backward pass."""
        if choices.dropout:
            raise CompilationError("the backward pass restores the random state of the forward pass")

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless inputs of layers can be recomputed from their outputs."""
        if choices.norm == "post":
            raise ValueError(f"{self} cannot invert a norm after the residual connection; use norm='pre'")
        if choices.cross_attention:
            raise ValueError(
                f"{self} recomputes inputs of layers from their outputs and does not support "
                f"cross_attention=True; choose another residual"
            )
        if choices.recurrence is not None:
            raise ValueError(
                f"{self} runs layers twice, and each run of {choices.recurrence} would advance its state; "
                f"choose another residual, e.g. Add()"
            )
        kernel = choices.kernel
        if (option := kernel.token_loss_option) is not None:
            raise ValueError(
                f"{self} runs layers twice, and the auxiliary loss of {kernel} depends on tokens; set its "
                f"{option} to 0, or choose another residual or kernel"
            )

    def build(self, width: int, heads: int) -> Sum:
        """Return the sum of one stream and the sublayer output of the other."""
        return Sum()

    def build_norms(self, spec: SpecView) -> tuple[PreNorm, PreNorm]:
        """Return the norms: attention reads x_2, the feed-forward sublayer y_1."""
        attention, feed_forward = (
            ReversibleNorm(spec.width, Sum(), reads, spec.norm_type) for reads in (1, 0)
        )
        return attention, feed_forward

    def run_passes(self, passes: LayerPasses, x: Tensor) -> Tensor:
        """Run all passes. With gradient, activations for backward are stored in the last pass only.

        Inputs of earlier passes that `LayerPasses` records then have no gradient, and the autograd graph does
        not reference them.
        """
        if not torch.is_grad_enabled():
            return super().run_passes(passes, x)
        return run_reversibly(cast(SegmentStack, passes), x)  # single steps have no gradient

    def init_stream(self, x: Tensor) -> Tensor:
        """Concatenate both streams: (..., 2 C)."""
        return torch.cat([x, x], dim=-1)

    def attention_input(self, stream: Tensor) -> Tensor:
        """Return x_2."""
        return stream.chunk(2, dim=-1)[1]

    def output(self, stream: Tensor) -> Tensor:
        """Return the mean of both streams."""
        return stream.unflatten(-1, (2, -1)).mean(dim=-2)


class ReversibleNorm(PreNorm):
    """Pre-norm of `Reversible` layers: it reads one of the two streams and updates the other.

    Args:
        width: features of a token C.
        residual: see `PreNorm`.
        reads: index of the stream that the sublayer reads, 0 or 1.
        norm_type: see `PreNorm`.
    """

    def __init__(self, width: int, residual: nn.Module, reads: int, norm_type: NormType = "layer_norm"):
        super().__init__(width, residual, norm_type)
        self.reads = reads

    def branch_input(self, x: Tensor) -> Tensor:
        """Compute the input of the sublayer from the two streams: (B, T, 2 C) -> (B, T, C)."""
        return self.normalize(x.chunk(2, dim=-1)[self.reads])

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine y (B, T, C) with the stream of x (B, T, 2 C) that the sublayer does not read."""
        halves = list(x.chunk(2, dim=-1))
        halves[1 - self.reads] = super().combine(halves[1 - self.reads], y)
        return torch.cat(halves, dim=-1)


@dataclass(eq=False)
class Sublayer:
    """Sublayer of a `Reversible` layer: it reads one half of the stream and adds to the other.

    Args:
        writes: half that the output is added to, 0 or 1.
        branch: function of the other half, (B, T, C) -> (B, T, C).
        weights: trainable parameters that the branch and the signal use.
        signal: position signal that is added to both halves before the sublayer. Its argument is a half, of
            which it uses the shape, dtype and device; None for no signal.
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
            The gradients of ``weights``; None for a weight that was not used.
        """
        source = halves[1 - self.writes].detach().requires_grad_()
        with torch.enable_grad():
            output = self.branch(source)
        halves[self.writes] = halves[self.writes] - output.detach()
        source_gradient, *weight_gradients = torch.autograd.grad(
            output, (source, *self.weights), gradients[self.writes], allow_unused=True
        )
        gradients[1 - self.writes] = gradients[1 - self.writes] + source_gradient
        signal_gradients = self._invert_signal(halves, gradients[0] + gradients[1])
        return tuple(map(_sum_of_gradients, weight_gradients, signal_gradients))

    def _invert_signal(self, halves: list[Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Subtract the signal from the halves, and return its gradients for ``weights``."""
        with torch.enable_grad():
            signal = self.signal(halves[0])
        unused = (None,) * len(self.weights)
        if signal is None:
            return unused
        halves[:] = [half - signal.detach() for half in halves]
        if not signal.requires_grad:
            return unused
        return torch.autograd.grad(signal, tuple(self.weights), gradient, allow_unused=True)


def _sum_of_gradients(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of the gradients of a weight, of which None is zero."""
    return second if first is None else first if second is None else first + second


def run_reversibly(passes: SegmentStack, x: Tensor) -> Tensor:
    """Run all passes on the streams x (B, T, 2 C); backward recomputes the inputs of all but the last."""
    last = passes.count - 1
    if last:
        # The graph keeps the sublayers alive; this copy keeps it from holding `hidden`, too.
        unrecorded = replace(passes, hidden=discarded_inputs())
        sublayers = [sublayer for number in range(last) for sublayer in _sublayers(unrecorded, number)]
        weights = list(dict.fromkeys(weight for sublayer in sublayers for weight in sublayer.weights))
        x = _ReversibleFunction.apply(x, sublayers, passes.hidden, *weights)  # type: ignore[no-untyped-call]
    return passes.run(last, passes.start_pass(last, x))


def _sublayers(passes: SegmentStack, pass_index: int) -> tuple[Sublayer, Sublayer]:
    """Return the attention and the feed-forward sublayer of a pass."""
    block: Any = passes.blocks[pass_index]  # with attention: `Reversible.check` excludes recurrences
    mask = passes.masks[pass_index]
    position = _weights(passes.embedding)

    def attend(half: Tensor) -> Tensor:
        # A mask caches learned position tables with their graph, so each graph needs its own copy.
        own_mask = mask if mask.position is None else replace(mask)
        memory = passes.view.tokens(pass_index, half)
        return block.attention_branch(block.attention_norm.normalize(half), memory, own_mask)

    def transform(half: Tensor) -> Tensor:
        return block.feed_forward_branch(block.feed_forward_norm.normalize(half))

    def signal(half: Tensor) -> Tensor | None:
        return passes.embedding.pass_embedding(half, passes.position, pass_index)

    attend, transform = keep_matmul_dtype(attend), keep_matmul_dtype(transform)
    attention = _weights(block.attention_norm, block.attention)
    feed_forward = _weights(block.feed_forward_norm, block.feed_forward)
    return Sublayer(0, attend, [*attention, *position], signal), Sublayer(1, transform, feed_forward)


def _weights(*modules: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of modules."""
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


def current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that creates a context with the present settings of ``torch.autocast``."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype, enabled)


class _ReversibleFunction(torch.autograd.Function):
    """Autograd function that applies sublayers in order. Backward inverts them in reverse order.

    Backward restores ``torch.autocast`` and the random state of each sublayer, so dropout is the same. The
    inputs of sublayers that write the first half, which are the inputs of the layers, are appended to
    ``hidden``.

    Small long-lived tensors (random states, gradients of weights) are allocated before large temporary ones.
    Otherwise they would fragment the CPU heap, and later large tensors would not fit into the gaps.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sublayers: list[Sublayer], hidden: MutableSequence[Tensor], *weights: Tensor
    ) -> Tensor:
        halves = list(x.chunk(2, dim=-1))
        ctx.states = [RandomState.current(x) for _ in sublayers]
        for sublayer, state in zip(sublayers, ctx.states, strict=True):
            state.update(x)
            sublayer.forward(halves)
            if sublayer.writes == 0:
                hidden.append(halves[1])
        ctx.sublayers, ctx.weights, ctx.autocast = sublayers, weights, current_autocast(x.device.type)
        y = torch.cat(halves, dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_derivative_only("Reversible")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        halves, gradients = list(y.chunk(2, dim=-1)), list(gradient.chunk(2, dim=-1))
        totals = {weight: torch.zeros_like(weight) for weight in ctx.weights}
        used = set()
        current = RandomState.current(y)
        for sublayer, state in zip(reversed(ctx.sublayers), reversed(ctx.states), strict=True):
            state.restore()
            with ctx.autocast():
                parts = sublayer.invert(halves, gradients)
            for weight, part in zip(sublayer.weights, parts, strict=True):
                if part is not None:
                    totals[weight] += part
                    used.add(weight)
        current.restore()
        weight_gradients = (totals[weight] if weight in used else None for weight in ctx.weights)
        return torch.cat(gradients, dim=-1), None, None, *weight_gradients


@dataclass(frozen=True, eq=False)
class RandomState:
    """State of torch's global random generators on CPU and on other devices."""

    cpu: Tensor
    devices: list[int]
    others: list[Tensor]

    @classmethod
    def current(cls, x: Tensor) -> "RandomState":
        """Return the current state for CPU and the device of x."""
        return cls(torch.get_rng_state(), *get_device_states(x))

    def update(self, x: Tensor) -> None:
        """Overwrite this state with the current one, in place."""
        current = RandomState.current(x)
        for own, new in zip((self.cpu, *self.others), (current.cpu, *current.others), strict=True):
            own.copy_(new)

    def restore(self) -> None:
        """Restore this state in torch's generators."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.others)
