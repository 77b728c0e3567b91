"""Reading of TOML files that users write, with the file and the line in messages of errors."""

from collections.abc import Collection, Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any

from rlxf.utils.names import choose_one_of, did_you_mean, similar_name
from rlxf.utils.toml import line_of, loads, read_text

MAX_RUNS = 100_000
MAX_SEED = 2**32 - 1
"""Maximum seed of a run: the largest one of the generators of NumPy that Stable-Baselines3 seeds."""
RESERVED = ("seed", "run")
"""Options that are set for each run."""
SIMILAR_OPTIONS = ("n_envs",)
"""Options of training commands whose names are similar to a key that a table needs: to "env"."""


class PlanError(ValueError):
    """Error in a file. The message begins with the file and, if it is known, the line."""


def read_toml(path: Path, kind: str) -> tuple[dict[str, Any], str]:
    """Return the content of a TOML file, and its text.

    Args:
        path: the file.
        kind: name of such a file in messages, e.g. "experiment file".

    Raises:
        PlanError: if the file is too large, not TOML in UTF-8, or too complex.
        OSError: if the file cannot be read.
    """
    try:
        text = read_text(path, kind)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; check the path") from None
    except ValueError as error:
        raise PlanError(str(error)) from None
    try:
        return loads(text), text
    except (TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not a TOML file: {error}") from None
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from None


class TomlReader:
    """Checks of a TOML document, with the file and the line in messages of errors.

    Args:
        path: the file.
        text: its content.
    """

    setter = "the experiment"
    """Name of what sets the options of `RESERVED`, for messages."""
    top_level_keys: tuple[str, ...] = ()
    """Keys of the file that stand before its tables. They are no options."""

    def __init__(self, path: Path, text: str):
        self.path = path
        self.text = text

    def table(self, value: Any, where: str) -> dict[str, Any]:
        """Return a table after a check of its type."""
        if not isinstance(value, dict):
            raise self.error(where, f"{where} must be a table, got {value!r}")
        return value

    def command(self, owner: str, where: str, table: Mapping[str, Any], known: Collection[str]) -> str:
        """Return the words of the command of a table after a check that it is one of the known ones.

        Args:
            owner: what has the command, e.g. "agent NAME", or "" for the file.
            where: full name of the table, "" for the file.
            table: the table.
            known: commands that are allowed.
        """
        command, key = table.get("command"), where or "command"
        if not isinstance(command, str) or command not in known:
            if command is None:
                self.check_spelling(table, ("command",), where)
                advice = choose_one_of("", known)
                raise self.error(key, f"{owner or 'the file'} has no command: add one{advice}")
            of = f" of {owner}" if owner else ""
            raise self.error(key, f"command{of} is {command!r}{choose_one_of(str(command), known)}")
        return command

    def seeds(self, seeds: Any) -> tuple[int, ...]:
        """Return the seeds, given as a list, or as their number."""
        if type(seeds) is int and 0 < seeds <= MAX_RUNS:
            return tuple(range(seeds))
        given = seeds if isinstance(seeds, list) else []
        valid = all(type(each) is int and 0 <= each <= MAX_SEED for each in given)
        if not given or not valid or len(set(given)) < len(given):
            raise self.error(
                "seeds",
                f"seeds must be a number, or a list of different seeds from 0 to {MAX_SEED:,}, got {seeds!r}",
            )
        return tuple(seeds)

    def check_keys(self, table: Mapping[str, Any], known: tuple[str, ...], where: str = "") -> None:
        """Raise PlanError if a table has an unknown key; the message proposes a similar one.

        Args:
            table: the table.
            known: keys that are allowed.
            where: full name of the table, "" for the file.
        """
        for key in table:
            if key not in known:
                advice = did_you_mean(key, known, f"known keys are {', '.join(known)}")
                name = f"{where}.{key}" if where else key
                raise self.error(name, f"{where or 'the file'} has an unknown key {key}{advice}")

    def check_spelling(self, table: Mapping[str, Any], missing: Collection[str], where: str) -> None:
        """Raise PlanError if a key of a table is similar to one that the table lacks.

        Args:
            table: the table.
            missing: keys that the table needs, and does not have.
            where: full name of the table.
        """
        for key in table:
            if (near := similar_name(key, [*missing, *SIMILAR_OPTIONS])) in missing:
                raise self.error(f"{where}.{key}", f"{where} has an unknown key {key}; did you mean {near}?")

    def options(self, value: Any, where: str) -> dict[str, Any]:
        """Return a table of options with underscores in their names, after checks of type and names.

        Raises:
            PlanError: if it is no table, or an option occurs twice, is set for each run, or is a key of the
                file.
        """
        options = self._with_underscores(self.table(value, where), where)
        self.check_reserved(options, where)
        return options

    def _with_underscores(
        self, table: Mapping[str, Any], where: str, is_core: bool = False
    ) -> dict[str, Any]:
        """Return a table with underscores in its keys, and in those of ``core`` on all levels."""
        found: dict[str, Any] = {}
        for key, value in table.items():
            name = key.replace("-", "_")
            if name in found:
                raise self.error(f"{where}.{key}", f"{where} has {name} twice, in two spellings: remove one")
            nested = isinstance(value, dict) and (is_core or name == "core")
            found[name] = self._with_underscores(value, f"{where}.{name}", True) if nested else value
        return found

    def check_reserved(self, settings: Mapping[str, Any], where: str) -> None:
        """Raise PlanError if settings contain an option that is set for each run, or a key of the file."""
        for key in settings:
            name = key.replace("-", "_")
            if name in RESERVED:
                message = f"{where} has {name}, which {self.setter} sets for each run: remove it"
                raise self.error(f"{where}.{name}", message)
            if name in self.top_level_keys:
                message = f"{where} has {name}, which is a key of the file: write it before the first table"
                raise self.error(f"{where}.{name}", message)

    def error(self, name: str, message: str) -> PlanError:
        """Return an error with the file and the line that sets a key, if one is found.

        Args:
            name: name of the key or table as in `rlxf.utils.toml.line_of`: its first parts may be missing.
            message: description of the error.
        """
        line = line_of(self.text, name)
        place = f"{self.path}, line {line}" if line else f"{self.path}"
        return PlanError(f"{place}: {message}")
