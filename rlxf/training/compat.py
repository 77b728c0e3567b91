"""Checks that a file fits the agent or the run: contents, fields, versions and descriptions."""

import math
import os
import reprlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from operator import or_
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from rlxf.training.archive import Archive, read_archive
from rlxf.utils.errors import CheckpointError
from rlxf.utils.memory_budget import MemoryBudgetError

CONFIG = "config.json"
CHECKPOINT = "checkpoint.zip"
LOADERS = {
    "GTrXLPPO": "GTrXLPPO.load",
    "DecisionTransformer": "DecisionTransformer.load",
    "BehaviorCloning": "BehaviorCloning.load",
    "ReturnConditionedMLP": "ReturnConditionedMLP.load",
    "MaskedPretraining": "MaskedPretraining.load",
    "VecNormalize": "rlxf.training.load_normalizer",
}
"""Functions that load a file, by the name of its content."""
DEPTH = 2
"""Levels of subfolders that are searched for runs."""
MAX_LISTED = 12
"""Maximum number of runs that a message lists."""


def wrong_content_error(path: str | os.PathLike[str], archive: Archive, wanted: str) -> CheckpointError:
    """Return the error for a valid file that contains something other than ``wanted``."""
    return CheckpointError(f"{path} is valid, but contains no {wanted}: it contains {describe(archive)}")


def describe(archive: Archive) -> str:
    """Return a description of the content of a file and of the function that loads it."""
    name = _name(archive.documents)
    if name in LOADERS:
        content = "the statistics of a VecNormalize" if name == "VecNormalize" else f"a {name}"
        return f"{content}, which {LOADERS[name]} loads"
    members = ", ".join([*archive.documents, *archive.tensors]) or "nothing"
    return f"{members}, which rlxf.training.read_archive reads"


def describe_file(path: Path) -> str:
    """Return a description of the content of a file, or the error if rlxf cannot read it."""
    try:
        return f"it contains {describe(read_archive(path))}"
    except (CheckpointError, OSError) as error:
        return str(error)


def check_not_a_folder(path: str | os.PathLike[str], file: Path) -> None:
    """Raise IsADirectoryError if a folder is given instead of a file; suggest a checkpoint inside of it.

    Args:
        path: path as given by the user.
        file: the file that it denotes, with ".zip" added if the path has no suffix.
    """
    path = Path(path)
    if file.is_file() or not path.is_dir():
        return
    if (path / CHECKPOINT).is_file():
        raise IsADirectoryError(f"{path} is the folder of a run; give the file {path / CHECKPOINT}")
    example = "".join(f", such as {run / CHECKPOINT}" for run in _runs_in(path)[:1])
    raise IsADirectoryError(f"{path} is a folder; give a checkpoint file{example}")


def no_run_folder_message(path: Path) -> str:
    """Return the error message for a folder that is not a run folder, with the run folders inside of it."""
    runs = _runs_in(path)
    if not runs:
        return f"{path} is not a run folder: it has no {CONFIG}; give the folder of a run"
    listed = ", ".join(str(run) for run in runs[:MAX_LISTED])
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return f"{path} is not a run folder, but contains {len(runs)} of them: give one of {listed}{more}"


def _runs_in(path: Path) -> list[Path]:
    """Return the run folders inside of a folder, at most `DEPTH` levels deep, in sorted order."""
    levels = ["/".join("*" * depth) for depth in range(1, DEPTH + 1)]
    runs = {config.parent for level in levels for config in path.glob(f"{level}/{CONFIG}")}
    return sorted(run for run in runs if not run.name.startswith("."))  # hidden: temporary folders


def _name(documents: dict[str, Any]) -> str | None:
    for document in ("agent", "normalizer"):
        described = documents.get(document)
        if isinstance(described, dict) and isinstance(described.get("name"), str):
            return str(described["name"])
    return None


