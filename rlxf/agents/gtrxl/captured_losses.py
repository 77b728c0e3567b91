"""Losses of PPO and their gradients on a GPU, captured as CUDA graphs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlxf.agents.common.accumulation import Losses
from rlxf.agents.common.captured_function import capture, foreach_copy
from rlxf.agents.common.compiled_function import CompilationError, ModuleTensors
from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import TokenIndex, Transformer
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.attention.relative import is_aligned
from rlxf.attention.token_index import EMPTY
from rlxf.utils.warnings import warn_user

ON_CPU = ("_on_cpu",)
"""Fields of a batch that are not its tensors: the values of indices on the CPU."""
COEFFICIENTS = ("clip_range", "clip_range_vf", "ent_coef", "vf_coef")
"""Numbers of `PPOLoss` that change between updates."""
GradientSetter = Callable[[], None]
"""Sets the gradients of all parameters."""


class CapturedLosses:
    """Losses and gradients of minibatches, captured at the first minibatch of each shape.

    An update of a small network takes longer to launch its kernels than to compute them. Here, one call
    launches those of the forward and of the backward pass; clipping and optimizer are not captured.

    The branches of a captured run are fixed. They depend on the values of indices, e.g. on whether slots are
    consecutive steps. The captured run gets the index of one long episode, whose branches are right for any
    minibatch of consecutive steps. Other minibatches are not captured: those with empty slots among the
    steps, or with gaps. If the losses of an agent cannot be captured, this class warns once.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _CapturedGradients] = {}
        self._is_usable = True

    def __call__(
        self, policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch
    ) -> tuple[Losses, GradientSetter] | None:
        """Return the losses by name without gradient, and a function that sets the gradients.

        Returns None for a minibatch that is not captured.

        Warns:
            UserWarning: once, if the losses cannot be captured; the message names the reason.
        """
        if not self._is_usable or not has_consecutive_steps(batch):
            return None
        try:
            return self._captured(policy, loss, batch)
        except CompilationError as error:
            self._is_usable = False
            warn_user(
                f"updates are not captured as CUDA graphs, because {error}; torch runs their operations one "
                f"by one, with results that are equal up to rounding"
            )
            return None

    def _captured(
        self, policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch
    ) -> tuple[Losses, GradientSetter]:
        coefficients = {name: x for name in COEFFICIENTS if (x := getattr(loss, name)) is not None}
        options: dict[str, Any] = {"dtype": torch.float32, "device": policy.device}
        numbers = {name: torch.full((), x, **options) for name, x in coefficients.items()}
        tensors = named_tensors(batch, skipped=ON_CPU)
        shapes = ((x.shape, x.dtype) for x in tensors.values())
        layout = policy.precision, loss.reconstruction_coef, *numbers, *shapes
        graph = self._graphs.get(layout)
        if graph is not None and not graph.is_current:
            self._graphs.clear()
        if layout not in self._graphs:
            template = with_one_episode(batch)
            check_transformer(policy.transformer, template)
            losses = _Gradients(policy, loss, template)
            self._graphs[layout] = _CapturedGradients(losses, tensors | numbers)
        return self._graphs[layout](tensors | numbers)


