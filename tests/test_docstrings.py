"""Tests of the language of docstrings, pages and code, and of the names and arguments that they mention."""

import ast
import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

import pytest

from rlxf.cli.commands import COMMANDS
from tests.sources import ROOT, parsed

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SOURCES = parsed("rlxf")
CODE_FILES = {**SOURCES, **parsed("scripts"), **parsed("tests"), **parsed("examples")}

QUESTION_WORDS = {"What", "Whether", "How", "Where", "Who", "Those", "That"}
"""A docstring begins with an imperative or a noun phrase, not with one of these words."""
REPLACED_WORDS = {
    "anew": "again",
    "told": "reported",
    "likeliest": "most likely",
    "foretold": "predicted",
    "whom": "a sentence with a subject",
    "beside": "next to, or compared with",
}
BRITISH_SPELLING = re.compile(
    r"\b\w*(?:normali|initiali|optimi|minimi|maximi|reali|serial|vectori|standardi|synchroni)s(?:e|ing|ation)\w*"
    r"|\b\w*(?:behaviour|neighbour|colour|favour|labell|modell|cancell(?!ation))\w*|\bgrey\b",
    re.IGNORECASE,
)
OTHER_SPELLING = {"CancelledError", "in_neighbour_embeddings"}
"""Names of the standard library and in files of reference vectors."""
FOREIGN_NAMES = {
    *("DataCollector", "combine_datasets", "create_dataset_from_buffers", "get_normalized_score"),  # Minari
    *(
        "AtariWrapper",
        "DistributedDataParallel",
        "ReLU",
        "exp_avg",
        "flex_attention",
        "get_float32_matmul_precision",
        "use_deterministic_algorithms",
    ),  # torch
    *("sync_tensorboard",),  # W&B
    *("record_mean",),  # Stable-Baselines3
    *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_INDEX"),  # environment variables and build arguments
    *(
        "JaxToTorch",
        "NumpyToTorch",
        "final_observation",
        "ManiSkillVectorEnv",
    ),  # Gymnasium and ManiSkill
    *("CnnPolicy", "MultiInputPolicy", "get_parameters"),  # Stable-Baselines3
    *("CallbackList", "save_freq", "eval_freq"),  # Stable-Baselines3
    *("AdroitHandPenSparse", "BreakoutNoFrameskip", "MemoryS7", "ale_py", "xml_file"),  # environments
    *("MyEnv", "MyPolicy", "my_schedule"),  # placeholders
    *("first_cases",),  # mark of pytest
    *("action_loss", "feed_forward_gate", "attention_gate", "return_loss", "state_loss"),  # tags, composed
    *("evaluation_best", "evaluation_datastore", "evaluation_validation"),
}
"""Names on pages and in docstrings that are defined by other projects, or composed at run time."""

SINGLE_BACKTICKS = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
"""Reference of a docstring to a name of the project; other code has double backticks."""
CODE = re.compile(r"(?<!`)(`{1,2})([^`\n]+)\1(?!`)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]")
FOREIGN_OPTIONS = {
    *("--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--signals-to-handle", "--shutdown-timeout", "--signal"),  # torchrun and Slurm
    *("--fast", "--thorough", "--record-long", "--logdir"),
    *("--help", "--version"),
    *("--tag", "--strict"),  # docker build and twine check
}
ARGUMENT = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:(?: |$)")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, inspect.cleandoc(node.value.value)


