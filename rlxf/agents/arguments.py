"""Handling of Stable-Baselines3 arguments: accept them, or raise an error that names the alternative."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from stable_baselines3.common.utils import get_system_info

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Refused:
    """An argument of Stable-Baselines3 that does not exist here.

    Args:
        advice: the reason and the alternative, appended to the error message.
        neutral: accepted values that have no effect, e.g. the default of Stable-Baselines3.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


def explain_unknown(refused: Mapping[str, Refused]) -> Callable[[Callable[P, R]], Callable[P, R]]:
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

    ``custom_objects`` holds constructor arguments; those passed as keywords take precedence.
    ``print_system_info=True`` prints the versions on this machine. ``force_reset=True`` has no effect.

    Raises:
        ValueError: if ``force_reset`` is False, since the file of an agent does not hold its episodes.
    """
    own = dict(settings)
    if own.pop("print_system_info", False):
        get_system_info()
    if not own.pop("force_reset", True):
        raise ValueError(
            "force_reset=False is not possible, since the file of an agent does not hold its episodes: to "
            "continue a training in the middle of the episodes use learn(..., resume_from=FILE)"
        )
    replaced = dict(own.pop("custom_objects", None) or {})
    if "policy_class" in replaced:
        replaced["policy"] = replaced.pop("policy_class")
    return replaced | own


def nearest(name: str, known: list[str]) -> str:
    """Return ``"; did you mean NAME?"`` for the most similar known name, or "" if none is similar."""
    match = get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_neutral(owner: str, name: str, value: Any, known: list[str], refused: Refused | None) -> None:
    if refused is None:
        public = [each for each in known if each != "self" and not each.startswith("_")]
        hint = nearest(name, public) or f"; it takes {', '.join(public)}"
        raise TypeError(f"{owner} takes no argument {name!r}{hint}")
    if not any(value is each or value == each for each in refused.neutral):
        raise TypeError(f"{owner} takes no argument {name!r}: {refused.advice}")
