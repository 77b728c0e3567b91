"""Options that a settings file can set, and checks of their values."""

import math
import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlxf.agents.gtrxl.config import SCHEDULES
from rlxf.attention import TransformerSpec
from rlxf.attention.registry import TECHNIQUES, technique_from_json
from rlxf.cli.options import Command, NotACountError, read_count
from rlxf.cli.spec_options import SCALAR_OPTIONS, is_description, match_name, parse_technique
from rlxf.training.json_rules import MAPPING, TEXT, Rule, number, rule_of
from rlxf.utils.names import did_you_mean

CHOICES = ("objective", "conditioning", "sampling")
"""Options that take a name, or a table with a ``name`` and options."""
MAX_SHOWN = 100
"""Maximum length of a name that a message shows as a whole."""
JSON_TYPES = (dict[str, Any], dict[str, Any] | None)
"""Types of the options that are JSON objects."""
COMMAND_LINE_ONLY = ("config", "tuned", "trust")
"""Options that a settings file cannot set."""
REMEDIES = {
    "config": "pass one file with --config FILE",
    "tuned": "pass --tuned NAME in place of --config",
    "trust": "pass --trust",
    "help": "remove it",
}
"""Option of `COMMAND_LINE_ONLY`, or ``help`` -> what to do with it in a settings file."""


class SettingsError(ValueError):
    """Error in a setting.

    Args:
        name: full name of the setting.
        reason: what is wrong with it.
    """

    def __init__(self, name: str, reason: str):
        shown = name if name.isprintable() and len(name) <= MAX_SHOWN else reprlib.repr(name)
        super().__init__(f"{shown} {reason}")
        self.name = name


def check_settings(
    flat: Mapping[str, Any], command: type[Command], core: TransformerSpec | None, advice: str
) -> None:
    """Raise SettingsError if a setting is no option of a command, or its value is not allowed.

    Args:
        flat: settings by full name, as returned by `flat_options`.
        command: dataclass of the command.
        core: default core of the command; None for an agent without a transformer.
        advice: end of the message about an unknown setting that is similar to none.
    """
    known = known_options(command)
    if core is not None:
        for axis in TECHNIQUES:
            known |= _technique_options(axis, flat, core)
    names = {field.name for field in fields(command)}  # type: ignore[arg-type]  # commands are dataclasses
    refused = REMEDIES.keys() & {*names, "help"}
    for name, value in flat.items():
        if name in refused:
            raise _command_line_error(name)
        if name not in known:
            raise SettingsError(name, f"is not an option of this command{did_you_mean(name, known, advice)}")
        _check_value(name, known[name], value)
    for axis in TECHNIQUES if core is not None else ():
        _check_technique(axis, flat)


def check_values(flat: Mapping[str, Any], command: type[Command]) -> None:
    """Raise SettingsError if a number is not finite, or the value of an option has a wrong type.

    Unknown options, other than ``help``, and those of JSON tables are left to the command line.

    Args:
        flat: settings by full name, as returned by `flat_options`.
        command: dataclass of the command.
    """
    if "help" in flat:
        raise _command_line_error("help")
    known = known_options(command)
    for name, value in flat.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, float) and not math.isfinite(each):
                raise SettingsError(name, f"must be finite, got {each}")
        if name in known and known[name] not in JSON_TYPES and name not in CHOICES:
            _check_value(name, known[name], value)


def _command_line_error(name: str) -> SettingsError:
    return SettingsError(name, f"is for the command line only: {REMEDIES[name]}")


def _check_value(name: str, hint: Any, value: Any) -> None:
    rule = _rule(name, hint)
    if not rule.holds(value):
        raise SettingsError(name, f"must be {rule.allowed}, got {reprlib.repr(value)}")


