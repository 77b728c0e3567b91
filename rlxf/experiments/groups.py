"""Groups of runs that differ by their seed only, and short labels of what differs between the groups."""

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlxf.experiments.columns import listed
from rlxf.experiments.curves import Curve, describe_metrics, find_curve, hold_last_values, metrics_of
from rlxf.experiments.runs import AGENT, Run
from rlxf.utils.run_files import MEAN_RETURN
from rlxf.utils.tables import printable
from rlxf.utils.warnings import warn_user

DEFAULT_METRICS = (MEAN_RETURN, "rollout/ep_rew_mean")
"""Metrics to choose from if none is given."""
HELD_METRICS = ("eval/", "rollout/")
"""Prefixes of the metrics of episodes, whose last value a line keeps if its training ended early."""
LABEL_CHARACTERS = 60
"""Maximum length of a label; further settings are counted."""
ENV_ID = re.compile(r"[A-Za-z][A-Za-z0-9.-]*-v\d+")
"""Gymnasium id in the name of a folder or file, such as CartPole-v1 in ppo_CartPole-v1_2."""


@dataclass(frozen=True)
class Group:
    """Learning curves of one method on one task, one for each seed.

    Args:
        label: name of the method.
        task: name of the task; "" if unknown.
        curves: the curves, at least one.
        unfinished: number of trainings that did not end, with and without a curve.
        unit: unit of the steps.
        ended_early: for each curve, whether its training ended early because an evaluation reached a return.
            Empty means that none did.
        finished: for each curve, whether its training ended, or may have. Empty means that all did.
    """

    label: str
    task: str
    curves: Sequence[Curve]
    unfinished: int = 0
    unit: str = "steps"
    ended_early: Sequence[bool] = ()
    finished: Sequence[bool] = ()

    @property
    def left_out(self) -> int:
        """Number of unfinished trainings without a curve in this group."""
        return self.unfinished - [*self.finished].count(False)

    def lines(self, metric: str, last: float | None = None) -> Sequence[Curve]:
        """Return the curves with the last value of trainings that ended early, for a metric of episodes.

        Args:
            metric: name of the metric. Curves of other metrics are returned as they are.
            last: step up to which the last value is kept; None for the last one of the group.
        """
        if not (self.ended_early and metric.startswith(HELD_METRICS)):
            return self.curves
        return hold_last_values(self.curves, self.ended_early, last)

    def finished_only(self) -> "Group":
        """Return the group with the curves of finished trainings; the group itself if there are none.

        A line ends at the last step of all its curves, so one training that was killed would hide the others.
        """
        rows = [row for row, finished in enumerate(self.finished) if finished]
        if not rows:
            return self
        curves = [self.curves[row] for row in rows]
        early = [self.ended_early[row] for row in rows] if self.ended_early else ()
        return replace(self, curves=curves, ended_early=early, finished=[True] * len(rows))

    def smooth(self, window: int) -> "Group":
        """Return the group with smoothed curves, see `Curve.smooth`."""
        return replace(self, curves=[curve.smooth(window) for curve in self.curves])


def choose_metric(runs: Sequence[Run], metric: str | None = None) -> str:
    """Return the metric to show: a given one that a run has, or the first of `DEFAULT_METRICS`.

    A default that all runs have takes precedence over one that some runs have.

    Args:
        runs: the runs.
        metric: name of the metric; None for a default.

    Raises:
        ValueError: if no run has the metric; the message lists similar names and the existing metrics.
    """
    existing = list(filter(None, (metrics_of(run.path) for run in runs)))
    counts = Counter(name for names in existing for name in names)
    candidates = DEFAULT_METRICS if metric is None else (metric,)
    some = [name for name in candidates if counts[name]]
    if not some:
        place = f"{runs[0].path} does not have" if len(runs) == 1 else f"none of the {len(runs)} runs has"
        raise ValueError(
            f"{place} the metric {' or '.join(candidates)}{describe_metrics(candidates[0], list(counts))}"
        )
    return next((name for name in some if counts[name] == len(existing)), some[0])


