"""Extension of griffe that prepares docstrings: lazy names, references, formulas, links to sources."""

from collections.abc import Callable
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Extension, Function, GriffeLoader, Module, Object

from website import api, names
from website.prose import prepared

LAZY_PACKAGES = ("rlxf", "rlxf.envs", "rlxf.evaluation", "rlxf.training")
"""Packages whose names are imported on first use, so that static analysis does not find them."""


class PreparedDocstrings(Extension):
    """Prepare all docstrings of a package after it was loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Add lazy names, then change the docstrings in place."""
        if pkg.path != "rlxf":
            return
        for package in LAZY_PACKAGES:
            add_lazy_names(pkg, package)
        prepare_members(pkg)


def add_lazy_names(root: Module, package: str) -> None:
    """Add the lazily imported names of a package as aliases of their definitions."""
    module = root if package == root.path else root[package.removeprefix(f"{root.path}.")]
    for name in names.public_names(package):
        if name not in module.members:
            module.set_member(name, Alias(name, f"{names.defining_module(package, name)}.{name}"))


def prepare_members(parent: Object) -> None:
    """Change the docstrings of an object and of its members, except aliases of other modules."""
    if parent.docstring:
        parent.docstring.value = prepared(parent.docstring.value, link_to(parent))
    if isinstance(parent, Class | Function):
        parent.extra["rlxf"]["source"] = f"{parent.relative_package_filepath}#L{parent.lineno}"
    for member in parent.members.values():
        if not member.is_alias:
            prepare_members(member)  # type: ignore[arg-type]


def link_to(scope: Object) -> Callable[[str], str | None]:
    """Return a function that finds the full name of a reference in the docstring of an object."""

    def find(name: str) -> str | None:
        first, _, rest = name.partition(".")
        base = _member(scope, first) or _in_module(scope, first) or None
        if base is None:
            return api.full_name(name)
        return f"{base}.{rest}" if rest else base

    return find


def _member(scope: Object, name: str) -> str | None:
    """Return the full name of a member of the object's class."""
    holder = scope if isinstance(scope, Class) else scope.parent
    if isinstance(holder, Class) and name in holder.members:
        return f"{holder.path}.{name}"
    return None


def _in_module(scope: Object, name: str) -> str | None:
    """Return the full name of a name of the object's module, where it is defined."""
    member = scope.module.members.get(name)
    if member is None:
        return None
    try:
        return str(member.target_path if isinstance(member, Alias) else member.path)
    except AliasResolutionError:
        return None
