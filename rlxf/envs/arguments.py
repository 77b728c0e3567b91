"""Creation of environments, with an error that names an unknown argument and the accepted ones."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def make_single(spec: EnvSpec, **kwargs: Any) -> gymnasium.Env:
    """Call ``gymnasium.make(spec, **kwargs)`` with the errors of `argument_errors`."""
    with argument_errors(spec, kwargs):
        return gymnasium.make(spec, **kwargs)


@contextmanager
def argument_errors(spec: EnvSpec, kwargs: dict[str, Any]) -> Iterator[None]:
    """Replace a TypeError from the creation of an environment by one that names the environment.

    Raises:
        TypeError: with the unknown argument and the accepted ones, or with the arguments that were passed.
    """
    try:
        yield
    except TypeError as error:
        match = UNEXPECTED.search(str(error))
        if match is not None and match[1] in kwargs:
            raise TypeError(f"{spec.id} takes no argument {match[1]!r}{_advice(spec, match[1])}") from error
        if spec.id in str(error):
            raise
        raise TypeError(f"{error}, raised during the creation of {spec.id} with {kwargs}") from error


def accepted_arguments(spec: EnvSpec) -> list[str]:
    """Return the names of the arguments of an environment, including those passed on to base classes."""
    if spec.entry_point is None:
        return []
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    classes: list[Any] = list(creator.__mro__[:-1]) if isinstance(creator, type) else []
    functions = [base.__init__ for base in classes] or [creator]
    names: dict[str, None] = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names |= {each.name: None for each in parameters if each.kind in _NAMED and each.name != "self"}
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
            break
    return list(names)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _advice(spec: EnvSpec, name: str) -> str:
    accepted = accepted_arguments(spec)
    near = get_close_matches(name, accepted, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it takes {', '.join(accepted)}" if accepted else "; it takes none"
