"""Options that choose a dataclass by its name, or by a JSON object with its options."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlxf.utils.names import choose_one_of, plain_name


def parse_choice(option: str, text: str, choices: Mapping[str, type]) -> Any:
    """Return the instance that a text describes.

    The text is a name, ``max-return``, or a JSON object, ``{"name": "MaxReturn", "expectile": 0.9}``.
    Case, dashes and underscores of names are ignored.

    Args:
        option: name of the option, for messages.
        text: a name, or a JSON object with a name and options.
        choices: dataclasses by name.

    Raises:
        ValueError: if the name or an option does not exist, the value of an option is not allowed, or the
            text is not valid JSON.
        TypeError: if the value of an option has the wrong type.
    """
    if not text.lstrip().startswith("{"):
        return _named(option, text, choices)()
    try:
        given = dict(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: {text} is not valid JSON: {error}") from error
    if not isinstance(given.get("name"), str):
        raise ValueError(f'{option} must be a name or a JSON object with a "name", got {text}')
    chosen = _named(option, given.pop("name"), choices)
    known = [field.name for field in fields(chosen)]
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(
            f"{option}: {chosen.__name__} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    return chosen(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )


def choice_to_text(chosen: Any) -> str:
    """Return a text that `parse_choice` reads: the name, or a JSON object if an option has no default.

    Args:
        chosen: instance of a dataclass, whose options are JSON values or tuples of them.
    """
    values = {field.name: (getattr(chosen, field.name), field.default) for field in fields(chosen)}
    options = {name: value for name, (value, default) in values.items() if value != default}
    name = type(chosen).__name__
    return json.dumps({"name": name, **options}) if options else name


def _named(option: str, name: str, choices: Mapping[str, type]) -> Any:
    plain = {plain_name(each): each for each in choices}
    if plain_name(name) not in plain:
        raise ValueError(f"unknown {option} {name!r}{choose_one_of(name, choices)}")
    return choices[plain[plain_name(name)]]