def parse_patterns(texts: Iterable[str]) -> dict[str, str]:
    """Return pattern -> name of the texts NAME=PATTERN.

    Raises:
        ValueError: if a text has another form, or a pattern occurs twice.
    """
    patterns: dict[str, str] = {}
    for text in texts:
        name, equals, pattern = text.partition("=")
        if not (name and equals and pattern):
            raise ValueError(f"--groups must be NAME=PATTERN, such as ppo='*ppo*', got {text}")
        if pattern in patterns:
            raise ValueError(f"--groups has the pattern {pattern} twice, for {patterns[pattern]} and {name}")
        patterns[pattern] = name
    return patterns


def read_groups(runs: Sequence[Run], metric: str, patterns: Mapping[str, str] | None = None) -> list[Group]:
    """Read the curves of runs, and return them by task and settings, in the order of the runs.

    Args:
        runs: the runs.
        metric: name of the metric.
        patterns: shell pattern -> name of the group of the runs whose path matches; the first match counts.

    Raises:
        ValueError: if no run has the metric, a pattern matches no run, or a log is damaged.
        OSError: if a log cannot be read.

    Warns:
        UserWarning: if a run has no value of the metric, and is left out, or a seed occurs twice in a group.
    """
    names = _given_names(runs, patterns or {})
    found = {run.path: find_curve(run.path, metric) for run in runs}
    curves = {path: curve for path, curve in found.items() if curve is not None}
    _warn_of_missing([run.path for run in runs if run.path not in curves], metric)
    if not curves:
        raise ValueError(f"no run has a value of {metric}; choose another metric")
    runs = [run for run in runs if run.path in curves]
    settings = [{"group": names[run.path]} if run.path in names else run.settings for run in runs]
    labels = make_labels(settings, [run.task for run in runs])
    members: dict[tuple[str, str], list[Run]] = {}
    for run, label in zip(runs, labels, strict=True):
        members.setdefault((run.task, label), []).append(run)
    return [_group(task, label, each, curves, names) for (task, label), each in members.items()]


def _warn_of_missing(paths: Sequence[Path], metric: str) -> None:
    """Warn of runs without a value of the metric."""
    empty = [path for path in paths if not metrics_of(path)]
    other = [path for path in paths if path not in empty]
    for each, reason in ((empty, "nothing was logged yet"), (other, f"there is no value of {metric}")):
        if each:
            warn_user(f"runs left out, because {reason}: {listed([*map(str, each)], 5)}")


def _group(
    task: str, label: str, runs: Sequence[Run], curves: Mapping[Path, Curve], names: Mapping[Path, str]
) -> Group:
    seeds = Counter(run.seed for run in runs)
    twice = [run for run in runs if run.seed is not None and seeds[run.seed] > 1]
    if twice:
        warn_user(
            f"{listed([f'{run.path} (seed {run.seed})' for run in twice], 4)} are in one group, and have the "
            f"seed of another run: with equal settings, they are no independent trainings, and the interval "
            f"is too narrow"
        )
    if len(runs) > 1 and all(run.finished is None and run.path not in names for run in runs):
        warn_user(
            f"{listed([str(run.path) for run in runs], 3)} have no config.json, and count as seeds of one "
            f"method, because their names differ by a number only; other groups: --groups NAME=PATTERN"
        )
    if not task:
        _warn_of_mixed_tasks(label, runs)
    finished = [run.finished is not False for run in runs]
    early = [run.ended_early for run in runs]
    found = [curves[run.path] for run in runs]
    return Group(label, task, found, finished.count(False), runs[0].unit, early, finished)


