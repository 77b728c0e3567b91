"""Losses of PPO and their gradients on a GPU, captured as CUDA graphs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlxf.agents.common.accumulation import Losses
from rlxf.agents.common.captured_function import capture, copy_together
from rlxf.agents.common.compiled_function import CompilationError
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


class CapturedLosses:
    """Losses and gradients of minibatches, captured at the first minibatch of each shape.

    An update of a small network takes longer to launch its kernels than to compute them. Here, one call
    launches those of the forward and of the backward pass; clipping and optimizer are not captured.

    The branches of a captured run are fixed. They depend on the values of indices, e.g. on whether slots are
    consecutive steps. The captured run gets the index of a regular minibatch; others are not captured: those
    with empty slots among the steps, or with gaps. If the losses of an agent cannot be captured, this class
    warns once.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _CapturedGradients] = {}
        self._is_usable = True

    def __call__(self, policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch) -> Losses | None:
        """Return the losses without gradient, and set the gradients of all parameters.

        Returns:
            The losses by name; None if this minibatch is not captured.

        Warns:
            UserWarning: once, if the losses cannot be captured; the message names the reason.
        """
        if not self._is_usable or not is_regular(batch):
            return None
        try:
            return self._captured(policy, loss, batch)
        except CompilationError as error:
            self._is_usable = False
            warn_user(
                f"updates are not captured as CUDA graphs, because {error}; torch launches their operations "
                f"one by one, with the same results"
            )
            return None

    def _captured(self, policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch) -> Losses:
        coefficients = {name: x for name in COEFFICIENTS if (x := getattr(loss, name)) is not None}
        numbers = {name: torch.full((), x, device=policy.device) for name, x in coefficients.items()}
        tensors = named_tensors(batch, skipped=ON_CPU)
        layout = loss.reconstruction_coef, *numbers, *((x.shape, x.dtype) for x in tensors.values())
        graph = self._graphs.get(layout)
        if graph is None or not graph.is_current:
            template = regular(batch)
            check_transformer(policy.transformer, template)
            losses = _LossesOfTensors(policy, loss, template)
            graph = self._graphs[layout] = _CapturedGradients(losses, tensors | numbers)
        return graph(tensors | numbers)


class _CapturedGradients:
    """Losses of tensors and their gradients with respect to the parameters of a module.

    Args:
        losses: module that returns losses by name, which contain "loss", for tensors by name.
        examples: tensors by name.
    """

    def __init__(self, losses: nn.Module, examples: Mapping[str, Tensor]):
        self._losses = losses
        self._parameters = {name: x for name, x in losses.named_parameters() if x.requires_grad}
        self._addresses = self._present_addresses()
        self._arguments = {name: x.clone() for name, x in examples.items()}
        self._names: list[str] = []
        self._replay, (self._values, *self._gradients) = capture(self._run)

    def _run(self) -> tuple[Tensor | None, ...]:
        # Autograd's nodes of the parameters themselves may belong to a stream that cannot be captured.
        aliases = {name: x.detach().requires_grad_() for name, x in self._parameters.items()}
        losses = functional_call(self._losses, aliases, (self._arguments,))
        gradients = torch.autograd.grad(losses["loss"], list(aliases.values()), allow_unused=True)
        self._names = list(losses)
        own = map(_gradient_of, self._parameters.values(), gradients)
        return torch.stack([x.detach() for x in losses.values()]), *own

    @property
    def is_current(self) -> bool:
        """True if the module still has the same parameters and buffers."""
        return self._addresses == self._present_addresses()

    def _present_addresses(self) -> list[int]:
        return [x.data_ptr() for x in (*self._losses.parameters(), *self._losses.buffers())]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Losses:
        """Return the losses, and set the gradients of the parameters."""
        copy_together(list(self._arguments.values()), [tensors[name] for name in self._arguments])
        self._replay()
        for parameter, gradient in zip(self._parameters.values(), self._gradients, strict=True):
            parameter.grad = gradient
        assert self._values is not None
        return dict(zip(self._names, self._values.clone().unbind(), strict=True))


def _gradient_of(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient in the memory layout of its parameter; autograd may share its memory."""
    return None if gradient is None else torch.empty_like(parameter).copy_(gradient)


class _LossesOfTensors(nn.Module):
    """Losses as a function of the tensors of a batch and the coefficients, by name.

    Args:
        policy: the policy.
        loss: PPO's loss, whose coefficients are replaced.
        template: a batch, for its structure and the values of its indices on the CPU.
    """

    def __init__(self, policy: GTrXLPolicy, loss: PPOLoss, template: SegmentBatch):
        super().__init__()
        self.policy, self._loss, self._template = policy, loss, template

    def forward(self, tensors: Mapping[str, Tensor]) -> Losses:
        coefficients: Any = {name: tensors[name] for name in COEFFICIENTS if name in tensors}
        batch = with_tensors(self._template, tensors, skipped=ON_CPU)
        return replace(self._loss, **coefficients)(self.policy, batch)


def is_regular(batch: SegmentBatch) -> bool:
    """Return whether all slots hold steps, and memory and segment of each row are consecutive."""
    filled = not bool((batch.index.on_cpu.episode == EMPTY).any())
    memory = batch.state.index
    return filled and is_aligned(batch.index.on_cpu, memory.on_cpu.concatenate(batch.index.on_cpu))


def regular(batch: SegmentBatch) -> SegmentBatch:
    """Return a batch whose indices have the values of one long episode on the CPU."""
    (rows, memory), length = batch.state.index.shape, batch.index.shape[1]
    before, here = TokenIndex.range(rows, memory), TokenIndex.range(rows, length, memory)
    state = replace(batch.state, index=batch.state.index.with_values(before))
    return replace(batch, index=batch.index.with_values(here), state=state)


def check_transformer(transformer: Transformer, batch: SegmentBatch) -> None:
    """Raise CompilationError, with the reason, if a pass of a batch depends on more than its tensors."""
    memory = transformer.spec.memory
    if memory is not None and (memory.affects_one_segment or memory.segment_length is not None):
        raise CompilationError(f"the branches of the memory {memory} depend on values")
    for kernel in (each for each in transformer.modules() if isinstance(each, AttentionKernel)):
        if type(kernel).skip_update is not AttentionKernel.skip_update:
            raise CompilationError(f"{type(kernel).__name__} keeps statistics of a pass")
    masks = transformer.attention_masks(batch.index, batch.state.index.concatenate(batch.index))
    if any(mask.sparse_plan is not None for mask in masks):
        raise CompilationError("blocks of sparse attention depend on the ends of episodes")
