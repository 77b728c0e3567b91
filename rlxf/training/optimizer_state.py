"""State of an optimizer as named tensors of a file, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlxf.training.fit import check_numbers, check_shape, misfit

GROUP = "optimizer"
"""Name of the tensors in a file."""
SIGNED = ("exp_avg", "momentum_buffer", "grad_avg")
"""Moments that may be negative; all others are means of squares, or counts."""


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
        CheckpointError: if a tensor is of no parameter, is missing, has another shape or dtype than its
            parameter, or holds NaN, infinity or a negative mean of squares.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise misfit(f"{GROUP} has a tensor {key!r}, for which the agent has no parameter")
        state.setdefault(int(number), {})[name] = tensor
    _check_complete(optimizer, state, updates)
    for place, kept in state.items():
        for name, tensor in kept.items():
            _check_moment(f"{place}.{name}", name, tensor, parameters[place])
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _check_moment(key: str, name: str, tensor: Tensor, parameter: Tensor) -> None:
    if name != "step":
        check_shape(GROUP, key, tensor, parameter)
    elif tensor.dim():
        raise misfit(f"in {GROUP}, the tensor {key!r} has shape {tuple(tensor.shape)}, not ()")
    wanted = torch.float32 if name == "step" else parameter.dtype
    if tensor.dtype != wanted:
        raise misfit(f"in {GROUP}, the tensor {key!r} is of {tensor.dtype}, not {wanted}")
    check_numbers(GROUP, key, tensor, least=-torch.inf if name in SIGNED else 0.0)


def _check_complete(optimizer: Optimizer, state: Mapping[int, Mapping[str, Tensor]], updates: int) -> None:
    """Raise CheckpointError if a parameter has other tensors than the optimizer keeps for one."""
    wanted = _kept_names(optimizer)
    if updates and wanted and not state:
        raise misfit(f"{GROUP} has no tensors, but the agent learned from {updates} updates")
    for number, kept in state.items():
        for name in sorted(wanted - kept.keys()):
            raise misfit(f"{GROUP} lacks the tensor '{number}.{name}'")
        for name in sorted(kept.keys() - wanted):
            raise misfit(
                f"{GROUP} has a tensor '{number}.{name}', which {type(optimizer).__name__} does not keep"
            )


def _kept_names(optimizer: Optimizer) -> set[str]:
    """Names of the tensors that an optimizer keeps for each parameter, from a step of one like it."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    other = type(optimizer)([probe])  # type: ignore[call-arg]  # the base class asks for defaults
    own = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    other.param_groups[0].update(own)
    other.step()
    return {name for name, value in other.state[probe].items() if isinstance(value, Tensor)}
