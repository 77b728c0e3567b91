"""Sweep files: a training command, its fixed options, and the search space, in TOML."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from rlxf.experiments.plan import COMMANDS
from rlxf.experiments.search_space import (
    Choices,
    Condition,
    Dimension,
    Range,
    SearchSpace,
    check_range,
    label,
)
from rlxf.experiments.toml_files import MAX_RUNS, PlanError, TomlReader, read_toml
from rlxf.utils.names import did_you_mean
from rlxf.utils.toml import read_text

METRIC = "eval/mean_reward"
"""Default objective: the mean return of the final evaluation."""
TRAINED = tuple(command for command in COMMANDS if command != "baseline random")
SPACES = ("gtrxl", "dt")
"""Search spaces that are part of the package, as spaces/NAME.toml."""
DIRECTIONS = ("maximize", "minimize")
KEYS = (
    *("command", "settings", "search", "space", "trials", "seeds", "direction", "metric", "sampler_seed"),
    "pruning",
)
RANGE_KEYS = ("low", "high", "log", "step", "format", "when")
CHOICE_KEYS = ("choices", "when")
JSON_TABLES = ("env_kwargs", "curriculum", "arguments")
"""Options whose value is a table, of which single entries can be searched, e.g. ``arguments.n_steps``."""


@dataclass(frozen=True)
class Pruning:
    """Settings of the median pruner (`optuna.pruners.MedianPruner`).

    Args:
        startup_trials: number of complete trials before any trial is pruned.
        warmup: part of a training, from 0 to 1, in which it is not pruned.
    """

    startup_trials: int = 5
    warmup: float = 0.2


@dataclass(frozen=True)
class SweepPlan:
    """Content of a sweep file.

    Args:
        path: the file.
        command: words of the command that trains, one of `TRAINED`.
        settings: its fixed options.
        space: the options that are searched.
        trials: number of trials.
        seeds: seeds of the runs of a trial. The objective is the mean over them.
        direction: "maximize" or "minimize".
        metric: the objective.
        sampler_seed: seed of the suggestions.
        pruning: when trials are stopped early; None for never.
    """

    path: Path
    command: str
    settings: dict[str, Any]
    space: SearchSpace
    trials: int = 20
    seeds: tuple[int, ...] = (0,)
    direction: str = DIRECTIONS[0]
    metric: str = METRIC
    sampler_seed: int = 0
    pruning: Pruning | None = Pruning()

    @classmethod
    def read(cls, path: Path) -> "SweepPlan":
        """Read a sweep file.

        Raises:
            PlanError: if the file is not TOML, or a key or a value is invalid.
            OSError: if the file cannot be read.
        """
        document, text = read_toml(path, "sweep file")
        return _Reader(path, text).plan(document)

    @property
    def fixed(self) -> dict[str, Any]:
        """Full name -> value of the fixed options, including tables and their entries."""
        return dict(_entries(self.settings))

    def options(self, searched: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the command: the fixed ones, and values of those that are searched."""
        options = dict(self.settings)
        for name, value in searched.items():
            first, _, rest = name.partition(".")
            if rest and first != "core" and (first in JSON_TABLES or isinstance(options.get(first), dict)):
                options[first] = {**options.get(first, {}), rest: value}
            else:
                options[name] = value
        return options

    def identity(self) -> dict[str, Any]:
        """Return what all trials of a study have in common, as a JSON object."""
        return {
            "command": self.command,
            "metric": self.metric,
            "direction": self.direction,
            "seeds": list(self.seeds),
            "settings": self.settings,
            "search": self.space.as_json(),
        }

    def refused(self, name: str | None, message: str) -> PlanError:
        """Return an error with the line of the file that sets an option; without a line if it is None."""
        if name is None:
            return PlanError(f"{self.path}: {message}")
        return _Reader(self.path, read_text(self.path, "sweep file")).error(name, message)


