"""Whether the tensors of a file have a place in an agent."""

from collections.abc import Callable, Iterable, Mapping
from math import inf, isinf, isnan

import torch
from torch import Tensor, nn

from rlxf.training.errors import CheckpointError
from rlxf.utils.memory_budget import check_budget


def check_buildable(
    build: Callable[[], nn.Module], tensors: Mapping[str, Tensor], asked: Mapping[str, int]
) -> None:
    """`check_weights_fit` of the policy that ``build`` makes, which takes no memory for its numbers here.

    A few letters in a file can ask for more weights than any machine holds. So nothing is filled before the
    file has shown that it brings them.

    Args:
        build: makes the module on torch's device "meta"; it may raise whatever it likes.
        tensors: by name, from a file.
        asked: bytes that the policy needs in addition to its weights and buffers, by purpose.

    Raises:
        CheckpointError: if a tensor does not fit its place.
        MemoryBudgetError: if all of it exceeds the budget (`rlxf.utils.memory_budget`).
    """
    own = _bytes(tensors.values())
    check_budget({"weights and tables": own, **asked}, own)
    with torch.device("meta"):
        module = build()
    check_weights_fit(module, tensors, "policy")
    tables = _bytes([*module.parameters(), *module.buffers()])
    check_budget({"weights and tables": tables, **asked}, own)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_layers(layers: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if there are more layers than tensors: to build them would only take time."""
    if layers > len(tensors):
        raise misfit(f"there are {layers:,} layers, but {len(tensors):,} tensors")


def check_weights_fit(module: nn.Module, tensors: Mapping[str, Tensor], group: str) -> None:
    """Raise CheckpointError unless the tensors are those of the module's ``state_dict``.

    Names, shapes and kinds of numbers must agree. Parameters must be finite, and no buffer may hold NaN.

    Args:
        module: what is to be filled.
        tensors: by name, from a file.
        group: their name in the file, for the message.
    """
    places = module.state_dict()
    for name in sorted(places.keys() - tensors.keys()):
        raise misfit(f"{group} lacks the tensor {name!r}")
    for name in sorted(tensors.keys() - places.keys()):
        raise misfit(f"{group} has a tensor {name!r}, for which the agent has no place")
    learned = dict(module.named_parameters())
    for name, tensor in tensors.items():
        check_shape(group, name, tensor, places[name])
        _check_kind(group, name, tensor, places[name])
        check_numbers(group, name, tensor, infinite=name not in learned)


def misfit(fault: str) -> CheckpointError:
    """The error that says so."""
    return CheckpointError(
        f"the checkpoint's weights do not fit the agent: {fault}; load it with the settings it was saved "
        f"with, or use another copy of the file"
    )


def check_numbers(group: str, name: str, tensor: Tensor, infinite: bool = False, least: float = -inf) -> None:
    """Raise CheckpointError if a number of a tensor is NaN, infinite or too small.

    Args:
        group: name of the tensors in the file, for the message.
        name: of the tensor.
        tensor: of any dtype; only floating-point numbers are checked.
        infinite: whether numbers may be infinite.
        least: the smallest number that is allowed.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    for extreme in torch.aminmax(tensor):
        value = extreme.item()
        if isnan(value) or value < least or (isinf(value) and not infinite):
            raise misfit(f"in {group}, the tensor {name!r} holds {value}")


def _check_kind(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Accept floating-point numbers of one width for those of another, as in torch."""
    both_real = tensor.is_floating_point() and place.is_floating_point()
    if tensor.dtype != place.dtype and not both_real:
        raise misfit(f"in {group}, the tensor {name!r} is of {tensor.dtype}, not {place.dtype}")


def check_shape(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise CheckpointError unless the tensor has the shape of its place."""
    if tensor.shape != place.shape:
        shapes = f"{tuple(tensor.shape)}, not {tuple(place.shape)}"
        raise misfit(f"in {group}, the tensor {name!r} has shape {shapes}")
