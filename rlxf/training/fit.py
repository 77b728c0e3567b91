"""Whether the tensors of a file have a place in an agent."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rlxf.training.errors import CheckpointError


def check_buildable(build: Callable[[], nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """`check_weights_fit` of the policy that ``build`` makes, which takes no memory for its numbers here.

    A few letters in a file can ask for more weights than any machine holds. So nothing is filled before the
    file has shown that it brings them.

    Args:
        build: makes the module on torch's device "meta"; it may raise whatever it likes.
        tensors: by name, from a file.
    """
    with torch.device("meta"):
        module = build()
    check_weights_fit(module, tensors, "policy")


def check_layers(layers: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if there are more layers than tensors: to build them would only take time."""
    if layers > len(tensors):
        raise misfit(f"there are {layers:,} layers, but {len(tensors):,} tensors")


def check_weights_fit(module: nn.Module, tensors: Mapping[str, Tensor], group: str) -> None:
    """Raise CheckpointError unless the tensors are those of the module's ``state_dict``, in name and shape.

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
    for name, tensor in tensors.items():
        check_shape(group, name, tensor, places[name])


def misfit(fault: str) -> CheckpointError:
    """The error that says so."""
    return CheckpointError(
        f"the checkpoint's weights do not fit the agent: {fault}; load it with the settings it was saved "
        f"with, or use another copy of the file"
    )


def check_shape(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise CheckpointError unless the tensor has the shape of its place."""
    if tensor.shape != place.shape:
        shapes = f"{tuple(tensor.shape)}, not {tuple(place.shape)}"
        raise misfit(f"in {group}, the tensor {name!r} has shape {shapes}")
