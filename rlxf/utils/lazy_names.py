"""Public names of packages that are imported on first use (PEP 562), as their modules load torch."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def modules_by_name(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return public name -> module that defines it, given the names by module."""
    return {name: module for module, defined in names.items() for name in defined}


def lazy_attributes(
    namespace: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    The first one imports a public name from its module, and stores it in the package. It raises
    AttributeError if the package has no such public name.

    Args:
        namespace: global variables of the package.
        modules: result of `modules_by_name`.
    """

    def import_lazily(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {namespace['__name__']!r} has no attribute {name!r}; it has {', '.join(modules)}"
            )
        namespace[name] = getattr(import_module(modules[name]), name)
        return namespace[name]

    return import_lazily, lambda: sorted({*namespace, *modules})
