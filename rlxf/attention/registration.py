"""Registration of techniques that are defined outside of the package."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from rlxf.attention.depth.base import Depth
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.memory.base import Memory
from rlxf.attention.patterns.base import RULES, Pattern
from rlxf.attention.positions.base import Position
from rlxf.attention.recurrent.base import Recurrence
from rlxf.attention.registry import TECHNIQUES, techniques_of
from rlxf.attention.residuals.base import Residual
from rlxf.attention.technique import Technique, is_outdated
from rlxf.utils.names import plain_name

INTERFACES: dict[str, type[Technique]] = {
    "position": Position,
    "pattern": Pattern,
    "kernel": Kernel,
    "memory": Memory,
    "recurrence": Recurrence,
    "residual": Residual,
    "depth": Depth,
}
"""Axis -> base class of its techniques."""

RESERVED = {"none", "fitting"}
"""Words of the command line that stand for no technique and for the pattern that fits the memory."""

DESCRIPTIONS = ("paper", "causal_form", "cost")
"""Class variables of a technique that ``rlxf techniques NAME`` prints."""

USED_RULES: dict[str, Callable[[Pattern], Iterable[Pattern]]] = {
    "for_layer": lambda pattern: map(pattern.for_layer, range(2)),
    "for_heads": lambda pattern: pattern.for_heads(2),
    "query_rules": lambda pattern: pattern.query_rules,
}
"""Attribute of a pattern -> function that returns patterns whose rules are used instead of its own."""

Registered = TypeVar("Registered", bound=type[Technique])


def register_technique(axis: str) -> Callable[[Registered], Registered]:
    """Return a class decorator that adds a technique to an axis.

    Specs, JSON, checkpoints and the options of this process then accept the technique by the name of its
    class, like those of rlxf. Another process, such as one that loads the checkpoint, has to import the
    module of the technique first: a file never imports it.

    A class with the module and name of an earlier registration replaces it, so that a cell of a notebook can
    run twice. Any other technique of the same name is refused.

    Args:
        axis: axis of `TransformerSpec`, for example "pattern".

    Raises:
        ValueError: if the axis does not exist; from the decorator, if the name is taken or reserved, or the
            class lacks a part of a technique, or overrides the rule of a pattern that layers, heads or kinds
            of queries do not use.
        TypeError: from the decorator, if it is not applied to a frozen dataclass of the axis.
    """
    if axis not in TECHNIQUES:
        raise ValueError(f"there is no axis {axis!r}; choose one of {', '.join(TECHNIQUES)}")

    def register(technique: Registered) -> Registered:
        _check_class(axis, technique)
        _check_parts(technique)
        _check_rule(technique)
        _check_name(axis, technique)
        TECHNIQUES[axis][technique.__name__] = technique
        return technique

    return register


def _check_class(axis: str, technique: Any) -> None:
    base = INTERFACES[axis]
    if not isinstance(technique, type) or not issubclass(technique, base):
        raise TypeError(
            f"a technique of the axis {axis} must be a subclass of {_path(base)}, got {technique!r}"
        )
    parameters = technique.__dict__.get("__dataclass_params__")
    if not is_dataclass(technique) or parameters is None or not parameters.frozen:
        raise TypeError(
            f"{_path(technique)} must be a frozen dataclass: write @dataclass(frozen=True) between "
            f"@register_technique({axis!r}) and the class"
        )


def _check_parts(technique: type[Technique]) -> None:
    """Raise ValueError if a method, a default or a description is missing."""
    missing = sorted(getattr(technique, "__abstractmethods__", ()))
    missing += [name for name in DESCRIPTIONS if not isinstance(getattr(technique, name, None), str)]
    if missing or inspect.isabstract(technique):
        raise ValueError(f"{_path(technique)} must define {', '.join(missing)}")
    for field in fields(technique):  # type: ignore[arg-type]  # _check_class requires a dataclass
        if field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(
                f"{_path(technique)} must have a default for {field.name}: the command line creates a "
                f"technique from its name alone"
            )


def _check_rule(technique: type[Technique]) -> None:
    """Raise ValueError if layers, heads or kinds of queries of a pattern do not use the rule it overrides."""
    if not issubclass(technique, Pattern):
        return
    for name, used in USED_RULES.items():
        if not is_outdated(technique, name, RULES):
            continue
        if not all(isinstance(rule, technique) for rule in used(technique())):
            raise ValueError(
                f"{_path(technique)} overrides a rule, but inherits {name}, which returns patterns with "
                f"other rules; override {name} instead of the rule, or both"
            )


def _check_name(axis: str, technique: type[Technique]) -> None:
    """Raise ValueError if the command line could not tell the name from another one of the axis."""
    name = plain_name(technique.__name__)
    if name in RESERVED:
        raise ValueError(
            f"{_path(technique)} cannot be registered: {technique.__name__} is a word of the command line; "
            f"rename the class"
        )
    for other in techniques_of(axis).values():
        if plain_name(other.__name__) == name and _path(other) != _path(technique):
            raise ValueError(
                f"{_path(technique)} cannot be registered: the axis {axis} already has {_path(other)}; "
                f"rename the class"
            )


def _path(technique: type) -> str:
    """Return module and qualified name of a class."""
    return f"{technique.__module__}.{technique.__qualname__}"
