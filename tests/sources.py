"""Parsed source files of the project, for tests of the source code."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def parsed(folder: str) -> dict[str, ast.Module]:
    """Return the syntax tree of each Python file below ``folder``, by its path in the repository.

    The trees are cached. Tests must not modify them.
    """
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every dotted name that a file imports; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
