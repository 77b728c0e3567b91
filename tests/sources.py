"""The project's own source files, parsed, for the tests that read them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def parsed(folder: str) -> dict[str, ast.Module]:
    """Each Python file below ``folder``: its path from the root of the checkout, and its syntax tree."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a file imports; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
