"""Check that the API reference documents all public names."""

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocstrings import Inventory

from website import api


def documented_names(inventory: Path) -> set[str]:
    """Return the names that a site documents, as its inventory (objects.inv) lists them."""
    with inventory.open("rb") as file:
        return set(Inventory.parse_sphinx(file))


def undocumented(names: Iterable[str], documented: set[str]) -> Iterator[str]:
    """Yield a message for each public name without an entry or without a docstring.

    Args:
        names: full names, such as ``rlxf.data.Windows``.
        documented: names with an entry; an entry may be that of the definition.
    """
    for name in sorted(names):
        if not {name, api.canonical(name)} & documented:
            yield f"{name} is public, but the API reference has no entry for it"
        elif not has_docstring(name):
            yield f"{name} is public, but has no docstring"


def has_docstring(name: str) -> bool:
    """Return whether a class or function has its own docstring; other values have no entry without one."""
    value = api.resolve(name)
    if not inspect.isclass(value) and not inspect.isroutine(value):
        return True
    text = value.__doc__ or ""
    return bool(text) and not text.startswith(f"{value.__name__}(")  # which dataclasses generate
