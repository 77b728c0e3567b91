"""Base class of commands, and types, help texts and checks of options that several commands share."""

import ast
import inspect
import json
import re
import shlex
from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from tyro import MISSING_NONPROP
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Options = TypeVar("Options")
MAX_EXPONENT = 18
"""Largest exponent of ten of a count; 10**18 exceeds the steps of any training."""
SUFFIXES = {"k": "e3", "K": "e3", "M": "e6"}
"""Suffix of a count -> exponent of ten."""


GIVEN_WORDS: ContextVar[tuple[str, ...]] = ContextVar("GIVEN_WORDS", default=())
"""Words of the command line that is parsed, without the program."""


def given_command() -> str:
    """Return the command line that is parsed, as text for a shell; empty if there is none."""
    words = GIVEN_WORDS.get()
    return shlex.join(["rlxf", *words]) if words else ""


class Command(ABC):
    """Options of a command, parsed from the command line."""

    @abstractmethod
    def prepare(self) -> Callable[[], None]:
        """Check the options, build all objects, and return the function that does the work.

        Raises:
            ValueError, TypeError, OSError: if an option is invalid; the message is shown to the user.
        """

    def check(self) -> None:  # noqa: B027 - optional
        """Check the options as far as possible without data, environments and the folder of a run.

        By default nothing is checked. `prepare` checks the same options, and ``rlxf experiment`` and ``rlxf
        sweep`` check those of all runs before they train any.

        Raises:
            ValueError, TypeError: if an option is invalid; the message is shown to the user.
        """

    @classmethod
    def defaults(cls, args: Sequence[str]) -> Any:
        """Return default options that depend on ``args``, e.g. the published settings that they name.

        By default ``tyro.MISSING_NONPROP``: the defaults of the class.
        """
        return MISSING_NONPROP

    @classmethod
    def replaced_options(cls, args: Sequence[str]) -> Collection[str]:
        """Return the names of the options that a single option in ``args`` sets, e.g. published settings.

        They take precedence over the values of these options in a settings file. By default none.
        """
        return ()

    @classmethod
    def registry(cls, args: Sequence[str]) -> ConstructorRegistry:
        """Return the tyro registry that parses ``args``."""
        registry = ConstructorRegistry()
        registry.primitive_rule(_count_rule)
        return registry


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[Options]) -> type[Options]:
    """Class decorator for a frozen dataclass of options, with keywords only.

    The docstring after a field is its help text. tyro would keep the line breaks of a docstring and wrap each
    of its lines again; here the lines of a docstring are one paragraph.
    """
    (definition,) = ast.parse(dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for line, after in pairwise(definition.body):
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(line.target, ast.Name)
            text = " ".join(without_markup(ast.literal_eval(after.value)).split())
            annotation = cls.__annotations__[line.target.id]
            cls.__annotations__[line.target.id] = Annotated[
                annotation, arg(help=text, help_behavior_hint=default_hint)
            ]
    return dataclass(frozen=True, kw_only=True)(cls)


def without_markup(docstring: str) -> str:
    """Return a docstring without the marks of code, which a terminal does not render."""
    return docstring.replace("``", "")


def default_hint(default: str) -> str:
    return f"(default: {default or 'none'})"


class NotACountError(Exception):
    """Error for an argument that is not a whole number below 10**19.

    It is not a ValueError, because tyro prints the whole help text with a ValueError.

    Args:
        text: the argument.
    """

    def __init__(self, text: str):
        super().__init__(
            f"must be a whole number below 1e19, such as 100000, 100_000, 100k or 1e5, got {text}"
        )
        self.text = text

    def message(self, args: Sequence[str]) -> str:
        """Return the message, prefixed with the option in ``args`` that has this value."""
        option = "a count"
        for word in args:
            option = word.partition("=")[0] if word.startswith("--") else option
            if word == self.text or word.endswith(f"={self.text}"):
                break
        return f"{option} {self}"


def _count_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Parse integers with `read_count`."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=read_count,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda number: [str(number)],
    )


def read_count(words: list[str]) -> int:
    """Parse a whole number such as ``100000``, ``100_000``, ``1e5``, ``100k`` or ``1.5M``.

    Raises:
        NotACountError: if the text is not a number, has a fractional part, or is 10**19 or more.
    """
    (text,) = words
    if text == "None":  # tyro then tries the None of an optional count
        raise ValueError(text)
    try:
        number = Decimal(re.sub(r"(?<=[\d.])[kKM]$", lambda suffix: SUFFIXES[suffix[0]], text))
    except InvalidOperation:
        raise NotACountError(text) from None
    if not number.is_finite() or number.adjusted() > MAX_EXPONENT or number != number.to_integral_value():
        raise NotACountError(text)
    return int(number)