def known_options(command: Any) -> dict[str, Any]:
    """Return name -> type of the options of a dataclass, without those of techniques."""
    known: dict[str, Any] = {}
    hints = get_type_hints(command)
    for field in fields(command):
        hint = hints[field.name]
        if hint is TransformerSpec:
            types_of = get_type_hints(TransformerSpec)
            known |= {f"core.{name}": types_of[name] for name in SCALAR_OPTIONS}
            known |= {f"core.{axis}": str | None for axis in TECHNIQUES}
        elif is_dataclass(hint):
            known |= known_options(hint)
        elif field.name not in COMMAND_LINE_ONLY:
            known[field.name] = hint
    return known


def default_core(command: Any, args: Sequence[str] = ()) -> TransformerSpec | None:
    """Return the default core of a command with these words; None for an agent without a transformer."""
    core = {field.name: field.default for field in fields(command)}.get("core")
    chosen = getattr(command.defaults(args), "core", core)
    return None if chosen is MISSING else chosen


def technique_name(axis: str, flat: Mapping[str, Any], core: TransformerSpec) -> str | None:
    """Return the name of the technique that the settings choose, or that of the default core.

    None means a description, or no text.

    Raises:
        SettingsError: if there is no technique of this name.
    """
    if (name := f"core.{axis}") not in flat:
        technique = getattr(core, axis)
        return str(None) if technique is None else type(technique).__name__
    text = "None" if flat[name] is None else flat[name]
    if not isinstance(text, str) or is_description(axis, text):
        return None
    try:
        return match_name(axis, text)
    except ValueError as error:
        raise SettingsError(name, f"is invalid: {error}") from error


def _technique_options(axis: str, flat: Mapping[str, Any], core: TransformerSpec) -> dict[str, Any]:
    technique = TECHNIQUES[axis].get(technique_name(axis, flat, core) or "")
    if technique is None:
        return {}
    hints = get_type_hints(technique)
    return {f"core.{axis}.{field.name}": hints[field.name] for field in fields(technique)}


def _check_technique(axis: str, flat: Mapping[str, Any]) -> None:
    """Raise SettingsError if a named or described technique refuses its options."""
    name = f"core.{axis}"
    text = flat.get(f"core.{axis}")
    if text is None:
        return
    start = f"{name}."
    options = {key.removeprefix(start): value for key, value in flat.items() if key.startswith(start)}
    try:
        if is_description(axis, text):
            parse_technique(axis, text)
        elif (known := match_name(axis, text)) in TECHNIQUES[axis]:
            technique_from_json(axis, {"name": known} | {key: _none(each) for key, each in options.items()})
    except (ValueError, TypeError) as error:
        raise SettingsError(name, f"is invalid: {error}") from error


def _none(value: Any) -> Any:
    return None if value == "None" else value


def _is_count(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        read_count([str(value)])
    except (NotACountError, ValueError):
        return False
    return True


_RULES = {
    int: Rule("a whole number below 1e19, such as 100_000 or 1e5", _is_count),
    types.NoneType: Rule('"None"', lambda value: value is None or value == "None"),
    Path: TEXT,
}


def _rule(name: str, hint: Any) -> Rule:
    """Return the values of an option that are allowed in a file."""
    rule = _rule_of(hint)
    if name in SCHEDULES:  # the text of a schedule, or a number
        return rule | number()
    return rule | MAPPING if name in CHOICES and hint is str else rule


def _rule_of(hint: Any) -> Rule:
    origin = get_origin(hint) or hint
    parts = get_args(hint)
    if origin in (Union, types.UnionType):
        return reduce(or_, map(_rule_of, parts))
    if origin is Literal:
        return Rule(f"one of {', '.join(map(str, parts))}", lambda value: value in parts)
    if origin is tuple:
        one = _rule_of(parts[0])
        several = Rule("", lambda value: isinstance(value, list | tuple) and all(map(one.holds, value)))
        return Rule(f"a list, each entry {one.allowed}", (one | several).holds)
    return _RULES.get(origin) or rule_of(hint)
