"""Losses of PPO and their gradients as one program: compiled for a CPU, or captured as a CUDA graph."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlxf.agents.common.accumulation import GradientSetter, Losses
from rlxf.agents.common.compiled_losses import CompiledLosses, check_transformer, structure_of
from rlxf.agents.common.gradient_programs import LossFunction
from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch
from rlxf.attention import TokenIndex, Transformer
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.attention.relative import is_aligned
from rlxf.attention.token_index import EMPTY
from rlxf.utils.errors import CompilationError

ON_CPU = ("_on_cpu",)
"""Fields of a batch that are not its tensors: the values of indices on the CPU."""
COEFFICIENTS = ("clip_range", "clip_range_vf", "ent_coef", "vf_coef")
"""Numbers of `PPOLoss` that change between updates."""


class CompiledPPOLosses:
    """`CompiledLosses` of minibatches of segments.

    The branches of PPO's losses depend on the values of indices, e.g. on whether slots are consecutive steps.
    The compiled run gets the index of one long episode, whose branches are right for any minibatch of
    consecutive steps. Other minibatches are not compiled: those with empty slots among the steps, or with
    gaps, and segments of one step.

    Args:
        device_type: see `CompiledLosses`.
    """

    def __init__(self, device_type: str):
        self._compiled = CompiledLosses(device_type)

    def __call__(
        self, policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch
    ) -> tuple[Losses, GradientSetter] | None:
        """Return the losses by name without gradient, and a function that sets the gradients.

        Returns None for a minibatch that is not compiled.

        Warns:
            UserWarning: once, if the losses cannot be compiled; the message names the reason.
        """
        if not self._compiled.is_usable or not has_consecutive_steps(batch):
            return None
        coefficients = {name: x for name in COEFFICIENTS if (x := getattr(loss, name)) is not None}
        options: dict[str, Any] = {"dtype": torch.float32, "device": policy.device}
        numbers = {name: torch.full((), x, **options) for name, x in coefficients.items()}
        tensors = named_tensors(batch, skipped=ON_CPU) | numbers
        make = partial(loss_function, policy, loss, batch)
        return self._compiled(policy, tensors, make, (policy.precision, loss.reconstruction_coef))


def loss_function(policy: GTrXLPolicy, loss: PPOLoss, batch: SegmentBatch) -> LossFunction:
    """Return PPO's losses as a function of the tensors of a minibatch and the coefficients, by name.

    Raises:
        CompilationError: if their branches depend on the values of these tensors.
    """
    template = with_one_episode(structure_of(batch, ON_CPU))
    check_transformer(policy.transformer)
    check_masks(policy.transformer, with_one_episode(batch))

    def losses(tensors: Mapping[str, Tensor]) -> Losses:
        coefficients: Any = {name: tensors[name] for name in COEFFICIENTS if name in tensors}
        return replace(loss, **coefficients)(policy, with_tensors(template, tensors, skipped=ON_CPU))

    return losses


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


def check_masks(transformer: Transformer, batch: SegmentBatch) -> None:
    """Raise CompilationError if attention to the memory of a batch is sparse."""
    masks = transformer.attention_masks(batch.index, batch.state.index.concatenate(batch.index))
    if any(mask.sparse_plan is not None for mask in masks):
        raise CompilationError("blocks of sparse attention depend on the ends of episodes")
