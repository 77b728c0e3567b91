"""Public names of packages that are imported on first use (PEP 562), as their modules load torch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def import_lazily(name: str, modules: Mapping[str, str], namespace: dict[str, Any]) -> Any:
    """Import a public name from its module, and store it in the namespace of the package.

    Args:
        name: the name.
        modules: public name -> module that defines it.
        namespace: global variables of the package.

    Raises:
        AttributeError: if the package has no such public name.
    """
    if name not in modules:
        raise AttributeError(
            f"module {namespace['__name__']!r} has no attribute {name!r}; it has {', '.join(modules)}"
        )
    namespace[name] = getattr(import_module(modules[name]), name)
    return namespace[name]
