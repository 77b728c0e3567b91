"""Checks of arguments and of settings of torch that all agents share, and the rejection of unknown ones."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from stable_baselines3.common.utils import get_system_info

from rlxf.utils.checks import MAX_INT64, as_whole_number
from rlxf.utils.dtypes import to_builtin
from rlxf.utils.names import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class UnsupportedArgument:
    """An argument of Stable-Baselines3 that does not exist here.

    Args:
        advice: the reason and the alternative, appended to the error message.
        neutral: accepted values that have no effect, e.g. the default of Stable-Baselines3.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


def reject_unknown_arguments(
    refused: Mapping[str, UnsupportedArgument],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method so that an unknown keyword raises a TypeError with advice.

    The error for a ``refused`` keyword names the alternative. The error for any other keyword names the most
    similar parameter. A refused keyword with a neutral value is dropped. The signature is preserved.

    Args:
        refused: keywords of Stable-Baselines3 that the function does not accept.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            owner = type(args[0]).__name__ + f".{function.__name__}".removesuffix(".__init__")
            for name in sorted(kwargs.keys() - known):
                _check_neutral(owner, name, kwargs.pop(name), known, refused.get(name))
            return function(*args, **kwargs)

        return checked

    return decorate


def load_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments among the keywords of ``load``, without those of SB3's ``load``.

    ``custom_objects`` holds constructor arguments; those passed as keywords take precedence. In it, SB3's
    ``lr_schedule`` is the ``learning_rate``, unless that is there, too.
    ``print_system_info=True`` prints the versions on this machine. ``force_reset=True`` has no effect.

    Raises:
        ValueError: if ``force_reset`` is False, since the file of an agent does not hold its episodes.
    """
    given = dict(settings)
    if given.pop("print_system_info", False):
        get_system_info()
    if not given.pop("force_reset", True):
        raise ValueError(
            "force_reset=False is not possible, since the file of an agent does not hold its episodes: to "
            "continue a training in the middle of the episodes use learn(..., resume_from=FILE)"
        )
    replaced = dict(given.pop("custom_objects", None) or {})
    if "policy_class" in replaced:
        replaced["policy"] = replaced.pop("policy_class")
    if "lr_schedule" in replaced:
        replaced = {"learning_rate": replaced.pop("lr_schedule")} | replaced
    return replaced | given


def _check_neutral(
    owner: str, name: str, value: Any, known: list[str], refused: UnsupportedArgument | None
) -> None:
    if refused is None:
        public = [each for each in known if each != "self" and not each.startswith("_")]
        hint = did_you_mean(name, public, f"it takes {', '.join(public)}")
        raise TypeError(f"{owner} takes no argument {name!r}{hint}")
    if not any(value is each or value == each for each in refused.neutral):
        raise TypeError(f"{owner} takes no argument {name!r}: {refused.advice}")


def check_device(device: torch.device | str) -> None:
    """Check that a device exists. Stable-Baselines3 silently uses the CPU instead of a missing GPU.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1" ... or a ``torch.device``.

    Raises:
        ValueError: if torch does not support the device, or the GPU does not exist.
        RuntimeError: if torch makes new tensors on an accelerator by default, or not in float32.
    """
    _check_torch_defaults()
    if device == "auto":
        return
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}: {error}") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested.type == "cuda" and (requested.index or 0) >= gpus:
        raise ValueError(
            f"device={str(device)!r} requires a GPU that does not exist: torch finds {gpus or 'none'} on "
            f"this machine; use device='cpu', or 'auto', which uses a GPU if there is one"
        )


def _check_torch_defaults() -> None:
    """Check the defaults of torch for new tensors, on which agents rely.

    Raises:
        RuntimeError: if new tensors are not in float32, or on an accelerator; the message has the remedy.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32:
        raise RuntimeError(
            f"the default dtype of torch is {dtype}, and agents are in float32: call "
            f"torch.set_default_dtype(torch.float32) before you build or load an agent"
        )
    if device.type not in ("cpu", "meta"):  # on "meta", agents are built to compare their shapes
        raise RuntimeError(
            f"the default device of torch is {device}, and agents place their tensors themselves: call "
            f"torch.set_default_device('cpu') before you build or load an agent, and pass "
            f"device={device.type!r}"
        )


def check_gradients_enabled() -> None:
    """Check that gradients can be computed, before a training.

    Raises:
        RuntimeError: if they are disabled.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "a training needs gradients, and they are disabled: call learn outside of torch.no_grad() and "
            "torch.inference_mode()"
        )


def as_python_number(value: Any, whole: bool) -> Any:
    """Convert a scalar of NumPy, and an integral float if the number is whole; return other values as is."""
    value = to_builtin(value)
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def as_log_interval(value: Any) -> int:
    """Return the argument ``log_interval`` as an int; None, for no log as in SB3, becomes the largest one.

    Raises:
        TypeError, ValueError: as `as_whole_number`.
    """
    return MAX_INT64 if value is None else as_whole_number("log_interval", value, least=1)