def prose(page: Path) -> str:
    """Return the text of a page without its programs and their output."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


# Language ------------------------------------------------------------------------------------------------


def question_words(text: str) -> bool:
    return not QUESTION_WORDS.isdisjoint(text.split()[:1])


def test_docstrings_begin_with_an_imperative_or_a_noun():
    found = [
        f"{path}:{line}"
        for path, tree in CODE_FILES.items()
        for line, text in docstrings(tree)
        if question_words(text)
    ]
    assert not found


def test_replaced_words_do_not_occur():
    files = [*PAGES, *(ROOT / path for path in CODE_FILES if ROOT / path != Path(__file__))]
    word = re.compile(rf"\b({'|'.join(REPLACED_WORDS)})\b", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}: {match}; write: {REPLACED_WORDS[match.lower()]}"
        for file in files
        for match in word.findall(file.read_text(encoding="utf-8"))
    ]
    assert not found


def british(text: str) -> set[str]:
    return set(BRITISH_SPELLING.findall(text)) - OTHER_SPELLING


def test_spelling_is_american():
    files = [*PAGES, *(ROOT / path for path in CODE_FILES if ROOT / path != Path(__file__))]
    found = {str(file): words for file in files if (words := british(file.read_text("utf-8")))}
    assert not found


@pytest.mark.parametrize("word", ["normalised", "behaviour", "Optimising", "neighbours", "cancelled"])
def test_british_spelling_is_found(word):
    assert british(word)


@pytest.mark.parametrize("word", ["normalized", "noise", "otherwise", "precise", "model", "cancellation"])
def test_other_words_are_not_british(word):
    assert not british(word)


# Names ---------------------------------------------------------------------------------------------------


@cache
def defined_names() -> set[str]:
    """Return the names that rlxf defines or imports: modules, classes, functions, arguments, attributes."""
    names = {*dir(builtins), *sys.stdlib_module_names}
    for path, tree in SOURCES.items():
        names |= set(Path(path).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.alias):
                names |= {*node.name.split("."), node.asname or ""}
    return names


@cache
def classes() -> dict[str, type]:
    """Return the classes of rlxf by name."""
    return {
        name: member
        for module in modules()
        for name, member in vars(module).items()
        if inspect.isclass(member) and member.__module__ == module.__name__
    }


def exists(reference: str) -> bool:
    """Return whether a dotted name refers to something: a name of rlxf, or one that can be imported."""
    first, *rest = reference.split(".")
    if first in classes() and rest:
        return rest[0] in members(classes()[first])
    if all(name in defined_names() for name in [first, *rest]):
        return True
    try:
        resolve_name(reference)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


def members(cls: type) -> set[str]:
    """Return the attributes of a class, including annotated ones and those that its methods assign."""
    found = set(dir(cls))
    for base in cls.__mro__:
        found |= annotated(base)
        if base.__module__.startswith("rlxf."):
            found |= assigned(base)
    return found


def annotated(cls: type) -> set[str]:
    """Return the annotated names in the body of a class, without those of its bases."""
    if sys.version_info < (3, 14):
        return set(vars(cls).get("__annotations__", {}))
    from annotationlib import Format, get_annotations  # evaluates annotations, which Python 3.14 does late

    return set(get_annotations(cls, format=Format.FORWARDREF))


def assigned(cls: type) -> set[str]:
    """Return the attributes that methods of a class assign: ``self.name = ...``."""
    path = Path(inspect.getfile(cls)).relative_to(ROOT).as_posix()
    nodes = (n for n in ast.walk(SOURCES[path]) if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return {
        n.attr
        for node in nodes
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }


def test_names_in_single_backticks_exist():
    found = [
        f"{path}:{line}: `{name}`"
        for path, tree in SOURCES.items()
        for line, text in docstrings(tree)
        for name in SINGLE_BACKTICKS.findall(text)
        if not exists(name)
    ]
    assert not found, "\n".join(["rlxf does not define these names:", *found])


@pytest.mark.parametrize(
    ("reference", "known"),
    [
        ("GTrXLPPO", True),
        ("GTrXLPPO.learn", True),
        ("RolloutBuffer.heard", False),
        ("GTrXLPPO.take_weights", False),
        ("torch.nn.Linear", True),
        ("torch.nn.Linnear", False),
        ("no_such_name", False),
    ],
)
def test_existence_of_names(reference, known):
    assert exists(reference) is known


OWN_PAGES = [page for page in PAGES if page.parent.name != "coming-from" and page.name != "comparison.md"]
"""Pages without names and options of other libraries, which the sources do not contain."""


@cache
def words_of_code() -> set[str]:
    """Return all words of the sources and of their strings and file names, without docstrings."""
    trees = {**SOURCES, **parsed("scripts")}
    words = {*dir(builtins), *FOREIGN_NAMES}
    scripts = [file.name for file in (ROOT / "scripts").glob("*.sh")]
    for path in [*trees, *parsed("tests"), *scripts]:
        words |= set(re.findall(r"\w+", path))
    for tree in trees.values():
        words |= set(words_of(tree))
    return words


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yield the names in a file, and the words in its strings other than docstrings."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and id(node) not in skipped:
                yield from re.findall(r"\w+", value)


def is_name(word: str) -> bool:
    """Return whether a word of code is a name, not a symbol such as ``n_ij``, ``W_r`` or ``softmax_j``."""
    if "_" in word.strip("_"):
        return all(len(part) > 2 for part in word.strip("_").split("_"))
    return sum(letter.isupper() for letter in word) > 1 and any(letter.islower() for letter in word[2:])


@pytest.mark.parametrize("word", ["context_length", "GTrXLPPO", "TMazeRules", "OMP_NUM_THREADS"])
def test_names_are_recognized(word):
    assert is_name(word)


@pytest.mark.parametrize("word", ["W_r", "softmax_j", "sum_ij", "Bin", "exp", "1e6", "GRU"])
def test_symbols_of_formulas_are_not_names(word):
    assert not is_name(word)


def unknown_names(text: str) -> set[str]:
    """Return the names in the code of a text that occur nowhere in the sources."""
    code = {word for _, code in CODE.findall(text) for word in re.findall(r"\w+", code)}
    return {word for word in code if is_name(word) and not word.endswith("_")} - words_of_code()


def test_names_on_pages_exist():
    found = {page.name: names for page in OWN_PAGES if (names := unknown_names(prose(page)))}
    assert not found


def test_attributes_on_pages_exist():
    """``Class.attribute`` of a class of rlxf."""
    names = [
        (page.name, name) for page in PAGES for name in re.findall(r"`(\w+\.\w+)(?:\(.*?\))?`", prose(page))
    ]
    found = [(page, name) for page, name in names if name.split(".")[0] in classes() and not exists(name)]
    assert not found


def test_names_in_code_of_docstrings_exist():
    found = {
        f"{path}:{line}": names
        for path, tree in SOURCES.items()
        for line, text in docstrings(tree)
        if (names := unknown_names(text))
    }
    assert not found


def test_renamed_names_are_found():
    assert unknown_names("see `forget_weights(other)` and ``GTrXLPPO``") == {"forget_weights"}


def test_foreign_names_are_used():
    text = "\n".join(
        [*map(prose, PAGES), *(text for tree in SOURCES.values() for _, text in docstrings(tree))]
    )
    assert not {name for name in FOREIGN_NAMES if name not in text}


@cache
def options() -> set[str]:
    """Return the options of all commands and benchmarks, with the prefixes of nested options."""
    import bench

    found = set(FOREIGN_OPTIONS)
    for options_class in [*map(resolve_name, COMMANDS.values()), *bench.BENCHMARKS.values()]:
        found |= {f"--{name.replace('_', '-')}" for name in nested_fields(options_class)}
    return found


def nested_fields(options_class: Any) -> set[str]:
    """Return the names of the fields of a dataclass and of the dataclasses in its fields."""
    names: set[str] = set()
    for name, field in inspect.signature(options_class).parameters.items():
        kind = field.annotation
        names.add(name)
        kind = resolve_annotation(options_class, kind)
        if inspect.isclass(kind) and hasattr(kind, "__dataclass_fields__"):
            names |= {*nested_fields(kind), *(f"{name}.{inner}" for inner in nested_fields(kind))}
    return names


def resolve_annotation(options_class: type, kind: Any) -> Any:
    """Return the class of an annotation ``Annotated[class, ...]`` or of a forward reference."""
    if isinstance(kind, str):
        kind = eval(kind, vars(sys.modules[options_class.__module__]))  # noqa: S307 - our own annotations
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def test_options_on_pages_exist():
    found = {
        page.name: unknown
        for page in OWN_PAGES
        if (unknown := {option for option in OPTION.findall(prose(page)) if not is_option(option)})
    }
    assert not found


def is_option(option: str) -> bool:
    """Return whether a command has this option; ``--core.AXIS.OPTION`` depends on the chosen technique."""
    option = re.sub("^--no-", "--", option) if option not in options() else option
    return option in options() or option.startswith("--core.")


def test_unknown_options_are_found():
    assert is_option("--total-timesteps")
    assert is_option("--sb3.files")
    assert not is_option("--across-episodes")


# Arguments -----------------------------------------------------------------------------------------------


@cache
def modules() -> list[Any]:
    """Return all modules of rlxf."""
    paths = (path.removesuffix(".py").removesuffix("/__init__") for path in SOURCES)
    return [importlib.import_module(path.replace("/", ".")) for path in paths if "__main__" not in path]


def documented() -> Iterator[Any]:
    """Yield the classes and functions of rlxf whose docstring has the section ``Args``."""
    for module in modules():
        for member in vars(module).values():
            if getattr(member, "__module__", "") == module.__name__:
                yield from (found for found in (member, *methods(member)) if arguments(found) is not None)


def methods(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class: methods, class methods and static methods."""
    for attribute in vars(member).values() if inspect.isclass(member) else ():
        function = getattr(attribute, "__func__", attribute)
        if inspect.isfunction(function):
            yield function


