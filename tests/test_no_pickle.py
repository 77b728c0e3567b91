"""No source file can run code hidden in data: nothing unpickles, nothing evaluates text."""

import ast

import pytest

from tests.sources import parsed

MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
CALLS = {"eval", "exec", "torch.load", "torch.save", "th.load", "th.save"}


def unsafe(tree: ast.AST) -> list[str]:
    """What in a file reads or writes pickle or evaluates text, with its line."""
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree) if is_unsafe(node)]


def is_unsafe(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in MODULES for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            full = {f"{module}.{alias.name}" for alias in names}
            return module.split(".")[0] in MODULES or bool(full & CALLS)
        case ast.Call(func=func, keywords=keywords):
            return ast.unparse(func) in CALLS or any(allows_pickle(keyword) for keyword in keywords)
    return False


def allows_pickle(keyword: ast.keyword) -> bool:
    return keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"


SOURCES = parsed("rlxf") | parsed("scripts")


@pytest.mark.parametrize("path", SOURCES)
def test_a_source_file_is_safe(path):
    found = unsafe(SOURCES[path])
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle as cp",
        "from pickle import loads",
        "from torch import load",
        "torch.load(f, weights_only=True)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "eval(text)",
    ],
)
def test_the_check_sees(source):
    assert unsafe(ast.parse(source))


@pytest.mark.parametrize(
    "source", ["np.load(f)", "np.load(f, allow_pickle=False)", "model.eval()", "json.load(f)"]
)
def test_the_check_lets_pass(source):
    assert not unsafe(ast.parse(source))
