"""Links of the pages of implementation details to the lines of their sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from os.path import normpath
from pathlib import Path

PAGES = "explanation/implementation-details-"
"""Start of the path of the pages."""
SOURCE_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>[^)#\s]+\.py)\)")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def with_lines(text: str, page: str, root: Path) -> str:
    """Return the Markdown of a page whose links to sources lead to the line of the named function or class.

    Args:
        text: Markdown of the page.
        page: path of the page below docs/.
        root: root folder of the repository.
    """
    if not page.startswith(PAGES):
        return text

    def refer(link: re.Match[str]) -> str:
        file = normpath(root / "docs" / Path(page).parent / link["path"])
        line = lines(file).get(link["name"])
        anchor = "" if line is None else f"#L{line}"
        return f"[`{link['name']}`]({link['path']}{anchor})"

    return SOURCE_LINK.sub(refer, text)


@cache
def lines(file: str) -> dict[str, int]:
    """Return the dotted name of each class, function and method of a file -> its line."""
    return dict(definitions(ast.parse(Path(file).read_text(encoding="utf-8"))))


def definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield name and line of each class, function and method of a file, without nested functions."""
    for node in tree.body:
        if isinstance(node, Definition):
            yield prefix + node.name, node.lineno
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")
