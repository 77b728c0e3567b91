"""Tests of the dependencies between the packages of rlxf (docs/design.md)."""

import ast
import sys
from graphlib import TopologicalSorter

import pytest

from rlxf import _MODULES
from rlxf.cli.commands import COMMANDS as COMMAND_TABLE
from tests.sources import imported, parsed

MAY_IMPORT = {
    "utils": {"utils"},
    "attention": {"attention", "utils"},
    "data": {"data", "utils"},
    "envs": {"data", "envs", "utils"},
    "training": {"training", "utils"},
    "evaluation": {"data", "evaluation", "envs", "utils"},
    "collection": {"collection", "data", "envs", "evaluation", "utils"},
    "export": {"export", "utils"},
    "agents": {"agents", "attention", "data", "envs", "evaluation", "export", "training", "utils"},
    "off_policy_evaluation": {
        *("agents", "attention", "data", "envs", "evaluation", "off_policy_evaluation", "utils"),
    },
    "experiments": {"data", "evaluation", "experiments", "training", "utils"},
    "sharing": {"sharing", "utils"},
    "tuned": {"tuned", "utils"},
    "cli": {
        *("agents", "attention", "cli", "collection", "data", "envs", "evaluation"),
        *("experiments", "export", "off_policy_evaluation", "sharing", "training", "tuned", "utils"),
    },
    "__main__": {"cli"},
    "": {
        "agents",
        "attention",
        "collection",
        "envs",
        "evaluation",
        "off_policy_evaluation",
        "utils",
    },  # rlxf/__init__.py with the public names
}
COMMANDS = {home.partition(":")[0] for home in COMMAND_TABLE.values()}
TECHNIQUES = {"positions", "patterns", "kernels", "memory", "recurrent", "residuals", "depth", "heads"}
COMPOSERS = {
    *("depth", "encoder_decoder", "functional_step", "fused_step", "inspection", "layer_stack", "layers"),
    *("segmented", "spec", "transformer", "transformer_layers"),
}
COMPOSES = {"rlxf.attention.residuals.reversible": {"rlxf.attention.layer_stack"}}
"""Technique that runs the layers itself: `Reversible` inverts their sublayers."""


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str) -> str:
    """Return the package of a module: ``rlxf.envs.tmaze`` -> ``envs``; empty for rlxf itself."""
    return [*module.split("."), ""][1]


def without_type_imports(tree: ast.Module) -> ast.Module:
    """Return the module without the imports under TYPE_CHECKING, which cannot cause import cycles."""
    body: list[ast.stmt] = []
    for node in tree.body:
        only_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        body += node.orelse if only_types else [node]
    return ast.Module(body, [])


SOURCES = {module_name(path): tree for path, tree in parsed("rlxf").items()}


def target(name: str) -> str:
    """Return the module that an import of ``name`` loads; for a lazy public name, its module."""
    head, _, last = name.rpartition(".")
    if head == "rlxf" and last in _MODULES:
        return _MODULES[last]
    return name if name in SOURCES else head


def imported_modules(tree: ast.AST) -> set[str]:
    return {target(name) for name in imported(tree) if name.split(".")[0] == "rlxf"}


IMPORTS = {module: imported_modules(tree) for module, tree in SOURCES.items()}


def test_all_forms_of_import_are_detected():
    tree = ast.parse(
        "import rlxf.envs\nfrom rlxf import evaluate\ndef f():\n    from rlxf.attention import spec"
    )
    assert {package_of(target(name)) for name in imported(tree)} == {"envs", "evaluation", "attention"}


@pytest.mark.parametrize("module", SOURCES)
def test_package_imports_only_allowed_packages(module):
    packages = {package_of(other) for other in IMPORTS[module]} - {""}
    assert packages <= MAY_IMPORT[package_of(module)], (
        f"{module} imports {packages - MAY_IMPORT[package_of(module)]}"
    )


def test_there_are_no_import_cycles():
    graph = {module: imported_modules(without_type_imports(tree)) for module, tree in SOURCES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [name for name in SOURCES if package_of(name) == "attention"])
def test_attention_imports_only_torch(module):
    others = {name.split(".")[0] for name in imported(SOURCES[module])} - {"rlxf"}
    assert others - sys.stdlib_module_names <= {"torch"}, f"{module} imports {others}"


def part_of(module: str) -> str:
    """Return the part of a package, or "" for the package: ``rlxf.attention.depth.act`` -> ``depth``."""
    return [*module.split("."), "", ""][2]


def composers(module: str, imports: set[str]) -> set[str]:
    """Return the imports of a technique that compose techniques and are not in its own package."""
    return {other for other in imports if part_of(other) in COMPOSERS - {part_of(module)}}


@pytest.mark.parametrize("module", [name for name in SOURCES if part_of(name) in TECHNIQUES])
def test_technique_does_not_import_its_composition(module):
    above = composers(module, IMPORTS[module])
    assert above <= COMPOSES.get(module, set()), f"{module} imports {above}"


def test_composers_are_found():
    imports = {"rlxf.attention.depth.base", "rlxf.attention.segmented", "rlxf.attention.technique"}
    assert composers("rlxf.attention.recurrent.gru", imports) == {
        "rlxf.attention.depth.base",
        "rlxf.attention.segmented",
    }
    assert composers("rlxf.attention.depth.act", imports) == {"rlxf.attention.segmented"}


@pytest.mark.parametrize("module", SOURCES)
def test_commands_are_not_imported_directly(module):
    assert not IMPORTS[module] & COMMANDS, f"{module} imports {IMPORTS[module] & COMMANDS}"
