"""Report of a sweep: tables of trials, the best settings as TOML, and figures."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlxf.experiments.figures import COLORS, DPI, PANEL, plain, save_figure
from rlxf.experiments.study import REASON, SweepStudy, shown
from rlxf.utils.files import write_file
from rlxf.utils.tables import Table

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

BEST_ROWS = 10
"""Number of trials in the table on the console."""
MIN_IMPORTANCE = 10
"""Smallest number of complete trials with importances of options."""
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
CONFIG_COMMANDS = "train "
"""Start of the commands that read settings files."""


def describe(options: Mapping[str, Any]) -> str:
    """Return options in one line, e.g. "core.width = 64, gamma = 0.99"."""
    return ", ".join(f"{name} = {shown(value)}" for name, value in options.items())


def best_table(study: SweepStudy) -> Table:
    """Return a table of the best complete trials."""
    plan = study.plan
    objective = (
        f"{plan.metric}" if len(plan.seeds) == 1 else f"{plan.metric}, mean over {len(plan.seeds)} seeds"
    )
    table = Table("trial", objective, "settings", title="Best trials")
    for trial in study.complete()[:BEST_ROWS]:
        table.add_row(str(trial.number), f"{trial.value:.4g}", describe(study.searched(trial)))
    return table


def counts(study: SweepStudy) -> str:
    """Return the number of trials by state in words."""
    trials = study.trials()
    states = [STATES.get(trial.state.name, "not finished") for trial in trials]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{len(trials)} of {study.plan.trials} trials: {', '.join(parts) or 'none'}"


def all_trials(study: SweepStudy) -> Table:
    """Return a table of all trials with their states, and the reasons of failures."""
    table = Table("trial", "state", "value", "settings", "reason", title="All trials")
    for trial in study.trials():
        table.add_row(
            str(trial.number),
            STATES.get(trial.state.name, "not finished"),
            "" if trial.value is None else f"{trial.value:.4g}",
            describe(_options(study, trial)),
            shown(trial.user_attrs.get(REASON, "")),
        )
    return table


def _options(study: SweepStudy, trial: "FrozenTrial") -> Mapping[str, Any]:
    """Return the searched options of a trial; those that it has if the process ended too early."""
    try:
        return study.searched(trial)
    except ValueError:
        return trial.params


REPORT_FILES = ("trials.md", "best.toml", "history.png", "importance.png")
"""Names of the files of `write_report`."""


def write_report(
    study: SweepStudy, folder: Path, to_words: Callable[[Mapping[str, Any]], Sequence[str]]
) -> Iterator[Path]:
    """Write trials.md, best.toml, history.png and importance.png, and yield their paths.

    Files whose content would be empty are left out. Each file is replaced atomically.

    Args:
        study: study of the sweep.
        folder: folder of the sweep.
        to_words: function of options that returns words of the command line.

    Raises:
        OSError: if a file cannot be written.
    """
    yield _written(folder / "trials.md", f"{counts(study)}\n\n{all_trials(study).markdown()}\n")
    complete = study.complete()
    if not complete:
        return
    yield _written(folder / "best.toml", best_settings(study, complete[0], folder / "best.toml", to_words))
    figures = {"history.png": history_figure(study)}
    if importances := option_importances(study):
        figures["importance.png"] = importance_figure(importances, study.plan.metric)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
        yield folder / name


def _written(path: Path, text: str) -> Path:
    write_file(path, text.encode())
    return path


def best_settings(
    study: SweepStudy,
    trial: "FrozenTrial",
    path: Path,
    to_words: Callable[[Mapping[str, Any]], Sequence[str]],
) -> str:
    """Return the options of a trial as a settings file, with the command that uses it as a comment."""
    plan = study.plan
    options = plan.options(study.searched(trial))
    if plan.command.startswith(CONFIG_COMMANDS):
        use = shlex.join(["rlxf", *plan.command.split(), "--config", str(path)])
    else:
        use = shlex.join(["rlxf", *plan.command.split(), *to_words(options)])
    seeds = (
        f"mean over seeds {', '.join(map(str, plan.seeds))}"
        if len(plan.seeds) > 1
        else f"seed {plan.seeds[0]}"
    )
    comments = [
        f"Best settings of {plan.path}: {plan.metric} {trial.value:.6g} ({seeds}), trial {trial.number} of "
        f"{len(study.trials())}.",
        f"The best of many trials is partly luck: confirm it with other seeds, e.g. {max(plan.seeds) + 1}.",
        use,
    ]
    lines = [f"# {shown_line(line)}" for line in comments]
    settings = (f"{_key(name)} = {to_toml(value)}" for name, value in options.items())
    return "\n".join([*lines, "", *settings, ""])


def shown_line(text: str) -> str:
    """Return a text without characters that end a comment."""
    return "".join(each if each.isprintable() else " " for each in text)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else to_toml(name)


def to_toml(value: Any) -> str:
    """Return a value of a TOML document in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {to_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are those of TOML
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def importance_advice(study: SweepStudy) -> str:
    """Return what a sweep without an importance of options lacks."""
    complete = study.complete()
    if len(complete) < MIN_IMPORTANCE or len({trial.value for trial in complete}) < 2:
        return f"it needs {MIN_IMPORTANCE} complete trials with different values"
    return "it needs two searched options that all complete trials have"


def option_importances(study: SweepStudy) -> dict[str, float]:
    """Return option -> importance, from 0 to 1 with sum 1, the largest first; {} if it cannot be computed.

    The importances are those of PED-ANOVA (Watanabe et al. 2023, "PED-ANOVA: Efficiently Quantifying
    Hyperparameter Importance in Arbitrary Subspaces", arXiv:2304.10255), which needs no further package.
    Options that some trials do not have are left out.
    """
    complete = study.complete()
    values = {trial.value for trial in complete}
    common = [name for name in study.plan.space.options if all(name in trial.params for trial in complete)]
    if len(complete) < MIN_IMPORTANCE or len(values) < 2 or len(common) < 2:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    found = get_param_importances(study.study, evaluator=PedAnovaImportanceEvaluator(), params=common)
    return dict(sorted(found.items(), key=lambda item: -item[1])) if sum(found.values()) > 0 else {}


def importance_figure(importances: Mapping[str, float], metric: str) -> Figure:
    """Plot importances of options as bars."""
    figure = Figure(figsize=(PANEL[0], 1.2 + 0.32 * len(importances)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    names = [plain(name) for name in importances]
    axes.barh(range(len(names)), list(importances.values()), color=COLORS[0])
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(f"importance for {plain(metric)} (PED-ANOVA)")
    axes.grid(axis="x", alpha=0.3)
    return figure


def history_figure(study: SweepStudy) -> Figure:
    """Plot the objective of complete trials, and the best one so far."""
    trials = sorted(study.complete(), key=lambda trial: trial.number)
    numbers = [trial.number for trial in trials]
    values = [trial.value or 0.0 for trial in trials]
    best = list(accumulate(values, max if study.plan.direction == "maximize" else min))
    figure = Figure(figsize=PANEL, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, values, "o", color=COLORS[0], markersize=4, label="complete trial")
    axes.step(numbers, best, where="post", color=COLORS[1], label="best so far")
    axes.set(xlabel="trial", ylabel=plain(study.plan.metric))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", framealpha=0.7)
    return figure
