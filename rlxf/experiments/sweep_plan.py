"""Sweeps: a training command, its fixed options, and the search space."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlxf.experiments.search_space import SearchSpace
from rlxf.experiments.toml_files import PlanError, TomlReader
from rlxf.utils.run_files import MEAN_RETURN
from rlxf.utils.toml import read_text

DIRECTIONS = ("maximize", "minimize")
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
        command: words of the command that trains, e.g. "train gtrxl".
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
    metric: str = MEAN_RETURN
    sampler_seed: int = 0
    pruning: Pruning | None = Pruning()

    @property
    def fixed(self) -> dict[str, Any]:
        """Full name -> value of the fixed options, including tables and their entries."""
        return fixed_options(self.settings)

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
        return TomlReader(self.path, read_text(self.path, "sweep file")).error(name, message)


def fixed_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return full name -> value of options, including tables and their entries.

    The value of a technique, a table in ``core`` with a ``name``, is its name.
    """
    return {
        name: value["name"]
        if name.startswith("core.") and isinstance(value, dict) and "name" in value
        else value
        for name, value in iterate_entries(settings)
    }


def iterate_entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield full name and value of each entry of a table, and of the tables in it."""
    for key, value in table.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from iterate_entries(value, f"{prefix}{key}.")