def _warn_of_mixed_tasks(label: str, runs: Sequence[Run]) -> None:
    """Warn if the paths of runs whose logs do not name the task contain different environment ids."""
    examples: dict[str, Path] = {}
    for run in runs:
        for env_id in ENV_ID.findall(run.path.as_posix()):
            examples.setdefault(env_id, run.path)
    paths = [*map(str, dict.fromkeys(examples.values()))]
    if len(paths) > 1:
        warn_user(
            f"the group {label} seems to mix tasks, because the paths of its runs ({listed(paths, 4)}) name "
            f"{listed([*examples], 4)}, and their logs name no task; give each task its own group: "
            f"--groups NAME=PATTERN"
        )


def _given_names(runs: Sequence[Run], patterns: Mapping[str, str]) -> dict[Path, str]:
    names: dict[Path, str] = {}
    for pattern, name in patterns.items():
        matching = [run.path for run in runs if fnmatch.fnmatchcase(run.path.as_posix(), pattern)]
        if not matching:
            raise ValueError(f"--groups {name}={pattern} matches no run, such as {runs[0].path}")
        names = dict.fromkeys(matching, name) | names
    return names


def make_labels(settings: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> list[str]:
    """Return a label for each of these settings, which names only what differs.

    The label begins with the agent, and has the settings in which runs of this agent on one task differ, for
    example "gtrxl, core.recurrence=GRU". Settings that differ only from task to task, such as the number of
    steps, are not named. On one task, equal settings have equal labels, and different ones different labels.
    A setting that is missing equals one of None, so that runs of versions without this setting are included.

    Args:
        settings: settings of runs by name.
        tasks: task of each run.
    """
    siblings: dict[tuple[str, bool, str], list[Mapping[str, Any]]] = {}
    for task, each in zip(tasks, settings, strict=True):
        siblings.setdefault((task, *_kind(each)), []).append(each)
    differing: dict[tuple[bool, str], dict[str, None]] = {}
    for (_, is_named, name), members in siblings.items():
        differing.setdefault((is_named, name), {}).update(dict.fromkeys(_differing(members)))
    labels = [_label(each, [*differing[_kind(each)]]) for each in settings]
    return _numbered(labels, settings, tasks)


def _numbered(
    labels: Sequence[str], settings: Sequence[Mapping[str, Any]], tasks: Sequence[str]
) -> list[str]:
    """Number the labels that different settings on one task share; a missing setting equals one of None."""
    sharing: dict[tuple[str, str], dict[str, None]] = {}
    given = [{name: value for name, value in each.items() if value is not None} for each in settings]
    keys = [json.dumps(each, sort_keys=True, default=str) for each in given]
    for place, key in zip(zip(tasks, labels, strict=True), keys, strict=True):
        sharing.setdefault(place, {})[key] = None
    numbered = []
    for task, label, key in zip(tasks, labels, keys, strict=True):
        own = [*sharing[task, label]]
        numbered.append(label if len(own) == 1 else f"{label} #{own.index(key) + 1}")
    return numbered


def _kind(settings: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the user has named the group of a run, and the name of this group or of the agent."""
    is_named = "group" in settings
    return is_named, str(settings["group"] if is_named else settings.get(AGENT, "run"))


def _differing(siblings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ; of a technique with another name, not its options."""
    names = dict.fromkeys(name for each in siblings for name in each)
    differing = [name for name in names if len({_text(each.get(name)) for each in siblings}) > 1]
    return [name for name in differing if not any(name.startswith(f"{other}.") for other in differing)]


def _label(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    parts = [_kind(settings)[1], *(f"{name}={_text(settings.get(name))}" for name in names)]
    return _shortened([" ".join(printable(part).split()) for part in parts])


def _text(value: Any) -> str:
    """Return a JSON value as short text; names and numbers as they are."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shortened(parts: Sequence[str]) -> str:
    """Join parts; the last ones are counted instead, if the text were too long."""
    shown = list(parts)
    while len(shown) > 1 and len(", ".join(shown)) > LABEL_CHARACTERS:
        shown.pop()
    text = ", ".join(shown)
    text = f"{text[: LABEL_CHARACTERS - 1]}…" if len(text) > LABEL_CHARACTERS else text
    return text if len(shown) == len(parts) else f"{text} and {len(parts) - len(shown)} more"