VERSION = version("rlxf")
BUILD_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that invalid values cause in code that builds an agent from a description."""


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Convert errors that occur while an agent is built from a file to CheckpointError.

    Raises:
        CheckpointError: in place of MemoryBudgetError and of the exceptions in `BUILD_ERRORS`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MemoryBudgetError as error:
        raise CheckpointError(f"the checkpoint is not loaded: {error}") from error
    except BUILD_ERRORS as error:
        raise CheckpointError(
            f"the checkpoint is valid, but this version of rlxf cannot build its agent: {error!r}"
        ) from error


def checkpoint_errors_unless_overridden(settings: Collection[str]) -> AbstractContextManager[None]:
    """Return `checkpoint_errors()`, or a null context if the user passed settings, which may be the cause."""
    return nullcontext() if settings else checkpoint_errors()


def check_known(settings: Collection[str], known: Collection[str], written_by: str | None) -> None:
    """Raise CheckpointError if a file contains settings that this version of rlxf does not know.

    Args:
        settings: names of the settings in the file.
        known: names of the settings of the agent.
        written_by: version of rlxf that wrote the file; None if the file does not state it.
    """
    if unknown := sorted(set(settings) - set(known)):
        writer = "an unknown version of rlxf" if written_by is None else f"rlxf {written_by}"
        advice = f"load it with {writer if written_by else 'the version that wrote it'}"
        if written_by == VERSION:
            advice = "it was altered, or written by other code under the same version"
        raise CheckpointError(
            f"the checkpoint was written by {writer} and has the settings {', '.join(unknown)}, which rlxf "
            f"{VERSION} does not know; {advice}"
        )


_REMEDY = "use another copy of the file"


@dataclass(frozen=True)
class Rule:
    """Set of values that are allowed for a field.

    Args:
        allowed: description for the error message, such as "an integer of at least 1".
        holds: predicate that returns whether a value is allowed.
    """

    allowed: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Rule") -> "Rule":
        """Return the rule that allows the values of either rule."""
        return Rule(
            f"{self.allowed} or {other.allowed}", lambda value: self.holds(value) or other.holds(value)
        )


def whole(least: float = -math.inf, most: float = math.inf) -> Rule:
    """Return the rule that allows integers from ``least`` to ``most``."""
    return Rule(
        "an integer" + _range(least, most), lambda value: type(value) is int and least <= value <= most
    )


def number(least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Rule:
    """Return the rule that allows finite numbers from ``least`` to ``most`` and larger than ``above``."""

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and above < value < math.inf

    more = "" if above == -math.inf else f" of more than {above:g}"
    return Rule("a number" + more + _range(least, most), holds)


def _range(least: float, most: float) -> str:
    if least == -math.inf:
        return "" if most == math.inf else f" of at most {most}"
    return f" of at least {least}" if most == math.inf else f" from {least} to {most}"


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
MAPPING = Rule("an object", lambda value: isinstance(value, dict))
NOTHING = Rule("null", lambda value: value is None)
TEXTS = Rule("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
SCHEDULE = Rule("a number", number().holds) | Rule("an object that describes a schedule", MAPPING.holds)
ANYTHING = Rule("anything", lambda value: True)
_KINDS: dict[Any, Rule] = {
    int: whole(),
    float: number(),
    bool: FLAG,
    str: TEXT,
    dict: MAPPING,
    types.NoneType: NOTHING,
    Callable: SCHEDULE,
}


def rule_of(annotation: Any) -> Rule:
    """Return the rule for a type annotation; `ANYTHING` for types that are not plain JSON data."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, types.UnionType):
        return reduce(or_, map(rule_of, get_args(annotation)))
    return _KINDS.get(origin, ANYTHING)


def check_fields(document: Any, rules: Mapping[str, Rule], where: str) -> None:
    """Raise CheckpointError unless a document has all required fields with allowed values.

    Args:
        document: JSON value from a file.
        rules: rules by name of the required field.
        where: name of the document, for the error message.
    """
    if not isinstance(document, dict):
        raise CheckpointError(
            f"the checkpoint's {where} is {reprlib.repr(document)}, not an object; {_REMEDY}"
        )
    for name, rule in rules.items():
        if name not in document:
            raise CheckpointError(f"the checkpoint's {where} lacks {name!r}; {_REMEDY}")
        if not rule.holds(document[name]):
            raise CheckpointError(
                f"the checkpoint's {where} has {name!r} = {reprlib.repr(document[name])}, which must be "
                f"{rule.allowed}; {_REMEDY}"
            )


KINDS = ("name", "type")
"""Keys that identify the object that a dictionary describes: name of a technique, type of a space."""


def first_difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any] | None:
    """Return the first place at which two JSON values differ, or None if they are equal.

    Dictionaries that describe objects of the same kind are compared entry by entry. Otherwise the result
    has the kinds: the names of two techniques, or the types of two spaces.

    Args:
        name: name of the compared value, e.g. "core".
        theirs: first value.
        ours: second value.

    Returns:
        Dotted name of the place, e.g. "core.residual.bias", and the two values at this place.
    """
    if theirs == ours:
        return None
    comparable = isinstance(theirs, dict) and isinstance(ours, dict) and _kind(theirs) == _kind(ours)
    if not comparable:
        return name, _kind(theirs) or theirs, _kind(ours) or ours
    keys = [*theirs, *(key for key in ours if key not in theirs)]
    differences = (first_difference(f"{name}.{key}", theirs.get(key), ours.get(key)) for key in keys)
    return next(difference for difference in differences if difference is not None)


def _kind(value: Any) -> Any:
    """Return the name or type of the object that a dictionary describes; None if it has neither."""
    return next((value[key] for key in KINDS if key in value), None) if isinstance(value, dict) else None
