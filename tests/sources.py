"""The project's own source files, parsed, for the tests that read them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def parsed(folder: str) -> dict[str, ast.Module]:
    """Each Python file below ``folder``: its path from the root of the checkout, and its syntax tree."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