class _Gradients(nn.Module):
    """Losses and gradients as a function of the tensors of a batch and the coefficients, by name.

    Args:
        policy: the policy.
        loss: PPO's loss, whose coefficients are replaced.
        template: a batch, for its structure and the values of its indices on the CPU.
    """

    def __init__(self, policy: GTrXLPolicy, loss: PPOLoss, template: SegmentBatch):
        super().__init__()
        self.policy, self._loss, self.template = policy, loss, template
        self.names: list[str] = []

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [x for x in self.parameters() if x.requires_grad]

    def forward(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        coefficients: Any = {name: tensors[name] for name in COEFFICIENTS if name in tensors}
        batch = with_tensors(self.template, tensors, skipped=ON_CPU)
        losses = replace(self._loss, **coefficients)(self.policy, batch)
        self.names = list(losses)
        gradients = torch.autograd.grad(losses["loss"], self.trained(), allow_unused=True)
        return torch.stack([x.detach() for x in losses.values()]), *gradients


class _CapturedGradients:
    """Captured `_Gradients`.

    Args:
        gradients: the function.
        examples: tensors by name.
    """

    def __init__(self, gradients: _Gradients, examples: Mapping[str, Tensor]):
        self._function = gradients
        self._parameters = {name: x for name, x in gradients.named_parameters() if x.requires_grad}
        self._state = ModuleTensors(gradients)
        self._before = self._now()
        self._arguments = {name: x.clone() for name, x in examples.items()}
        gradients.template = with_tensors(gradients.template, self._arguments, skipped=ON_CPU)
        buffers = [(x, x.clone()) for x in gradients.buffers()]
        device = next(iter(self._arguments.values())).device
        self._replay, (self._values, *self._gradients) = capture(self._run, device)
        for buffer, value in buffers:  # a features extractor may update its buffers in each run
            buffer.copy_(value)

    def _run(self) -> tuple[Tensor | None, ...]:
        # Autograd's nodes of the parameters themselves may belong to a stream that cannot be captured.
        aliases = {name: x.detach().requires_grad_() for name, x in self._parameters.items()}
        losses, *gradients = functional_call(self._function, aliases, (self._arguments,))
        return losses, *map(_gradient_of, self._parameters.values(), gradients)

    @property
    def is_current(self) -> bool:
        """True if the module still has the same parameters and buffers, and trains the same ones."""
        return self._before == self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        return self._state.addresses(), [id(x) for x in self._function.trained()]

    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Losses, GradientSetter]:
        """Return the losses, and a function that sets the gradients of the parameters."""
        foreach_copy(list(self._arguments.values()), [tensors[name] for name in self._arguments])
        self._replay()
        assert self._values is not None
        values = self._values.clone().unbind()
        return dict(zip(self._function.names, values, strict=True)), self._set_gradients

    def _set_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters.values(), self._gradients, strict=True):
            parameter.grad = gradient


def _gradient_of(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient in the memory layout of its parameter; autograd may share its memory."""
    return None if gradient is None else torch.empty_like(parameter).copy_(gradient)


def has_consecutive_steps(batch: SegmentBatch) -> bool:
    """Return whether all slots hold steps, and memory and segment of each row are consecutive."""
    index = batch.index.on_cpu
    filled = not bool((index.episode == EMPTY).any())
    return filled and is_aligned(index, batch.state.index.on_cpu.concatenate(index))


def with_one_episode(batch: SegmentBatch) -> SegmentBatch:
    """Return a batch whose indices have the values of one long episode on the CPU."""
    (rows, memory), length = batch.state.index.shape, batch.index.shape[1]
    before, here = TokenIndex.range(rows, memory), TokenIndex.range(rows, length, memory)
    state = replace(batch.state, index=batch.state.index.with_values(before))
    return replace(batch, index=batch.index.with_values(here), state=state)


def check_transformer(transformer: Transformer, batch: SegmentBatch) -> None:
    """Raise CompilationError, with the reason, if a pass of a batch depends on more than its tensors."""
    spec = transformer.spec
    memory, pattern = spec.memory, spec.pattern
    if memory is not None and (memory.affects_one_segment or memory.segment_length is not None):
        raise CompilationError(f"the branches of the memory {memory} depend on values")
    if not all(pattern.for_layer(layer).sees_nearest for layer in range(spec.layers)):
        raise CompilationError(f"the branches of the pattern {pattern} depend on values")
    for kernel in (each for each in transformer.modules() if isinstance(each, AttentionKernel)):
        if type(kernel).skip_update is not AttentionKernel.skip_update:
            raise CompilationError(f"{type(kernel).__name__} keeps statistics of a pass")
    masks = transformer.attention_masks(batch.index, batch.state.index.concatenate(batch.index))
    if any(mask.sparse_plan is not None for mask in masks):
        raise CompilationError("blocks of sparse attention depend on the ends of episodes")