def arguments(member: Any) -> list[str] | None:
    """Return the names in the section ``Args`` of a docstring; None without such a section."""
    if not (inspect.isclass(member) or inspect.isfunction(member)) or not member.__doc__:
        return None
    text = inspect.cleandoc(member.__doc__)
    section = re.search(r"^Args:\n((?:(?: {4}.*)?\n?)+)", text, re.MULTILINE)
    if section is None:
        return None
    lines = map(ARGUMENT.match, section[1].splitlines())
    return [name.lstrip("*") for line in lines if line for name in line[1].split(", ")]


def parameters(member: Any) -> list[str]:
    """Return the public parameters of a function or constructor."""
    names = inspect.signature(member).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def described_elsewhere(member: Any) -> set[str]:
    """Return the parameters that other docstrings describe.

    These are the parameters of base classes, and those of the class in the sentence "The other arguments are
    those of `X`."
    """
    if not inspect.isclass(member):
        return set()
    names = {name for base in member.__mro__[1:-1] for name in signature_names(base)}
    other = re.search(r"The\s+other\s+arguments\s+are\s+those\s+of\s+`(\w+)`", member.__doc__ or "")
    return names | set(arguments(classes()[other[1]]) or ()) if other else names


def signature_names(cls: type) -> list[str]:
    try:
        return parameters(cls)
    except ValueError:  # a class of C code
        return []


def mismatch(member: Any) -> str | None:
    """Return the difference between a docstring and the signature; None if they match."""
    names, wanted = arguments(member) or [], parameters(member)
    missing = [name for name in wanted if name not in names and name not in described_elsewhere(member)]
    unknown = [name for name in names if name not in wanted]
    if missing or unknown:
        return f"{member.__module__}.{member.__qualname__}: missing {missing}, unknown {unknown}"
    if names != [name for name in wanted if name in names]:
        return f"{member.__module__}.{member.__qualname__}: Args are not in the order of the signature"
    return None


def test_args_sections_match_the_signatures():
    members = list(documented())
    assert len(members) > 300
    assert not [difference for member in members if (difference := mismatch(member))]


def documented_function(one: int, other: int) -> None:
    """Add.

    Args:
        one: first number:
            the second line.
        other, third: more numbers.
    """


def test_mismatches_are_found():
    assert arguments(documented_function) == ["one", "other", "third"]
    assert mismatch(documented_function) is not None
    assert "unknown ['third']" in mismatch(documented_function)
