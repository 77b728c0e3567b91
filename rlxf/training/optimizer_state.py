"""Conversion of the state of an optimizer to named tensors and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlxf.training.fit import check_numbers, check_shape, misfit

GROUP = "optimizer"
"""Name of the group of tensors in a file."""
NOT_NEGATIVE = frozenset(
    ("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum", "acc_delta")
)
"""Names of state tensors that cannot be negative: step counts, and means or sums of squares."""


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer by parameter index and name: ``{"3.exp_avg": ...}``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], updates: int = 0) -> dict[str, Any]:
    """Convert the result of `optimizer_tensors` to a state dict for ``optimizer.load_state_dict``.

    The parameter groups, with the hyperparameters, are those of ``optimizer``.

    Args:
        optimizer: optimizer of the agent that is restored.
        tensors: tensors of a file by name.
        updates: number of updates of the saved agent; if it is positive, state tensors must be present.

    Raises:
        CheckpointError: if a tensor is missing or belongs to no parameter, if its shape or dtype differs from
            that of the optimizer's state, or if it contains NaN, infinity or a negative mean of squares.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise misfit(f"{GROUP} has a tensor {key!r}, for which the agent has no parameter")
        state.setdefault(int(index), {})[name] = tensor
    if updates and not state and _expected_state(optimizer, parameters[0]):
        raise misfit(f"{GROUP} has no tensors, but the agent was trained for {updates} updates")
    for number, actual in state.items():
        expected = _expected_state(optimizer, parameters[number])
        _check_names(number, actual, expected, type(optimizer).__name__)
        for name, tensor in actual.items():
            _check_moment(f"{number}.{name}", name, tensor, expected[name])
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _check_names(
    index: int, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], optimizer: str
) -> None:
    """Raise CheckpointError if the state of a parameter has other names than the optimizer's state."""
    for name in sorted(expected.keys() - actual.keys()):
        raise misfit(f"{GROUP} lacks the tensor '{index}.{name}'")
    for name in sorted(actual.keys() - expected.keys()):
        raise misfit(f"{GROUP} has a tensor '{index}.{name}', which {optimizer} does not use")


def _check_moment(key: str, name: str, tensor: Tensor, expected: Tensor) -> None:
    check_shape(GROUP, key, tensor, expected)
    if tensor.dtype != expected.dtype:
        raise misfit(f"in {GROUP}, the tensor {key!r} is of {tensor.dtype}, not {expected.dtype}")
    check_numbers(GROUP, key, tensor, least=0.0 if name in NOT_NEGATIVE else -torch.inf)


def _expected_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer for a parameter, by name, on the "meta" device.

    The shapes come from one step of an equal optimizer on a small parameter with as many axes. Axis lengths
    of the small parameter are replaced by those of ``parameter``; other lengths are unchanged.
    """
    small = tuple(range(2, 2 + parameter.dim()))  # distinct lengths, none of them 1
    state = _state_after_step(optimizer, torch.zeros(small, dtype=parameter.dtype))
    lengths = dict(zip(small, parameter.shape, strict=True))
    return {
        name: torch.empty([lengths.get(n, n) for n in value.shape], dtype=value.dtype, device="meta")
        for name, value in state.items()
    }


def _state_after_step(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    probe = nn.Parameter(parameter)
    probe.grad = torch.zeros_like(parameter)
    copy = type(optimizer)([probe])  # type: ignore[call-arg]  # the base class requires defaults
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    copy.param_groups[0].update(options)
    copy.step()
    return {name: value for name, value in copy.state[probe].items() if isinstance(value, Tensor)}
