"""Programs that compute losses and gradients: compiled for a CPU, or captured as a CUDA graph."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rlxf.agents.common.accumulation import GradientSetter, Losses
from rlxf.agents.common.captured_function import capture, foreach_copy
from rlxf.agents.common.compiled_function import CompiledFunction, ModuleTensors
from rlxf.attention.token_index import is_recording
from rlxf.utils.errors import CompilationError

LossFunction = Callable[[Mapping[str, Tensor]], Losses]
"""Returns scalar losses by name, "loss" among them, for tensors by name."""
READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Methods whose results torch.fx takes for constants; it refuses ``item``, ``int`` and ``bool`` by itself."""


class Gradients(nn.Module):
    """Losses and gradients as a function of tensors by name.

    Args:
        model: the model.
        losses: the losses of the model.
    """

    def __init__(self, model: nn.Module, losses: LossFunction):
        super().__init__()
        self.model, self._losses = model, losses
        self.names: list[str] = []
        self.replaced: list[str] = []

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [x for x in self.parameters() if x.requires_grad]

    def forward(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        """Return the losses (N,) in the order of ``names``, and the gradient of each trained parameter.

        ``replaced`` has the names of buffers that the losses assigned instead of updating them in place.
        """
        buffers = dict(self.named_buffers())
        losses = self._losses(tensors)
        self.names = list(losses)
        self.replaced = [name for name, x in self.named_buffers() if x is not buffers.get(name)]
        gradients = torch.autograd.grad(losses["loss"], self.trained(), allow_unused=True)
        return torch.stack([x.detach() for x in losses.values()]), *gradients


class GradientProgram(ABC):
    """Program that computes `Gradients` for tensors with the shapes of examples.

    Args:
        gradients: the function.
    """

    def __init__(self, gradients: Gradients):
        self._function = gradients
        self._parameters = {name: x for name, x in gradients.named_parameters() if x.requires_grad}
        self._state = ModuleTensors(gradients)
        self._before = self._now()

    @property
    def is_current(self) -> bool:
        """True if the module still has the same parameters and buffers, and trains the same ones."""
        return self._before == self._now()

    def _now(self) -> tuple[list[int], list[tuple[int, bool]]]:
        return self._state.addresses(), [(id(x), x.requires_grad) for x in self._state.present()]

    @abstractmethod
    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Losses, GradientSetter]:
        """Return the losses, and a function that sets the gradients of the parameters."""

    def _run_with(
        self, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Run the function with other tensors in place of parameters, and return losses and gradients."""
        each = _named_once(self._function, parameters)
        losses, *gradients = functional_call(self._function, each, (tensors,), tie_weights=False)
        return losses, list(map(_gradient_of, self._parameters.values(), gradients))

    def _named(self, losses: Tensor) -> Losses:
        """Return losses (N,) by name."""
        return dict(zip(self._function.names, losses.unbind(), strict=True))

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient


class CapturedGradients(GradientProgram):
    """`GradientProgram` for a GPU, whose kernels are launched by one call.

    Args:
        gradients: the function.
        examples: tensors by name.
    """

    def __init__(self, gradients: Gradients, examples: Mapping[str, Tensor]):
        super().__init__(gradients)
        self._arguments = {name: x.clone() for name, x in examples.items()}
        buffers = [(x, x.clone()) for x in gradients.buffers()]
        device = next(iter(self._arguments.values())).device
        self._replay, (self._losses, *self._gradients) = capture(self._run, device)
        for buffer, value in buffers:  # a run may update buffers, such as those of a features extractor
            buffer.copy_(value)

    def _run(self) -> tuple[Tensor | None, ...]:
        # Autograd's nodes of the parameters themselves may belong to a stream that cannot be captured.
        losses, gradients = self._run_with(_aliases(self._parameters), self._arguments)
        return losses, *gradients

    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Losses, GradientSetter]:
        foreach_copy(list(self._arguments.values()), [tensors[name] for name in self._arguments])
        self._replay()
        assert self._losses is not None
        return self._named(self._losses.clone()), partial(self._set_gradients, self._gradients)


class CompiledGradients(GradientProgram):
    """`GradientProgram` for a CPU, in machine code.

    The operations of a run, including those of its backward pass, are recorded and compiled. Parameters and
    buffers are arguments of the program, so that updates in place need no notification.

    Args:
        gradients: the function.
        examples: tensors by name.

    Raises:
        CompilationError: if a branch depends on values of tensors, a buffer is replaced instead of updated in
            place, or the operations cannot be compiled.
    """

    def __init__(self, gradients: Gradients, examples: Mapping[str, Tensor]):
        super().__init__(gradients)
        self._module: dict[str, Tensor] = dict(gradients.named_parameters())
        self._module |= dict(gradients.named_buffers())
        self._names = list(examples)
        self._has_gradient: list[bool] = []
        arguments = [x.detach().clone() for x in self._arguments(examples)]
        recorded = record(self._results, arguments)
        if gradients.replaced:
            names = ", ".join(gradients.replaced)
            raise CompilationError(f"the losses replace buffers, instead of updating them in place: {names}")
        self._program = CompiledFunction(recorded, arguments)

    def _arguments(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the arguments of the program; it does not check that they are contiguous."""
        return [*self._module.values(), *(tensors[name].contiguous() for name in self._names)]

    def _results(self, *arguments: Tensor) -> list[Tensor]:
        """Return the losses, and the gradients of the parameters that have one."""
        module = dict(zip(self._module, arguments, strict=False))
        tensors = dict(zip(self._names, arguments[len(module) :], strict=True))
        module |= _aliases({name: module[name] for name in self._parameters})
        losses, gradients = self._run_with(module, tensors)
        self._has_gradient = [x is not None for x in gradients]
        return [losses, *(x for x in gradients if x is not None)]

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Losses, GradientSetter]:
        losses, *present = self._program(*self._arguments(tensors))
        rest = iter(_without_shared_memory(present))
        gradients = [next(rest) if has_gradient else None for has_gradient in self._has_gradient]
        return self._named(losses), partial(self._set_gradients, gradients)


