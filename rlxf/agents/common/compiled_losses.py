"""Losses and their gradients as one program: compiled for a CPU, or captured as a CUDA graph."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.agents.common.accumulation import GradientSetter, Losses
from rlxf.agents.common.compiled_function import EQUAL_RESULTS
from rlxf.agents.common.gradient_programs import (
    CapturedGradients,
    CompiledGradients,
    GradientProgram,
    Gradients,
    LossFunction,
)
from rlxf.agents.common.module_programs import ModulePrograms
from rlxf.attention import Transformer
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.utils.errors import CompilationError


class CompiledLosses(ModulePrograms[GradientProgram]):
    """Losses and gradients of batches, compiled at the first batch of each layout.

    An update of a small network takes longer to launch its operations than to compute them. Here, one call
    runs those of the forward and of the backward pass: machine code on a CPU, a CUDA graph on a GPU.
    Clipping and optimizer are not compiled.

    The branches of a compiled run are fixed, so they must not depend on the values of tensors. If the losses
    of an agent cannot be compiled, this class warns once.

    After modules or parameters were replaced, the losses are compiled again. While a module or a parameter
    has hooks, or a module has an assigned ``forward``, which a program would not call, no program is used,
    and this class warns once.

    Args:
        device_type: type of the device, "cpu" or "cuda"; batches on others have no program.
    """

    def __call__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        make: Callable[[], LossFunction],
        settings: Hashable = (),
    ) -> tuple[Losses, GradientSetter] | None:
        """Return the losses by name without gradient, and a function that sets the gradients.

        Returns None if the losses cannot be compiled, the model has hooks, or it was moved to another device.

        Args:
            model: the model whose parameters are trained.
            tensors: all tensors of a batch that the losses depend on, by name.
            make: returns the losses of the model as a function of these tensors. It may raise
                `CompilationError` if their branches depend on values.
            settings: further values that the losses depend on. Each of them is compiled separately.

        Warns:
            UserWarning: once, if the losses cannot be compiled or the model has hooks; the message names the
                reason.
        """
        moved = next(iter(tensors.values())).device.type != self.device_type
        if moved or not self.is_usable or self._has_hooks(model):
            return None
        try:
            return self._compiled(model, tensors, make, settings)
        except CompilationError as error:
            self.is_usable = False
            self._programs.clear()
            self._warn(str(error), EQUAL_RESULTS)
            return None

    def _has_hooks(self, model: nn.Module) -> bool:
        """Return whether the model has hooks, and warn once."""
        modules = self._current_modules(model)
        patch = modules.find_patch() or modules.find_gradient_hook()
        if patch is not None:
            self._warn(f"{patch}, which a program would not call")
        return patch is not None

    def _message(self, reason: str, effect: str) -> str:
        graphs = self._captures
        form, option = ("captured as CUDA graphs", "cuda_graphs") if graphs else ("compiled", "compile")
        return (
            f"updates are not {form}, because {reason}; torch runs their operations one by one{effect}, "
            f"which takes longer for small networks; {option}=False has the same effect without this warning"
        )

    def _compiled(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        make: Callable[[], LossFunction],
        settings: Hashable,
    ) -> tuple[Losses, GradientSetter]:
        layout = settings, *((name, x.shape, x.dtype) for name, x in tensors.items())
        program = self._programs.get(layout)
        if program is not None and not program.is_current:
            self._programs.clear()
        if layout not in self._programs:
            if self.device_type != "cpu" and not self._captures:
                raise CompilationError(f"only CPUs and CUDA GPUs are supported, not {self.device_type}")
            kind = CapturedGradients if self._captures else CompiledGradients
            self._programs[layout] = kind(Gradients(model, make()), tensors)
        return self._programs[layout](tensors)


def structure_of(batch: Any, skipped: tuple[str, ...] = ()) -> Any:
    """Return a batch without the values of its tensors, to which `with_tensors` adds others.

    Args:
        batch: a dataclass with tensors, possibly nested.
        skipped: names of fields that keep their values.
    """
    shapes = {
        name: torch.empty_like(x, device="meta") for name, x in named_tensors(batch, skipped=skipped).items()
    }
    return with_tensors(batch, shapes, skipped=skipped)


def check_transformer(transformer: Transformer) -> None:
    """Raise CompilationError, with the reason, if the branches of a pass depend on values of tensors."""
    spec = transformer.spec
    for technique in (spec.memory, spec.pattern, spec.position, spec.recurrence, spec.residual, spec.depth):
        if technique is not None:
            technique.check_capture(spec)
    if spec.dropout and spec.feed_forward_chunk is not None:
        raise CompilationError("the backward pass restores the random state of the forward pass")
    for kernel in (each for each in transformer.modules() if isinstance(each, AttentionKernel)):
        kernel.check_capture()
