"""Public names of packages: their objects and docstrings."""

import ast
import inspect
from importlib import import_module
from types import ModuleType
from typing import Any


def public_names(package: str) -> list[str]:
    """Return the public names of a package: ``__all__``, or all that it exports except modules."""
    module = import_module(package)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]


def defining_module(package: str, name: str) -> str:
    """Return the module of a public class or function, or the package of another public value."""
    return getattr(getattr(import_module(package), name), "__module__", package)


def resolve(name: str) -> Any:
    """Return the object of a full name."""
    package, _, short = name.rpartition(".")
    return getattr(import_module(package), short)


def canonical(name: str) -> str:
    """Return the full name under which a public class or function is defined; other names stay."""
    value = resolve(name)
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{qualname}" if module and qualname else name


def docstring(name: str) -> str:
    """Return the docstring of a class, function or value; empty if it has none of its own."""
    value = resolve(name)
    if not inspect.isclass(value) and not inspect.isroutine(value):
        return _docstring_of_value(*name.rsplit(".", 1))
    text = value.__doc__ or ""
    is_generated = text.startswith(f"{value.__name__}(")  # by the decorator dataclass
    return "" if is_generated else inspect.cleandoc(text)


def _docstring_of_value(module: str, name: str) -> str:
    """Return the text after the assignment of a value, in a module or where the module imports it from."""
    nodes = ast.parse(inspect.getsource(import_module(module))).body
    body = [each for node in nodes for each in (node.body if isinstance(node, ast.If) else [node])]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and name in [each.asname or each.name for each in node.names]:
            return _docstring_of_value(str(node.module), name)
        if name in _assigned(node) and isinstance(following, ast.Expr):
            return str(ast.literal_eval(following.value))
    return ""


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(text.split("\n\n")[0].split())