def record(function: Callable[..., Any], examples: Sequence[Tensor]) -> nn.Module:
    """Record the operations of a function of tensors, also those of autograd, as a module without branches.

    The function is run once, with random numbers that are drawn again later.

    Raises:
        CompilationError: if a branch depends on values of tensors, or an operation cannot be recorded.
    """
    try:
        with torch.random.fork_rng([]), _RecordableFunctions():
            recorded: nn.Module = make_fx(function)(*examples)
    except Exception as error:  # operations raise errors of many kinds
        name, reason = type(error).__name__, str(error).strip().partition("\n")[0]
        raise CompilationError(f"its operations cannot be recorded: {name}: {reason}") from error
    return recorded


class _RecordableFunctions(TorchFunctionMode):
    """Context in which operations that torch.fx would run, but not record, are errors.

    One-hot vectors are comparisons, because torch's function checks the values on a CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and is_recording():
            raise RuntimeError(f"Tensor.{func.__name__} reads the values of a tensor")
        return _one_hot(*args, **kwargs or {}) if func is F.one_hot else func(*args, **kwargs or {})


def _one_hot(tensor: Tensor, num_classes: int) -> Tensor:
    """Return ``F.one_hot`` for values below ``num_classes``."""
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _named_once(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that replace parameters and buffers, with one name for each module that holds them.

    ``named_parameters`` omits the second module that holds a parameter. ``functional_call`` also replaces
    it there, but does not restore a module that has two names.

    Args:
        module: the module.
        tensors: tensors by the names of ``named_parameters`` and ``named_buffers``.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    replaced = {id(x): tensors[name] for name, x in named if name in tensors}
    owned = (
        chain(
            part.named_parameters(path, recurse=False, remove_duplicate=False),
            part.named_buffers(path, recurse=False, remove_duplicate=False),
        )
        for path, part in module.named_modules()
    )
    return {name: replaced[id(x)] for name, x in chain.from_iterable(owned) if id(x) in replaced}


def _aliases(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the same memory, with gradients of their own."""
    return {name: x.detach().requires_grad_() for name, x in parameters.items()}


def _gradient_of(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient in the memory layout of its parameter; autograd may share its memory.

    A recorded program contains the layout only, and not the parameter.
    """
    if gradient is None:
        return None
    empty = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    return empty.copy_(gradient)


def _without_shared_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, with copies of those that share the memory of an earlier one.

    A compiled program may return equal gradients of two parameters as one tensor.
    """
    seen: set[int] = set()
    separate = []
    for x in tensors:
        memory = x.untyped_storage().data_ptr()
        separate.append(x.clone() if memory in seen else x)
        seen.add(memory)
    return separate
