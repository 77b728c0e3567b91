"""Techniques own their exceptions: no module compares types with a technique of another module.

Code that needs to know something of a technique calls a method of its interface. New techniques can then
answer, too.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from rlxf.attention.registry import HEADS, TECHNIQUES
from tests.sources import parsed

AXES = ("positions", "patterns", "kernels", "memory", "recurrent", "residuals", "depth", "heads")
REGISTERED = {name for axis in TECHNIQUES.values() for name in axis} | set(HEADS)
SOURCES = parsed("rlxf")
COMPOSER = "rlxf/attention/registry.py"
"""The table of techniques, which names all of them."""


def topic(path: str) -> tuple[str, str]:
    """Return package and first word of a file: ``memory/knn.py`` -> ("rlxf/attention/memory", "knn")."""
    file = PurePath(path)
    return str(file.parent), file.stem.split("_")[0]


def technique_classes() -> dict[str, str]:
    """Return name -> file of each technique and of each other class of their modules, without interfaces."""
    files = [path for path in SOURCES if PurePath(path).parent.name in AXES]
    return {
        node.name: path
        for path in files
        if path.startswith("rlxf/attention/")
        for node in SOURCES[path].body
        if isinstance(node, ast.ClassDef) and (PurePath(path).name != "base.py" or node.name in REGISTERED)
    }


CLASSES = technique_classes()


def imported_classes(tree: ast.Module) -> dict[str, str]:
    """Return local name -> class for each class of a technique that a module imports."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlxf"
        for alias in node.names
        if alias.name in CLASSES
    }


def compared(node: ast.AST) -> list[ast.expr]:
    """Return the expressions of a node that name the classes of a comparison of types, or a list of them."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.MatchClass):
        return [node.cls]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [part for part in node.elts if isinstance(part, ast.Name)]
    return []


def offenses(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the file and each class of a technique of another file that it compares types with."""
    names = imported_classes(tree)
    subscripts = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    of_types = {id(part) for subscript in subscripts for part in ast.walk(subscript)}
    for node in (node for node in ast.walk(tree) if id(node) not in of_types):
        for part in (part for expression in compared(node) for part in ast.walk(expression)):
            name = names.get(part.id) if isinstance(part, ast.Name) else None
            if name is not None and topic(CLASSES[name]) != topic(path):
                yield path, name


def test_every_technique_is_known():
    assert set(CLASSES) >= REGISTERED


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(kernel, LSH)",
        "isinstance(kernel, int | LSH)",
        "isinstance(kernel, (int, LSH))",
        "issubclass(kind, LSH)",
        "type(kernel) is not LSH",
        "type(kernel) in (LSH,)",
        "kernel == LSH()",
        "HASHING = (Other, LSH)",
        "match kernel:\n    case LSH():\n        pass",
    ],
)
def test_all_forms_of_comparison_are_detected(code):
    tree = ast.parse(f"from rlxf.attention import LSH\n{code}")
    assert set(offenses("rlxf/attention/layers.py", tree)) == {("rlxf/attention/layers.py", "LSH")}
    assert not set(offenses("rlxf/attention/kernels/lsh.py", tree))


def test_use_of_a_technique_is_no_comparison():
    tree = ast.parse(
        "from rlxf.attention import LSH\nkernel: LSH = LSH()\ndef f(x: LSH) -> tuple[LSH, int]: ..."
    )
    assert not set(offenses("rlxf/attention/layers.py", tree))


def test_techniques_own_their_exceptions():
    found = {
        offense for path, tree in SOURCES.items() if path != COMPOSER for offense in offenses(path, tree)
    }
    assert found == set()
