"""Check that the API reference documents all public names."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocstrings import Inventory

from website import names


def documented_names(inventory: Path) -> set[str]:
    """Return the names that a site documents, as its inventory (objects.inv) lists them."""
    with inventory.open("rb") as file:
        return set(Inventory.parse_sphinx(file))


def undocumented(required: Iterable[str], documented: set[str]) -> Iterator[str]:
    """Yield a message for each public name without an entry or without a docstring.

    Args:
        required: full names, such as ``rlxf.data.Windows``.
        documented: names with an entry; an entry may be that of the definition.
    """
    for name in sorted(required):
        if not {name, names.canonical(name)} & documented:
            yield f"{name} is public, but the API reference has no entry for it"
        elif not names.docstring(name):
            yield f"{name} is public, but has no docstring"
