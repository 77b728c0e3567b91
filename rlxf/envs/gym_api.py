"""Resets of environments, and errors for a ``reset`` or ``step`` without the interface of Gymnasium."""

import re
from traceback import walk_tb
from typing import Any

import gymnasium

from rlxf.utils.errors import FaultyEnvironmentError

RESULTS = {
    "reset": ("(observation, info)", 2),
    "step": ("(observation, reward, terminated, truncated, info)", 5),
}
"""Method -> its results in Gymnasium, and their number."""
WRAPPERS = ("gymnasium", "stable_baselines3", "rlxf")
"""Packages whose wrappers call environments correctly."""


def checked_reset(env: gymnasium.Env, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Reset an environment.

    Raises:
        FaultyEnvironmentError: if ``reset`` does not have the interface of Gymnasium.
    """
    try:
        observation, info = env.reset(**options)
    except (TypeError, ValueError) as error:
        raise_interface_error("reset", env, error)
        raise
    check_info("reset", env, info)
    return observation, info


def reset_env(
    env: gymnasium.Env, seed: int | None, options: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Reset an environment; older environments take no options, so None is not passed.

    Raises:
        FaultyEnvironmentError: if ``reset`` does not have the interface of Gymnasium.
    """
    return checked_reset(env, seed=seed, **({} if options is None else {"options": options}))


def check_info(method: str, env: gymnasium.Env, info: Any) -> None:
    """Raise FaultyEnvironmentError unless the info of ``reset`` or ``step`` is a dict."""
    if not isinstance(info, dict):
        raise _results_error(method, env, f"its info is {info!r}, not a dict")


def raise_interface_error(method: str, env: gymnasium.Env, error: Exception) -> None:
    """Raise FaultyEnvironmentError if ``error`` comes from an interface other than that of Gymnasium.

    It does if a wrapper cannot unpack the results of the environment, or ``reset`` refuses an argument.

    Args:
        method: "reset" or "step", which raised the error.
        env: the environment, in any wrappers.
        error: the error.
    """
    text = str(error)
    refused = re.search(r"reset\(\) got an unexpected keyword argument '(seed|options)'", text)
    if method == "reset" and refused and _in_wrapper(error):
        raise FaultyEnvironmentError(
            f"reset of {env.unwrapped} does not accept {refused[1]!r}, as in the API of gym < 0.26: define "
            f"it as reset(self, *, seed=None, options=None), or wrap the environment"
        ) from error
    number = RESULTS[method][1]
    unpacking = re.search(rf"values to unpack \(expected {number}|cannot unpack", text)
    if unpacking and _in_wrapper(error):
        found = re.search(r"got (\d+)\)", text)
        fault = f"{found[1]} values are" if found and method == "step" else "other values may be"
        raise _results_error(method, env, f"{fault} the API of gym < 0.26") from error


def _in_wrapper(error: Exception) -> bool:
    """Return whether an error was raised by code of `WRAPPERS`, not by an environment or another wrapper."""
    frame, _ = list(walk_tb(error.__traceback__))[-1]
    return frame.f_globals.get("__name__", "").partition(".")[0] in WRAPPERS


def _results_error(method: str, env: gymnasium.Env, fault: str) -> FaultyEnvironmentError:
    results, _ = RESULTS[method]
    return FaultyEnvironmentError(
        f"{method} of {env.unwrapped} must return {results}; {fault}: correct the environment, or wrap it"
    )
