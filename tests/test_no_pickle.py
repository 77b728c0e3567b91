"""No source file can run code hidden in data: nothing unpickles, nothing evaluates text.

But one, which asks first: agents of Stable-Baselines3 come in through `import_sb3` alone.
"""

import ast

import pytest

from tests.sources import parsed

DOOR = "rlxf/agents/sb3.py"
MODULES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
CALLS = {"eval", "exec", "torch.load", "torch.save", "th.load", "th.save"}
SB3_READERS = {
    "load_from_pkl",
    "load_from_zip_file",
    "load_replay_buffer",
    "load_running_average",
    "json_to_data",
    "read_pickle",
}
"""Of Stable-Baselines3, and pandas: whatever they are called on, they unpickle."""
SAFE_LOADERS = {
    "CLASSES[name]",
    "DecisionTransformer",
    "GTrXLPPO",
    "MaskedPretraining",
    "SOURCES[name]",
    "cls",
    "json",
    "np",
    "safetensors.torch",
    "super()",
}
"""On which ``load`` may be called; on an agent or a VecNormalize of Stable-Baselines3 it unpickles."""


def unsafe(tree: ast.AST) -> list[str]:
    """What in a file reads or writes pickle or evaluates text, with its line."""
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree) if is_unsafe(node)]


def is_unsafe(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=attr) if attr in SB3_READERS:
            return True
        case ast.Attribute(value=value, attr="load"):
            return ast.unparse(value) not in SAFE_LOADERS
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in MODULES for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            full = {f"{module}.{alias.name}" for alias in names}
            named = {alias.name for alias in names}
            return module.split(".")[0] in MODULES or bool(full & CALLS) or bool(named & SB3_READERS)
        case ast.Call(func=func, keywords=keywords):
            return ast.unparse(func) in CALLS or any(allows_pickle(keyword) for keyword in keywords)
    return False


def allows_pickle(keyword: ast.keyword) -> bool:
    return keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"


SOURCES = parsed("rlxf") | parsed("scripts")


@pytest.mark.parametrize("path", sorted(SOURCES.keys() - {DOOR}))
def test_a_source_file_is_safe(path):
    found = unsafe(SOURCES[path])
    assert not found, f"{path}: {found}"


def test_the_door_opens_two_kinds_of_files_and_no_others():
    """`tests/agents/test_sb3.py` shows that it opens them to those who say that they trust them."""
    found = {line.partition(": ")[2] for line in unsafe(SOURCES[DOOR])}
    assert found == {"VecNormalize.load", "found.load"}


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
        "PPO.load(path)",
        "VecNormalize.load(path, env)",
        "algorithm.load(path)",
        "read = PPO.load",
        "agent.load_replay_buffer(path)",
        "from stable_baselines3.common.save_util import load_from_zip_file",
        "save_util.load_from_pkl(path)",
        "pandas.read_pickle(path)",
    ],
)
def test_the_check_sees(source):
    assert unsafe(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["np.load(f)", "np.load(f, allow_pickle=False)", "model.eval()", "json.load(f)", "GTrXLPPO.load(path)"],
)
def test_the_check_lets_pass(source):
    assert not unsafe(ast.parse(source))