Json = Annotated[dict[str, Any], arg(constructor=json.loads, metavar="JSON")]
"""Type of an option that is a JSON object."""
Device = Annotated[
    Literal["auto", "cpu", "cuda"], arg(help='Device of the tensors. "auto" selects the GPU if there is one.')
]
"""Option of all commands that use torch."""
PrecisionOption = Annotated[
    Literal["float32", "bf16-mixed"],
    arg(
        help='Precision of updates. "bf16-mixed" computes matrix products in bfloat16, which is faster for '
        "wide networks on processors with instructions for it. Weights, optimizer, losses and acting stay "
        "float32."
    ),
]
"""Option of all commands that train."""
Trust = Annotated[
    bool,
    arg(
        help="Trust the authors of the run and of its data. The module that their environment names is "
        "imported, and its arguments and wrappers are used. Without this flag, only registered environments "
        "are used."
    ),
]
"""Option of all commands that read a run."""
Quiet = Annotated[
    bool, arg(help="Print only warnings, errors and the final result, without settings and progress.")
]
"""Option of all commands that train."""
Track = Annotated[
    Literal["wandb", "trackio", "mlflow"] | None,
    arg(
        help="Experiment tracker that gets the values of the log, in addition to TensorBoard and "
        'progress.csv: W&B, Trackio or MLflow. It needs the extra "track". None means no tracker.'
    ),
]
"""Option of all commands that train in a run folder."""
Pretrained = Annotated[
    Path | None,
    arg(help='Folder of a run with initial weights, e.g. of "rlxf pretrain". None means random weights.'),
]
"""Option of the commands that train an agent with ``rlxf train``."""
TunedName = Annotated[
    str | None,
    arg(
        help='Name of the tuned settings of a task; "rlxf tuned" lists them with their results. Options on '
        "the command line override them."
    ),
]
"""Option of the commands for which the package has tuned settings."""
ConfigFile = Annotated[
    Path | None,
    arg(
        help="TOML file with values of these options, e.g. gamma = 0.9 or core.memory.length = 64; or the "
        "folder of a run, whose config.json is used. Options on the command line override the file."
    ),
]
"""Option of all commands that train."""
ConfigTrust = Annotated[
    bool,
    arg(
        help="With --config and the folder of a run: trust the authors of the run and of its data, as in "
        '"rlxf resume". Their environment can then run code.'
    ),
]
"""Option of all commands that train in an environment."""
CheckpointSeconds = Annotated[
    float, arg(help='Seconds between two checkpoints for "rlxf resume". The last three are kept.')
]
"""Option of all commands whose training can be resumed."""
StopReturn = Annotated[
    float | None,
    arg(
        help="Mean return of an evaluation during training at which the training ends, with the weights of "
        "this evaluation, e.g. the return of a solved task. The evaluation at the end, on other episodes, "
        "shows whether the task is solved. None means to train for all steps or updates."
    ),
]
"""Option of all commands that evaluate during training."""
LogInterval = Annotated[int, arg(help="Number of updates between two log entries.")]
"""Option of all commands that train on datasets."""


def given_options(args: Sequence[str], *names: str) -> dict[str, str]:
    """Return name -> value of the options ``--NAME VALUE`` and ``--NAME=VALUE`` that are in ``args``.

    As for tyro, ``_`` and ``-`` in names are equivalent.
    """
    return _given_options(args, names, "?")


def given_lists(args: Sequence[str], *names: str) -> dict[str, list[str]]:
    """Return name -> values of the options ``--NAME VALUE VALUE ...`` that are in ``args``.

    As for tyro, ``_`` and ``-`` in names are equivalent.
    """
    return _given_options(args, names, "*")


def _given_options(args: Sequence[str], names: Sequence[str], nargs: str) -> dict[str, Any]:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", dest=name, nargs=nargs)
    words = [with_dashes(word) for word in args]
    given = vars(parser.parse_known_args(words)[0])
    return {name: value for name, value in given.items() if value is not None}


def with_dashes(word: str) -> str:
    """Return a word of a command line with dashes in place of underscores in the name of an option."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def json_object(value: Any, option: str = "--env-kwargs") -> dict[str, Any]:
    """Return the value of an option after checking that it is a JSON object.

    Args:
        value: the value.
        option: name of the option, for the message.

    Raises:
        ValueError: if the value is not a dict.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {value!r}")
    return value


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {count}")


def check_options_not_negative(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None, or is finite and at least 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"--{name.replace('_', '-')} must be finite and at least 0, got {value}")


def argument_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each argument of the constructor of a class, by name."""
    return {name: argument.default for name, argument in inspect.signature(kind).parameters.items()}


def default_run_path(name: str, seed: int) -> Path:
    """Return the default folder of a run: runs/NAME-SEED, with dashes in place of special characters."""
    plain = re.sub(r"[^\w.-]+", "-", name)
    return Path("runs", f"{plain}-{seed}")


def check_new_folder(path: Path) -> None:
    """Raise FileExistsError if the folder of a new run exists, or a file has its name."""
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another folder with --run, or move the existing one")


def check_output_folder(path: Path) -> None:
    """Raise NotADirectoryError if ``--output``, which need not exist, or one of its parents is a file."""
    for each in (path, *path.parents):
        if each.exists() and not each.is_dir():
            raise NotADirectoryError(f"--output must be a folder, got the file {each}: choose another one")


def check_figure_path(option: str, path: Path, suffixes: Sequence[str] = (".png",)) -> None:
    """Raise ValueError unless a figure can be written to a path.

    Args:
        option: name of the option, for the message.
        path: the file.
        suffixes: supported suffixes in lower case.
    """
    if path.suffix.lower() not in suffixes or path.is_dir():
        raise ValueError(f"{option} must be a file name that ends in {', '.join(suffixes)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in an existing folder, got {path}: create {path.parent} first")


def check_stop_return(stop_return: float | None, evaluate_every: int | None, episodes: int) -> None:
    """Raise ValueError if ``--stop-return`` is not finite, or given without evaluations."""
    if stop_return is None:
        return
    if not isfinite(stop_return):
        raise ValueError(f"--stop-return must be a finite number or None, got {stop_return}")
    for name, value in (("--evaluate-every", evaluate_every), ("--episodes", episodes)):
        if value == 0:
            raise ValueError(f"--stop-return needs evaluations during training, got {name} 0: leave one out")
