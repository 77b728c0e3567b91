"""Extension of griffe that prepares docstrings: lazy names of packages, references, formulas.

In docstrings of rlxf, single backticks refer to names of the project; double backticks contain code or a formula.
"""

import re
from collections.abc import Callable
from html import escape
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Extension, GriffeLoader, Module, Object

from website import api
from website.formulas import FormulaError, formula_latex, is_formula

REFERENCE = re.compile(r"(?<!`)`(?P<name>[A-Za-z_][\w.]*)(?P<call>\(\))?`(?!`)")
DOUBLE = re.compile(r"``(?P<code>[^`]+)``")
SHARED_ENTRY = re.compile(r"^(?P<indent> {4})(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+):", re.MULTILINE)
ENTRY_END = re.compile(r"\n(?! {5})|\Z")
LAZY_PACKAGES = ("rlxf", "rlxf.envs")
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
    for name in api.public_names(package):
        if name not in module.members:
            module.set_member(name, Alias(name, f"{api.defining_module(package, name)}.{name}"))


def prepare_members(parent: Object) -> None:
    """Change the docstrings of an object and of its members, except aliases of other modules."""
    if parent.docstring:
        parent.docstring.value = prepared(parent.docstring.value, link_to(parent))
    for member in parent.members.values():
        if not member.is_alias:
            prepare_members(member)  # type: ignore[arg-type]


def prepared(text: str, link: Callable[[str], str | None] = lambda name: None) -> str:
    """Return a docstring as Markdown.

    Args:
        text: docstring of rlxf.
        link: function that returns the full name of a reference, or None if it is unknown.
    """
    text = split_shared_entries(text)
    text = DOUBLE.sub(lambda match: code_or_formula(match["code"]), text)

    def refer(match: re.Match[str]) -> str:
        code = f"<code>{escape(match['name'] + (match['call'] or ''))}</code>"
        path = link(match["name"])
        return f'<autoref identifier="{path}" optional>{code}</autoref>' if path else code

    return REFERENCE.sub(refer, text)


def code_or_formula(code: str) -> str:
    """Return the Markdown of the text between double backticks."""
    words = " ".join(code.split())
    if is_formula(words):
        try:
            return rf"\({formula_latex(words)}\)"
        except FormulaError:
            pass
    return f"``{words}``"


def split_shared_entries(text: str) -> str:
    """Return a docstring in which each parameter and exception has its own entry."""
    while match := SHARED_ENTRY.search(text):
        end = ENTRY_END.search(text, match.end())
        assert end is not None
        body = text[match.end() : end.start()]
        entries = [f"{match['indent']}{name}:{body}" for name in match["names"].split(", ")]
        text = text[: match.start()] + "\n".join(entries) + text[end.start() :]
    return text


def link_to(scope: Object) -> Callable[[str], str | None]:
    """Return a function that finds the full name of a reference in the docstring of an object."""

    def find(name: str) -> str | None:
        first, _, rest = name.partition(".")
        base = _member(scope, first) or _in_module(scope, first) or _public().get(first)
        return f"{base}.{rest}" if base and rest else base

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


_names: dict[str, str] = {}


def _public() -> dict[str, str]:
    """Return short -> full name of all names of the API reference."""
    if not _names:
        _names.update({name.rpartition(".")[2]: name for names in api.pages().values() for name in names})
    return _names
