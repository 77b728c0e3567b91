"""Checks that the tensors of a file match the parameters and buffers of an agent."""

from collections.abc import Callable, Iterable, Mapping
from math import inf, isinf, isnan

import torch
from torch import Tensor, nn

from rlxf.training.errors import CheckpointError
from rlxf.utils.memory_budget import check_budget


def check_buildable(
    build: Callable[[], nn.Module], tensors: Mapping[str, Tensor], asked: Mapping[str, int]
) -> None:
    """Check that tensors fit a policy and that its memory is within the budget, without allocating it.

    A few bytes in a file can specify more weights than any machine can hold. The policy is therefore built
    on torch's "meta" device, and memory is allocated only after this check.

    Args:
        build: function that builds the module; it is called with the default device "meta" and may raise
            any error.
        tensors: tensors of the file by name.
        asked: bytes by purpose that the policy requires in addition to its parameters and buffers.

    Raises:
        CheckpointError: if a tensor does not match its parameter or buffer.
        MemoryBudgetError: if the required memory exceeds the budget (`rlxf.utils.memory_budget`).
    """
    file_bytes = _bytes(tensors.values())
    check_budget({"weights and tables": file_bytes, **asked}, file_bytes)
    with torch.device("meta"):
        module = build()
    check_weights_fit(module, tensors, "policy")
    module_bytes = _bytes([*module.parameters(), *module.buffers()])
    check_budget({"weights and tables": module_bytes, **asked}, file_bytes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_layers(layers: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if there are more layers than tensors, before the layers are built."""
    if layers > len(tensors):
        raise misfit(f"there are {layers:,} layers, but {len(tensors):,} tensors")


def check_weights_fit(module: nn.Module, tensors: Mapping[str, Tensor], group: str) -> None:
    """Raise CheckpointError unless tensors match the ``state_dict`` of a module.

    Names, shapes and kinds of dtype must agree. Parameters must be finite, and buffers must not contain NaN.

    Args:
        module: module whose state is to be loaded.
        tensors: tensors of the file by name.
        group: name of the group of tensors in the file, for the error message.
    """
    places = module.state_dict()
    for name in sorted(places.keys() - tensors.keys()):
        raise misfit(f"{group} lacks the tensor {name!r}")
    for name in sorted(tensors.keys() - places.keys()):
        raise misfit(f"{group} has a tensor {name!r}, which the agent does not have")
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        check_shape(group, name, tensor, places[name])
        _check_kind(group, name, tensor, places[name])
        check_numbers(group, name, tensor, infinite=name not in parameters)


def misfit(fault: str) -> CheckpointError:
    """Return the CheckpointError for weights that do not fit the agent, because of ``fault``."""
    return CheckpointError(
        f"the checkpoint's weights do not fit the agent: {fault}; load it with the settings it was saved "
        f"with, or use another copy of the file"
    )


def check_numbers(group: str, name: str, tensor: Tensor, infinite: bool = False, least: float = -inf) -> None:
    """Raise CheckpointError if an element of a tensor is NaN, infinite or too small.

    Args:
        group: name of the group of tensors in the file, for the error message.
        name: name of the tensor.
        tensor: tensor of any dtype; only floating-point tensors are checked.
        infinite: whether infinite elements are allowed.
        least: smallest allowed value.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    for extreme in torch.aminmax(tensor):
        value = extreme.item()
        if isnan(value) or value < least or (isinf(value) and not infinite):
            raise misfit(f"in {group}, the tensor {name!r} contains {value}")


def _check_kind(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise CheckpointError if dtypes differ; floating-point dtypes may differ, as in ``load_state_dict``."""
    both_real = tensor.is_floating_point() and place.is_floating_point()
    if tensor.dtype != place.dtype and not both_real:
        raise misfit(f"in {group}, the tensor {name!r} is of {tensor.dtype}, not {place.dtype}")


def check_shape(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise CheckpointError unless a tensor has the shape of its parameter or buffer."""
    if tensor.shape != place.shape:
        shapes = f"{tuple(tensor.shape)}, not {tuple(place.shape)}"
        raise misfit(f"in {group}, the tensor {name!r} has shape {shapes}")
