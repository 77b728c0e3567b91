"""Tests that source files do not use pickle or evaluate text, so that data cannot run code.

The only exception is `import_sb3` for agents of Stable-Baselines3, which requires explicit trust.
"""

import ast

import pytest

from tests.sources import parsed

SB3_IMPORT = "rlxf/agents/sb3.py"
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
"""Functions and methods of Stable-Baselines3 and pandas that unpickle, for any object."""
SAFE_LOADERS = {
    "CLASSES[name]",
    "DecisionTransformer",
    "GTrXLPPO",
    "MaskedPretraining",
    "SOURCES[name]",
    "AGENTS[agent_name(run)]",
    "AGENTS[self.agent_name]",
    "OFFLINE_AGENTS[name]",
    "cls",
    "json",
    "np",
    "safetensors.torch",
    "super()",
}
"""Objects with a safe ``load``; that of agents and VecNormalize of Stable-Baselines3 unpickles."""


def unsafe(tree: ast.AST) -> list[str]:
    """Return the expressions of a file that use pickle or evaluate text, with their lines."""
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


@pytest.mark.parametrize("path", sorted(SOURCES.keys() - {SB3_IMPORT}))
def test_source_file_is_safe(path):
    expressions = unsafe(SOURCES[path])
    assert not expressions, f"{path}: {expressions}"


def test_sb3_import_unpickles_two_kinds_of_files_only():
    """`tests/agents/test_sb3.py` tests that it loads them only with explicit trust."""
    expressions = {line.partition(": ")[2] for line in unsafe(SOURCES[SB3_IMPORT])}
    assert expressions == {"VecNormalize.load", "agent_class.load"}


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
def test_unsafe_code_is_detected(source):
    assert unsafe(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["np.load(f)", "np.load(f, allow_pickle=False)", "model.eval()", "json.load(f)", "GTrXLPPO.load(path)"],
)
def test_safe_code_is_accepted(source):
    assert not unsafe(ast.parse(source))
