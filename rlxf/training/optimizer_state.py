"""State of an optimizer as named tensors of a file, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlxf.training.fit import check_numbers, check_shape, misfit

GROUP = "optimizer"
"""Name of the tensors in a file."""
NOT_NEGATIVE = frozenset(
    ("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum", "acc_delta")
)
"""Counts, and means or sums of squares. All other tensors of an optimizer may be negative."""


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """``{"3.exp_avg": ...}``: the tensors that are kept for each parameter, by its number."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, kept in state.items()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }


def optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], updates: int = 0) -> dict[str, Any]:
    """`optimizer_tensors` as ``optimizer.load_state_dict`` takes them; its settings stay as they are.

    Args:
        optimizer: of the agent that is restored.
        tensors: by name, from a file.
        updates: of the agent in the file so far; after the first one, its moments cannot be missing.

    Raises:
        CheckpointError: if a tensor is without a parameter, is missing, has another shape or dtype than the
            optimizer keeps for its parameter, or holds NaN, infinity or a negative mean of squares.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise misfit(f"{GROUP} has a tensor {key!r}, for which the agent has no parameter")
        state.setdefault(int(number), {})[name] = tensor
    if updates and not state and _kept(optimizer, parameters[0]):
        raise misfit(f"{GROUP} has no tensors, but the agent learned from {updates} updates")
    for place, kept in state.items():
        wanted = _kept(optimizer, parameters[place])
        _check_names(place, kept, wanted, type(optimizer).__name__)
        for name, tensor in kept.items():
            _check_moment(f"{place}.{name}", name, tensor, wanted[name])
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _check_names(
    place: int, kept: Mapping[str, Tensor], wanted: Mapping[str, Tensor], optimizer: str
) -> None:
    """Raise CheckpointError if a parameter has other tensors than the optimizer keeps for it."""
    for name in sorted(wanted.keys() - kept.keys()):
        raise misfit(f"{GROUP} lacks the tensor '{place}.{name}'")
    for name in sorted(kept.keys() - wanted.keys()):
        raise misfit(f"{GROUP} has a tensor '{place}.{name}', which {optimizer} does not keep")


def _check_moment(key: str, name: str, tensor: Tensor, wanted: Tensor) -> None:
    check_shape(GROUP, key, tensor, wanted)
    if tensor.dtype != wanted.dtype:
        raise misfit(f"in {GROUP}, the tensor {key!r} is of {tensor.dtype}, not {wanted.dtype}")
    check_numbers(GROUP, key, tensor, least=0.0 if name in NOT_NEGATIVE else -torch.inf)


def _kept(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps for a parameter, by name, on the device "meta".

    A step of a similar optimizer on a small parameter with equally many axes shows them. Axes as long
    as those of the small parameter are as long as those of ``parameter``; other shapes, such as (), stay.
    """
    small = tuple(range(2, 2 + parameter.dim()))  # all different, and none is 1
    shown = _shown_by_a_step(optimizer, torch.zeros(small, dtype=parameter.dtype))
    lengths = dict(zip(small, parameter.shape, strict=True))
    return {
        name: torch.empty([lengths.get(n, n) for n in value.shape], dtype=value.dtype, device="meta")
        for name, value in shown.items()
    }


def _shown_by_a_step(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    probe = nn.Parameter(parameter)
    probe.grad = torch.zeros_like(parameter)
    other = type(optimizer)([probe])  # type: ignore[call-arg]  # the base class requires defaults
    own = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    other.param_groups[0].update(own)
    other.step()
    return {name: value for name, value in other.state[probe].items() if isinstance(value, Tensor)}
