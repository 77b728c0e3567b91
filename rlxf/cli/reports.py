"""Checkpoints of a run to evaluate, and the reports of their evaluations."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import torch
from rich.table import Table
from stable_baselines3.common.logger import Logger
from torch.utils.tensorboard import SummaryWriter

from rlxf.cli.output import print_out
from rlxf.cli.runs import Agent
from rlxf.cli.spec_options import parse_technique
from rlxf.evaluation import Report, TargetSweep, evaluate
from rlxf.evaluation.agents import is_return_conditioned_agent
from rlxf.evaluation.episodes import validate_targets
from rlxf.training import RunFolder
from rlxf.training.strict_json import load_json_object
from rlxf.training.trackers import tracker_outputs
from rlxf.utils.files import make_folder, write_file
from rlxf.utils.run_files import CHECKPOINT, EVALUATION, SHARED

DATASTORE_SUFFIX = ", datastore"
"""Suffix of the name of a checkpoint with a datastore of trajectories."""
WITH_DATASTORE = "with a datastore of trajectories"
CHECKPOINT_EVALUATIONS = {
    "last": ("evaluation", "Last checkpoint, {}"),
    "best": ("evaluation-best", "Best checkpoint, {}, selected on other episodes during training"),
    "validation": ("evaluation-validation", "Checkpoint with the lowest validation loss, {}"),
    f"last{DATASTORE_SUFFIX}": ("evaluation-datastore", f"Last checkpoint, {{}}, {WITH_DATASTORE}"),
    f"best{DATASTORE_SUFFIX}": ("evaluation-best-datastore", f"Best checkpoint, {{}}, {WITH_DATASTORE}"),
    f"validation{DATASTORE_SUFFIX}": (
        "evaluation-validation-datastore",
        f"Checkpoint with the lowest validation loss, {{}}, {WITH_DATASTORE}",
    ),
}
"""Checkpoint name -> name of its evaluation, in TensorBoard and for the folder of its plot; its title."""
TRACKED_COLUMNS = ("checkpoint", "target return", "episodes", "mean return", "ci low", "ci high")
"""Columns of the table of `track_reports`."""
SELECTED_BY = {"best": "evaluations", "validation": "--validation-fraction"}
"""Name of a selected checkpoint -> what a training needs to select it."""


def shared_checkpoint(run: RunFolder, name: str = "last") -> str:
    """Return the name that a checkpoint had in its training.

    In a shared folder, "last" may be the best checkpoint of the training, as the file `SHARED` says.

    Args:
        run: the run, or a shared folder.
        name: name in this folder, as in `checkpoints_of`; also with `DATASTORE_SUFFIX`.

    Raises:
        ValueError: if the file is damaged.
    """
    path = run.path / SHARED
    if not path.is_file():
        return name
    shared = load_json_object(path, "remove it").get("checkpoint")
    if shared not in ("last", "best"):
        raise ValueError(
            f"{path} has checkpoint = {short_repr(shared)}, which must be last or best; remove it"
        )
    return name.replace("last", shared)


def checkpoints_of(run: RunFolder) -> dict[str, Path]:
    """Return name -> path of the checkpoints: "last", and those of `SELECTED_BY` that training selected.

    Raises:
        ValueError: if the file of `shared_checkpoint` is damaged.
    """
    shared_checkpoint(run)  # a damaged file is reported here, and not after an evaluation
    files = {"last": run.final_checkpoint} | _selected(run)
    return {name: file for name, file in files.items() if name == "last" or file.is_file()}


def _selected(run: RunFolder) -> dict[str, Path]:
    return {"best": run.best, "validation": run.best_validation}


def select_checkpoints(run: RunFolder, which: str) -> dict[str, Path]:
    """Return name -> path of the selected checkpoints of a run.

    Args:
        run: the run.
        which: a name, or "all" for those of `checkpoints_of`.

    Raises:
        FileNotFoundError: if the training selected no checkpoint of this name, or the folder has no copy.
    """
    files = checkpoints_of(run)
    if which == "all":
        return files
    if which not in files:
        reason = (
            f"it is a shared copy of one checkpoint, or was trained without {SELECTED_BY[which]}; evaluate "
            f"the last checkpoint"
        )
        if shared_checkpoint(run) == which:
            reason = f"its {CHECKPOINT} is the {which} checkpoint; use it"
        raise FileNotFoundError(
            f"{run.path} has no {_selected(run)[which].name}: {reason} with --checkpoint last"
        )
    return {which: files[which]}


def with_datastore(
    agents: Mapping[str, Agent], datasets: Sequence[str], head: str | None, progress_bar: bool
) -> dict[str, Agent]:
    """Attach a datastore of these datasets to each agent, and add `DATASTORE_SUFFIX` to the names.

    Without datasets, the agents and names are returned unchanged.

    Args:
        agents: checkpoint name -> agent.
        datasets: Minari ids.
        head: name or JSON description of the output head that reads the datastore; None for kNN-LM.
        progress_bar: show a progress bar.

    Raises:
        ValueError: if an agent does not support datastores, the head does not exist, or a dataset does not
            match the agent.
    """
    if not datasets:
        if head is not None:
            raise ValueError(f"--head {head} needs datasets of trajectories: pass them with --datastore")
        return dict(agents)
    for agent in agents.values():
        if not hasattr(agent, "attach_datastore"):
            raise ValueError(f"--datastore needs an agent with a transformer, got {type(agent).__name__}")
        agent.attach_datastore(datasets, parse_technique("head", head or "KNNLM"), progress_bar=progress_bar)
    return {f"{name}{DATASTORE_SUFFIX}": agent for name, agent in agents.items()}


def default_target_returns(agents: Sequence[Any], requested: Sequence[float]) -> Sequence[float] | None:
    """Return the target returns of conditioned agents, by default the largest return in their data.

    None is returned for agents that are not conditioned on a return.

    Raises:
        ValueError: if returns are requested from other agents, agents of both kinds are given, or a target
            is not finite or occurs twice.

    Warns:
        UserWarning: if a target lies outside the returns in the data of all agents.
    """
    conditioned = [agent for agent in agents if is_return_conditioned_agent(agent)]
    if not conditioned:
        if requested:
            raise ValueError(f"target_returns apply to return-conditioned agents only, got {list(requested)}")
        return None
    if len(conditioned) < len(agents):
        raise ValueError(
            "some agents are conditioned on a target return and others are not: use runs of one kind"
        )
    lows, highs = zip(*(agent.return_range for agent in conditioned), strict=True)
    return validate_targets(requested or [max(highs)], (min(lows), max(highs)))


def evaluate_checkpoints(
    run: RunFolder,
    agents: Mapping[str, Any],
    open_logger: Callable[[str], AbstractContextManager[Logger | SummaryWriter]],
    progress_bar: bool,
    **arguments: Any,
) -> dict[str, Report | TargetSweep]:
    """Evaluate and log the checkpoints of a run. One that acts like the first one shares its report.

    Args:
        run: folder of the run.
        agents: checkpoint name -> agent.
        open_logger: context manager for the log of the checkpoint with this name.
        progress_bar: show progress bars, labeled with the run and the checkpoint.
        **arguments: further arguments of `evaluate`.
    """
    first = next(iter(agents))
    reports: dict[str, Report | TargetSweep] = {}
    for name, agent in agents.items():
        with open_logger(name) as logger:
            if name != first and _act_alike(agents[first], agent):
                reports[name] = reports[first]
                reports[name].log(logger, agent.num_timesteps)
                continue
            label = progress_bar and f"{run.path.name}, {name}"
            reports[name] = evaluate(agent, logger=logger, progress_bar=label, **arguments)
    return reports


def _act_alike(one: Any, other: Any) -> bool:
    """Return whether two agents have the same weights to act by, and the same statistics of observations.

    Their steps may differ: the last update of a schedule that ends at 0 does not change the weights.
    """
    one_core, other_core = (getattr(agent, "core", None) for agent in (one, other))
    normalizes = one.get_vec_normalize_env() is not None and one.num_timesteps != other.num_timesteps
    if one_core != other_core or normalizes:
        return False
    weights, others = one.policy.acting_weights(), other.policy.acting_weights()
    return weights.keys() == others.keys() and all(torch.equal(weights[key], others[key]) for key in weights)


def print_reports(
    run: RunFolder, agents: Mapping[str, Any], reports: Mapping[str, Report | TargetSweep]
) -> None:
    """Print one table for each report; checkpoints that act alike share one.

    Args:
        run: the run.
        agents: checkpoint name -> agent, the last checkpoint first.
        reports: checkpoint name -> report.
    """
    first = next(iter(reports))
    equal = [name for name in reports if name != first and reports[name] is reports[first]]
    for name, report in reports.items():
        if name not in equal:
            print_titled(report.table(), run, name, agents[name])
    for name in equal:
        selected = name.removesuffix(DATASTORE_SUFFIX)
        step = _progress(agents[name])
        print_out(f"the {selected} checkpoint ({step}) acts like the last one, so both have one table")


def print_titled(table: Table, run: RunFolder, name: str, agent: Any) -> None:
    """Print a table of a checkpoint of a run below its name and its steps or, offline, its updates."""
    _, heading = CHECKPOINT_EVALUATIONS[shared_checkpoint(run, name)]
    table.title = f"{heading.format(_progress(agent))}\n{table.title}"
    print_out(table)


def _progress(agent: Any) -> str:
    """Return the step or, offline, the update of a checkpoint, e.g. "step 8,192"."""
    return f"{getattr(agent, 'progress_unit', 'step')} {agent.num_timesteps:,}"


def save_reports(run: RunFolder, reports: Mapping[str, Report | TargetSweep]) -> None:
    """Write checkpoint name -> content of its report, as JSON, to `EVALUATION` in the folder of a run."""
    members = ", ".join(f"{json.dumps(name)}: {report.to_json()}" for name, report in reports.items())
    write_file(run.path / EVALUATION, f"{{{members}}}\n".encode())


def track_reports(logger: Logger, reports: Mapping[str, Report | TargetSweep], step: int) -> None:
    """Send the table of the final evaluation to the experiment trackers of a logger.

    It has one row for each checkpoint and target return, with the mean return and its 95% interval.

    Args:
        logger: logger of the run.
        reports: checkpoint name -> report.
        step: number of steps or updates of the run.
    """
    rows = []
    for name, report in reports.items():
        sweep = report.reports if isinstance(report, TargetSweep) else {None: report}
        rows += [[name, target, each.episodes, each.mean, *each.ci] for target, each in sweep.items()]
    for output in tracker_outputs(logger):
        output.table("evaluation", TRACKED_COLUMNS, rows, step)


def plot_targets(reports: Mapping[str, Report | TargetSweep], folders: Mapping[str, Path]) -> None:
    """Plot achieved against requested returns of reports with several targets, and print the paths.

    Args:
        reports: checkpoint name -> report.
        folders: checkpoint name -> folder of its plot, ``targets.png``.
    """
    for name, report in reports.items():
        if isinstance(report, TargetSweep) and len(report.reports) > 1:
            make_folder(folders[name], exist_ok=True)
            path = folders[name] / "targets.png"
            report.plot(path)
            print_out(f"plot of requested and achieved returns: {path}")
