"""Errors in the options of an experiment file with the line that sets them, and warnings."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlxf.cli.config_file import flat_options
from rlxf.cli.job_options import named_option
from rlxf.envs.specs import known_refusal
from rlxf.experiments.columns import listed
from rlxf.experiments.experiment_file import KEYS
from rlxf.experiments.plan import Agent, Plan, Task
from rlxf.experiments.sweep_plan import iterate_entries
from rlxf.experiments.toml_files import PlanError, TomlReader
from rlxf.tuned import tuned_file
from rlxf.utils.names import similar_name
from rlxf.utils.toml import loads, read_text
from rlxf.utils.warnings import warn_user

PROPOSAL = re.compile(r"unknown option \S+; did you mean --(?P<near>[\w.-]+)\?|unknown option ")
"""Pattern of a message about an option that the command does not have."""


def refused_options(file: Path, plan: Plan, task: Task, agent: Agent, error: Exception) -> PlanError:
    """Return an error of the options of an agent on a task, with the line of the file.

    Args:
        file: the experiment file.
        plan: its content.
        task: the task.
        agent: the agent.
        error: error of the command line.
    """
    tables = plan.tables(task, agent)
    entries = {table: {name for name, _ in iterate_entries(options)} for table, options in tables.items()}
    name = named_option(error, set().union(*entries.values()))
    table = next((table for table in reversed(entries) if name in entries[table]), "")
    message = str(error) if name is None else _with_keys(str(error), name, table)
    message = f"agent {agent.name} on task {task.name}: {message}"
    if name is None:
        return PlanError(f"{file}: {message}")
    return _error_at(file, f"{table}.{name}" if table else name, message)


def _error_at(file: Path, place: str, message: str) -> PlanError:
    """Return an error with the line of an experiment file that sets an option."""
    return TomlReader(file, read_text(file, "experiment file")).error(place, message)


def warn_about_environments(
    file: Path, plan: Plan, options: Mapping[tuple[str, str], Mapping[str, Any]]
) -> None:
    """Warn of tasks whose environment is not registered, or does not take its arguments.

    This is no error, as the package of an environment may be missing on this machine only.

    Args:
        file: the experiment file.
        plan: its content.
        options: names of a task and an agent -> options of their runs, for those that will be trained.
    """
    messages: dict[str, None] = {}
    for task, agent in plan.pairs():
        given = options.get((task.name, agent.name), {})
        env = given.get("env")
        if env and (refusal := known_refusal(env, given.get("env_kwargs") or {})):
            option, reason = refusal
            tables = plan.tables(task, agent)
            table = next((name for name in reversed(tables) if option in tables[name]), "")
            message = f"runs on task {task.name} may fail: {reason}"
            messages[str(_error_at(file, f"{table}.{option}", message))] = None
    for message in messages:
        warn_user(message)


def warn_about_replaced_settings(file: Path, plan: Plan) -> None:
    """Warn if options of all runs replace those of the settings file that an agent names.

    Args:
        file: the experiment file.
        plan: its content; the options of its runs are valid.
    """
    common = flat_options(plan.settings)
    for agent in plan.agents:
        if both := sorted({*common} & _settings_of_file(agent) - {*flat_options(agent.settings)}):
            warn_user(
                f"{file}: [settings] replaces {listed(both)} of the file that tuned or config of agent "
                f"{agent.name} names: to keep the values of that file, set these options in the tables of "
                f"other agents, not in [settings]"
            )


def _settings_of_file(agent: Agent) -> set[str]:
    """Return the full names of the options in the TOML file that an agent names; none for another file."""
    tuned, config = (str(agent.settings.get(name)) for name in ("tuned", "config"))
    if tuned != "None":
        path = tuned_file(tuned, agent.command)
    elif (path := Path(config)).suffix != ".toml":
        return set()
    return {*flat_options(loads(read_text(path, "settings file")))}


def _with_keys(message: str, name: str, table: str) -> str:
    """Return a message about an unknown option, which proposes a key of the table if that is more similar."""
    match = PROPOSAL.match(message)
    own = _own_keys(table)
    if match is None or not own:
        return message
    first = name.partition(".")[0]
    near = similar_name(first, [*own, *([match["near"].replace("-", "_")] if match["near"] else [])])
    return f"unknown option {first}; did you mean {near}?" if near in own else message


def _own_keys(table: str) -> tuple[str, ...]:
    """Return the keys of a table of tasks or agents that are not options of a command."""
    kind, _, rest = table.partition(".")
    return KEYS[kind.removesuffix("s")] if rest and ".agents." not in rest else ()