def _entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield full name and value of each entry; a technique with a ``name`` is its value, too."""
    for key, value in table.items():
        name = prefix + key
        is_technique = isinstance(value, dict) and name.startswith("core.") and "name" in value
        yield name, value["name"] if is_technique else value
        if isinstance(value, dict):
            yield from _entries(value, f"{name}.")


def _overlaps(searched: str, fixed: str, value: Any) -> bool:
    """Return whether a fixed option is a searched one, or an entry of it that is no option of a technique."""
    if fixed == searched:
        return not isinstance(value, dict)
    return fixed.startswith(f"{searched}.") and not searched.startswith("core.")


class _Reader(TomlReader):
    """Conversion of a TOML document into a plan of a sweep."""

    setter = "the sweep"

    def plan(self, document: dict[str, Any]) -> SweepPlan:
        """Return the plan of a document."""
        self.check_keys(document, KEYS, "the file")
        command = self.command("", "command", document.get("command"), TRAINED)
        settings = self.options(document.get("settings", {}), "settings")
        needed = COMMANDS[command]
        if needed not in settings:
            raise self.error("settings", f"command {command} needs {needed}: add it to [settings]")
        if settings.get("episodes") == 0 and document.get("metric", METRIC) == METRIC:
            raise self.error(
                "settings.episodes",
                f"settings has episodes = 0, so no run has the metric {METRIC}: give at least 1, or choose "
                f"another metric",
            )
        return SweepPlan(
            self.path,
            command,
            settings,
            self.space(document, settings),
            self.count("trials", document.get("trials", 20), 1),
            self.seeds(document.get("seeds", 1)),
            self.one_of("direction", document.get("direction", DIRECTIONS[0]), DIRECTIONS),
            self.metric(document.get("metric", METRIC)),
            self.count("sampler_seed", document.get("sampler_seed", 0), 0),
            self.pruning(document.get("pruning", True)),
        )

    def space(self, document: dict[str, Any], settings: dict[str, Any]) -> SearchSpace:
        """Return the search space: that of the package without fixed options, and that of the file."""
        fixed = dict(_entries(settings))
        options: dict[str, Dimension] = {}
        if "space" in document:
            shipped = _shipped(self.one_of("space", document["space"], SPACES))
            options = {name: each for name, each in shipped.items() if name not in fixed}
        own = self.dimensions(self.table(document.get("search", {}), "search"))
        self.check_reserved(own, "search")
        for name in own:
            if any(_overlaps(name, other, value) for other, value in fixed.items()):
                raise self.error(name, f"{name} is in both [settings] and [search]: remove one")
        options |= own
        if not options:
            raise PlanError(
                f"{self.path} has no options to search: add them to a table [search], or choose space = "
                f"{' or '.join(map(repr, SPACES))}"
            )
        self.check_conditions(own, {*options, *fixed})
        return SearchSpace(options)

    def dimensions(self, table: Mapping[str, Any], prefix: str = "") -> dict[str, Dimension]:
        """Return full name -> values of the options in a table."""
        found: dict[str, Dimension] = {}
        for key, value in table.items():
            is_option = not prefix or prefix.startswith("core")
            name = prefix + (key.replace("-", "_") if is_option else key)
            is_range = isinstance(value, dict) and set(value) & {*RANGE_KEYS, *CHOICE_KEYS}
            if not isinstance(value, dict) or is_range:
                each = {name: self.dimension(name, value)}
            else:
                each = self.dimensions(value, f"{name}.")
            if both := set(each) & set(found):
                raise self.error(min(both), f"search has {min(both)} twice, in two spellings: remove one")
            found |= each
        return found

    def dimension(self, name: str, value: Any) -> Dimension:
        """Return the values of an option."""
        if isinstance(value, list):
            return self.choices(name, value, {})
        if not isinstance(value, dict):
            raise self.error(
                name,
                f"search.{name} must be a list of choices, or a table such as {{ low = 1, high = 8 }}, got "
                f"{value!r}",
            )
        when = self.condition(name, value.get("when", {}))
        if "choices" in value:
            self.check_keys(value, CHOICE_KEYS, f"search.{name}")
            return self.choices(name, value["choices"], when)
        self.check_keys(value, RANGE_KEYS, f"search.{name}")
        return self.range(name, value, when)

    def choices(self, name: str, values: Any, when: Condition) -> Choices:
        """Return the choices in a list."""
        labels = [label(each) for each in values] if isinstance(values, list) and self.is_data(values) else []
        if not labels or len(set(labels)) < len(labels):
            raise self.error(
                name,
                f"search.{name} must be a list of different texts, numbers or true and false, got {values!r}",
            )
        return Choices(tuple(values), when)

    def is_data(self, value: Any) -> bool:
        """Return whether a value is a text, a finite number, a boolean, or a list or table of them."""
        if isinstance(value, list | dict):
            return all(map(self.is_data, value.values() if isinstance(value, dict) else value))
        return isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))

    def range(self, name: str, value: Mapping[str, Any], when: Condition) -> Range:
        """Return the numbers that a table describes."""
        low = value.get("low")
        high = value.get("high")
        log = value.get("log", False)
        try:
            check_range(low, high, log, value.get("step"))
        except ValueError as error:
            raise self.error(name, f"search.{name} {error}") from None
        form = value.get("format")
        if form is not None and (not isinstance(form, str) or form.count("{}") != 1):
            raise self.error(name, f"format of search.{name} must be a text with one {{}}, got {form!r}")
        return Range(low, high, log, value.get("step"), form, when)  # type: ignore[arg-type]

    def condition(self, name: str, when: Any) -> Condition:
        """Return the condition in the key ``when`` of an option."""
        if not isinstance(when, dict):
            raise self.error(
                name, f"when of search.{name} must be a table such as {{ option = value }}, got {when!r}"
            )
        return {
            other: tuple(label(each) for each in (values if isinstance(values, list) else [values]))  # type: ignore[misc]
            for other, values in _leaves(when)
        }

    def check_conditions(self, options: Mapping[str, Dimension], known: set[str]) -> None:
        """Raise PlanError if a condition names an option that has no value when it is needed."""
        for name, dimension in options.items():
            for other in dimension.when:
                if other not in known:
                    hint = did_you_mean(other, known)
                    raise self.error(
                        name,
                        f"when of search.{name} names {other}, which is neither fixed nor searched{hint}",
                    )
                if other in options and options[other].when:
                    raise self.error(
                        name, f"when of search.{name} names {other}, which has a condition itself"
                    )

    def count(self, key: str, value: Any, low: int) -> int:
        """Return a whole number of at least ``low``."""
        if type(value) is not int or not low <= value <= MAX_RUNS:
            raise self.error(key, f"{key} must be a whole number from {low} to {MAX_RUNS:,}, got {value!r}")
        return value

    def one_of(self, key: str, value: Any, known: tuple[str, ...]) -> str:
        """Return a value after a check that it is one of the known ones."""
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise self.error(key, f"{key} must be {' or '.join(known)}, got {value!r}{hint}")
        return str(value)

    def metric(self, value: Any) -> str:
        """Return the name of the objective."""
        if not isinstance(value, str) or not value:
            raise self.error("metric", f"metric must be the name of a metric, e.g. {METRIC!r}, got {value!r}")
        return value

    def pruning(self, value: Any) -> Pruning | None:
        """Return when trials are stopped early, from true, false or a table."""
        if isinstance(value, bool):
            return Pruning() if value else None
        table = self.table(value, "pruning")
        self.check_keys(table, ("startup_trials", "warmup"), "pruning")
        warmup = table.get("warmup", Pruning.warmup)
        if type(warmup) not in (int, float) or not 0 <= warmup <= 1:
            raise self.error("warmup", f"warmup must be a number from 0 to 1, got {warmup!r}")
        startup = table.get("startup_trials", Pruning.startup_trials)
        return Pruning(self.count("startup_trials", startup, 1), warmup)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _shipped(name: str) -> dict[str, Dimension]:
    """Return the search space of this name in the package."""
    path = Path(str(files("rlxf.experiments") / "spaces" / f"{name}.toml"))
    document, text = read_toml(path, "search space")
    return _Reader(path, text).dimensions(document)
