"""Losses and their gradients on a GPU, captured as CUDA graphs."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlxf.agents.common.accumulation import Losses
from rlxf.agents.common.captured_function import capture, foreach_copy
from rlxf.agents.common.compiled_function import CompilationError, ModuleTensors
from rlxf.attention import Transformer
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.utils.warnings import warn_user

LossFunction = Callable[[Mapping[str, Tensor]], Losses]
"""Returns scalar losses by name, "loss" among them, for tensors by name."""
GradientSetter = Callable[[], None]
"""Sets the gradients of all parameters."""


class CompiledLosses:
    """Losses and gradients of batches, captured at the first batch of each layout.

    An update of a small network takes longer to launch its kernels than to compute them. Here, one call
    launches those of the forward and of the backward pass; clipping and optimizer are not captured.

    The branches of a captured run are fixed, so they must not depend on the values of tensors. If the losses
    of an agent cannot be captured, this class warns once.

    Attributes:
        is_usable: False once the losses could not be captured.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _CapturedGradients] = {}
        self.is_usable = True

    def __call__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        make: Callable[[], LossFunction],
        settings: Hashable = (),
    ) -> tuple[Losses, GradientSetter] | None:
        """Return the losses by name without gradient, and a function that sets the gradients.

        Returns None if the losses cannot be captured.

        Args:
            model: the model whose parameters are trained.
            tensors: all tensors of a batch that the losses depend on, by name.
            make: returns the losses of the model as a function of these tensors. It may raise
                `CompilationError` if their branches depend on values.
            settings: further values that the losses depend on. Each of them is captured separately.

        Warns:
            UserWarning: once, if the losses cannot be captured; the message names the reason.
        """
        try:
            return self._compiled(model, tensors, make, settings) if self.is_usable else None
        except CompilationError as error:
            self.is_usable = False
            self._graphs.clear()
            warn_user(
                f"updates are not captured as CUDA graphs, because {error}; torch runs their operations one "
                f"by one, with results that are equal up to rounding, which takes longer for small networks; "
                f"cuda_graphs=False has the same effect without this warning"
            )
            return None

    def __reduce__(self) -> Any:
        """Copy and pickle this object without its graphs, which are captured again."""
        return CompiledLosses, ()

    def _compiled(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        make: Callable[[], LossFunction],
        settings: Hashable,
    ) -> tuple[Losses, GradientSetter]:
        layout = settings, *((name, x.shape, x.dtype) for name, x in tensors.items())
        graph = self._graphs.get(layout)
        if graph is not None and not graph.is_current:
            self._graphs.clear()
        if layout not in self._graphs:
            self._graphs[layout] = _CapturedGradients(_Gradients(model, make()), tensors)
        return self._graphs[layout](tensors)


class _Gradients(nn.Module):
    """Losses and gradients as a function of tensors by name.

    Args:
        model: the model.
        losses: the losses of the model.
    """

    def __init__(self, model: nn.Module, losses: LossFunction):
        super().__init__()
        self.model, self._losses = model, losses
        self.names: list[str] = []

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [x for x in self.parameters() if x.requires_grad]

    def forward(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        losses = self._losses(tensors)
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
        buffers = [(x, x.clone()) for x in gradients.buffers()]
        device = next(iter(self._arguments.values())).device
        self._replay, (self._values, *self._gradients) = capture(self._run, device)
        for buffer, value in buffers:  # a run may update buffers, such as those of a features extractor
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
    memory, pattern = spec.memory, spec.pattern
    if memory is not None and (memory.affects_one_segment or memory.segment_length is not None):
        raise CompilationError(f"the branches of the memory {memory} depend on values")
    if not all(pattern.for_layer(layer).sees_nearest for layer in range(spec.layers)):
        raise CompilationError(f"the branches of the pattern {pattern} depend on values")
    if spec.dropout and (spec.residual.restores_random_state or spec.feed_forward_chunk is not None):
        raise CompilationError("the backward pass restores the random state of the forward pass")
    for kernel in (each for each in transformer.modules() if isinstance(each, AttentionKernel)):
        if type(kernel).skip_update is not AttentionKernel.skip_update:
            raise CompilationError(f"{type(kernel).__name__} keeps statistics of a pass")
