"""Stored states: weights, optimizers and random generators."""

import math
import random
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlxf.utils.errors import CheckpointError
from rlxf.utils.memory_budget import check_budget


def check_buildable(
    build: Callable[[], nn.Module], tensors: Mapping[str, Tensor], required: Mapping[str, int]
) -> None:
    """Check that tensors fit a policy and that its memory is within the budget, without allocating it.

    A few bytes in a file can specify more weights than any machine can hold. The policy is therefore built
    on torch's "meta" device, and memory is allocated only after this check.

    Args:
        build: function that builds the module; it is called with the default device "meta" and may raise
            any error.
        tensors: tensors of the file by name.
        required: bytes by purpose that the policy requires in addition to its parameters and buffers.

    Raises:
        CheckpointError: if a tensor does not match its parameter or buffer.
        MemoryBudgetError: if the required memory exceeds the budget (`rlxf.utils.memory_budget`).
    """
    file_bytes = _bytes(tensors.values())
    check_budget({"weights and tables": file_bytes, **required}, file_bytes)
    with torch.device("meta"):
        module = build()
    check_weights_fit(module, tensors, "policy")
    module_bytes = _bytes([*module.parameters(), *module.buffers()])
    check_budget({"weights and tables": module_bytes, **required}, file_bytes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_layers(layers: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if there are more layers than tensors, before the layers are built."""
    if layers > len(tensors):
        raise state_mismatch(f"there are {layers:,} layers, but {len(tensors):,} tensors")


def check_weights_fit(module: nn.Module, tensors: Mapping[str, Tensor], group: str) -> None:
    """Raise CheckpointError unless tensors match the ``state_dict`` of a module.

    Names, shapes and kinds of dtype must agree. Parameters must be finite, and buffers must not contain NaN.

    Args:
        module: module whose state is to be loaded.
        tensors: tensors of the file by name.
        group: name of the group of tensors in the file, for the error message.
    """
    places = module.state_dict()
    _check_names(group, tensors, places, "the agent")
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        place = places[name]
        _check_shape(group, name, tensor, place)
        if not (tensor.is_floating_point() and place.is_floating_point()):  # these may differ in precision
            check_dtype(group, name, tensor, place.dtype)
        check_numbers(group, name, tensor, infinite=name not in parameters)


def state_mismatch(fault: str) -> CheckpointError:
    """Return the CheckpointError for stored tensors that are invalid or do not fit, because of ``fault``."""
    return CheckpointError(
        f"the stored state is invalid or does not fit: {fault}; load the file with the settings it was saved "
        f"with, or use another copy of it"
    )


def check_numbers(
    group: str, name: str, tensor: Tensor, infinite: bool = False, least: float = -math.inf
) -> None:
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
        if math.isnan(value) or value < least or (math.isinf(value) and not infinite):
            raise state_mismatch(f"in {group}, the tensor {name!r} contains {value}")


def _check_names(group: str, actual: Iterable[str], expected: Iterable[str], owner: str) -> None:
    """Raise CheckpointError unless a group has exactly the tensors that its owner has."""
    for name in sorted(set(expected) - set(actual)):
        raise state_mismatch(f"{group} lacks the tensor {name!r}")
    for name in sorted(set(actual) - set(expected)):
        raise state_mismatch(f"{group} has a tensor {name!r}, which {owner} does not have")


def check_dtype(group: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless a tensor has a dtype."""
    if tensor.dtype != dtype:
        raise state_mismatch(f"in {group}, the tensor {name!r} is of {tensor.dtype}, not {dtype}")


def _check_shape(group: str, name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise CheckpointError unless a tensor has the shape of its parameter or buffer."""
    if tensor.shape != place.shape:
        shapes = f"{tuple(tensor.shape)}, not {tuple(place.shape)}"
        raise state_mismatch(f"in {group}, the tensor {name!r} has shape {shapes}")


OPTIMIZER_GROUP = "optimizer"
"""Name of the group of tensors in a file."""
NOT_NEGATIVE = frozenset(
    ("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum", "acc_delta")
)
"""Names of state tensors that cannot be negative: step counts, and means or sums of squares."""


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer by parameter index and name: ``{"3.exp_avg": ...}``.

    Numbers are tensors without axes. Other values, such as None for momentum that is not used, are left out.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": tensor
        for index, values in state.items()
        for name, tensor in _tensors(values).items()
    }


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors and numbers in the state of a parameter as tensors."""
    kept = {name: value for name, value in state.items() if isinstance(value, Tensor | int | float)}
    return {
        name: value if isinstance(value, Tensor) else _number_tensor(value) for name, value in kept.items()
    }


def _number_tensor(value: float) -> Tensor:
    """Return a number as an int64, float64 or bool tensor, as `Tensor.item` returns it."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], updates: int = 0) -> dict[str, Any]:
    """Convert the result of `optimizer_tensors` to a state dict for ``optimizer.load_state_dict``.

    The parameter groups, with the hyperparameters, are those of ``optimizer``.

    Args:
        optimizer: optimizer of the agent that is restored.
        tensors: tensors of a file by name.
        updates: number of updates of the saved agent; if it is positive, state tensors must be present.

    Raises:
        CheckpointError: if a tensor is missing or belongs to no parameter, if its shape or dtype differs from
            that of the optimizer's state, or if it contains NaN, infinity or a negative value of
            `NOT_NEGATIVE`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = _by_parameter(tensors, len(parameters))
    if updates and not state and _expected_state(optimizer, parameters[0]):
        raise state_mismatch(
            f"{OPTIMIZER_GROUP} has no tensors, but the agent was trained for {updates} updates"
        )
    expected = {
        f"{index}.{name}": place
        for index in state
        for name, place in _expected_state(optimizer, parameters[index]).items()
    }
    _check_names(OPTIMIZER_GROUP, tensors, expected, type(optimizer).__name__)
    for key, place in expected.items():
        least = 0.0 if key.partition(".")[2] in NOT_NEGATIVE else -math.inf
        _check_shape(OPTIMIZER_GROUP, key, tensors[key], place)
        check_dtype(OPTIMIZER_GROUP, key, tensors[key], place.dtype)
        check_numbers(OPTIMIZER_GROUP, key, tensors[key], least=least)
    numbers = _number_names(optimizer) if state else set()
    state = {index: _with_numbers(values, numbers) for index, values in state.items()}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _number_names(optimizer: Optimizer) -> set[str]:
    """Return the names of the numbers in the state of a parameter, which files hold as tensors."""
    state = _state_after_step(optimizer, torch.zeros(2))
    return {name for name, value in state.items() if isinstance(value, int | float)}


def _with_numbers(tensors: Mapping[str, Tensor], numbers: Container[str]) -> dict[str, Any]:
    return {name: value.item() if name in numbers else value for name, value in tensors.items()}


def _by_parameter(tensors: Mapping[str, Tensor], parameters: int) -> dict[int, dict[str, Tensor]]:
    """Return tensors named ``"3.exp_avg"`` by index of their parameter and by name."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= parameters:
            raise state_mismatch(
                f"{OPTIMIZER_GROUP} has a tensor {key!r}, for which the agent has no parameter"
            )
        state.setdefault(int(index), {})[name] = tensor
    return state


def _expected_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer for a parameter, by name, on the "meta" device.

    The shapes come from one step of an equal optimizer on a small parameter with the same number of axes.
    Axis lengths of the small parameter are replaced by those of ``parameter``; other lengths are unchanged.
    """
    small = tuple(range(2, 2 + parameter.dim()))  # distinct lengths, none of them 1
    state = _tensors(_state_after_step(optimizer, torch.zeros(small, dtype=parameter.dtype)))
    lengths = dict(zip(small, parameter.shape, strict=True))
    return {
        name: torch.empty([lengths.get(n, n) for n in value.shape], dtype=value.dtype, device="meta")
        for name, value in state.items()
    }


def _state_after_step(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state of an equal optimizer for a parameter after a step."""
    probe = nn.Parameter(parameter)
    probe.grad = torch.zeros_like(parameter)
    copy = type(optimizer)([probe])  # type: ignore[call-arg]  # the base class requires defaults
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    copy.param_groups[0].update(options)
    copy.step()
    return dict(copy.state[probe])


RNG_GROUP = "generators"
"""Name of the group of tensors in a file."""
WORDS, WORD_END = 624, 2**32
"""Number of words of a Mersenne twister, and exclusive upper bound of a word."""


def get_rng_states() -> dict[str, Tensor]:
    """Return the states of the global generators of torch (CPU and each GPU), numpy and Python, by name.

    The generators of Python and numpy are Mersenne twisters: 624 words, the position of the next word, and a
    cached normal deviate (NaN if there is none).
    """
    twister: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # environments may use the global generator
    _, words, cached = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*twister["state"]["key"].tolist(), twister["state"]["pos"]]),
        "numpy_normal": _normal(twister["gauss"] if twister["has_gauss"] else None),
        "python": torch.tensor(words),
        "python_normal": _normal(cached),
        **{f"cuda_{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())},
    }


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Restore the result of `get_rng_states`; states of GPUs that this machine lacks are ignored.

    Raises:
        CheckpointError: if a state is missing or invalid.
    """
    try:
        numpy_state, python_state = _twister(states, "numpy"), _twister(states, "python")
        torch.set_rng_state(states["torch"])
        for number in range(torch.cuda.device_count()):
            if f"cuda_{number}" in states:
                torch.cuda.set_rng_state(states[f"cuda_{number}"], number)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise state_mismatch(
            f"{RNG_GROUP} contain no valid states of random number generators ({error!r})"
        ) from error
    words, normal = numpy_state
    key = np.array(words[:-1], np.uint32)
    np.random.set_state(("MT19937", key, words[-1], int(normal is not None), normal or 0.0))  # noqa: NPY002
    random.setstate((3, tuple(python_state[0]), python_state[1]))


def _twister(states: Mapping[str, Tensor], name: str) -> tuple[list[int], float | None]:
    """Return the words followed by the position, and the cached normal deviate.

    The position is validated here, as numpy accepts any position and then reads out of bounds.
    """
    check_dtype(RNG_GROUP, name, states[name], torch.int64)
    words, normal = states[name].tolist(), states[f"{name}_normal"].item()
    if len(words) != WORDS + 1 or not all(0 <= word < WORD_END for word in words) or words[-1] > WORDS:
        raise ValueError(f"{name} must be {WORDS} words and a position from 0 to {WORDS}")
    return words, None if np.isnan(normal) else normal


def _normal(number: float | None) -> Tensor:
    return torch.tensor(math.nan if number is None else number, dtype=torch.float64)
