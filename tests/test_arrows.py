"""Imports inside rlxf point one way (docs/design.md)."""

import ast
import sys
from graphlib import TopologicalSorter

import pytest

from rlxf import _HOME
from rlxf.cli import commands
from tests.sources import imported, parsed

MAY_IMPORT = {
    "attention": {"attention"},
    "utils": {"utils"},
    "envs": {"envs", "utils"},
    "training": {"training", "utils"},
    "evaluation": {"evaluation", "envs"},
    "collection": {"collection", "envs", "evaluation"},
    "agents": {"agents", "attention", "envs", "training", "utils"},
    "cli": {"agents", "attention", "cli", "collection", "envs", "evaluation", "training"},
    "__main__": {"cli"},
    "": {"agents", "attention", "collection", "envs", "evaluation"},  # rlxf/__init__.py: the public names
}
COMMANDS = {home.partition(":")[0] for home in commands.COMMANDS.values()}
TECHNIQUES = {"positions", "patterns", "kernels", "memory", "residuals", "heads"}
JOINERS = {"block", "depth", "spec", "transformer"}
EXTRAS = {"rlxf.attention.with_faiss": {"faiss"}}
"""What a module of the core imports beside torch, where it is asked for and installed."""


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(module: str) -> str:
    """``rlxf.envs.tmaze`` -> ``envs``; the package itself has none."""
    return [*module.split("."), ""][1]


class WithoutTypeImports(ast.NodeTransformer):
    """What is imported for annotations alone is not run, so it closes no circle."""

    def visit_If(self, node: ast.If) -> list[ast.stmt] | ast.If:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


SOURCES = {module_name(path): tree for path, tree in parsed("rlxf").items()}


def target(name: str) -> str:
    """The module of rlxf that is run when ``name`` is imported; a lazy public name leads to its home."""
    head, _, last = name.rpartition(".")
    if head == "rlxf" and last in _HOME:
        return _HOME[last]
    return name if name in SOURCES else head


def arrows(tree: ast.AST) -> set[str]:
    return {target(name) for name in imported(tree) if name.split(".")[0] == "rlxf"}


ARROWS = {module: arrows(tree) for module, tree in SOURCES.items()}


def test_an_arrow_is_seen_in_every_form_of_import():
    tree = ast.parse(
        "import rlxf.envs\nfrom rlxf import evaluate\ndef f():\n    from rlxf.attention import spec"
    )
    assert {room(target(name)) for name in imported(tree)} == {"envs", "evaluation", "attention"}


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_only_what_stands_below_it(module):
    rooms = {room(other) for other in ARROWS[module]} - {""}
    assert rooms <= MAY_IMPORT[room(module)], f"{module} imports {rooms - MAY_IMPORT[room(module)]}"


def test_there_is_no_circle():
    trees = {module_name(path): WithoutTypeImports().visit(tree) for path, tree in parsed("rlxf").items()}
    TopologicalSorter({module: arrows(tree) for module, tree in trees.items()}).prepare()


@pytest.mark.parametrize("module", [name for name in SOURCES if room(name) == "attention"])
def test_the_attention_core_imports_torch_alone(module):
    others = {name.split(".")[0] for name in imported(SOURCES[module])} - {"rlxf"}
    allowed = {"torch"} | EXTRAS.get(module, set())
    assert others - sys.stdlib_module_names <= allowed, f"{module} imports {others}"


@pytest.mark.parametrize("module", [name for name in SOURCES if TECHNIQUES & set(name.split(".")[2:3])])
def test_a_technique_knows_nothing_of_what_joins_it(module):
    above = {other for other in ARROWS[module] if JOINERS & set(other.split(".")[2:3])}
    assert not above, f"{module} imports {above}"


@pytest.mark.parametrize("module", SOURCES)
def test_a_command_is_reached_through_the_table_alone(module):
    assert not ARROWS[module] & COMMANDS, f"{module} imports {ARROWS[module] & COMMANDS}"
