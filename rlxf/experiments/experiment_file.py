"""Experiment files: tasks, agents and seeds in TOML."""

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlxf.experiments.plan import COMMANDS, RESULT_FILES, Agent, Plan, Task
from rlxf.experiments.toml_files import MAX_RUNS, PlanError, TomlReader, read_toml

COMPARED_CHECKPOINTS = ("last", "best")
"""Checkpoints of a run whose final evaluation may be compared."""
KEYS = {
    "": ("seeds", "checkpoint", "settings", "tasks", "agents"),
    "task": ("score_range", "agents"),
    "agent": ("command",),
}
"""Keys of an experiment file, of a task and of an agent that are not options of a training command."""
MAX_RETURN = 1e100
"""Largest magnitude of a return in a file, so that differences of returns are finite."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of tasks and agents, which are names of folders."""


def read_plan(path: Path) -> Plan:
    """Read an experiment file.

    Raises:
        PlanError: if the file is not TOML, or a key or a value is invalid.
        OSError: if the file cannot be read.
    """
    document, text = read_toml(path, "experiment file")
    return _Reader(path, text).plan(document)


class _Reader(TomlReader):
    """Conversion of a TOML document into a plan."""

    top_level_keys = ("seeds", "checkpoint")

    def plan(self, document: dict[str, Any]) -> Plan:
        """Return the plan of a document."""
        self.check_keys(document, KEYS[""])
        for name in ("tasks", "agents"):
            if not document.get(name):
                raise PlanError(f"{self.path} has no {name}: add a table [{name}.NAME] for each of them")
        tasks = tuple(self.task(*item) for item in self.tables(document["tasks"], "tasks"))
        agents = tuple(self.agent(*item) for item in self.tables(document["agents"], "agents"))
        settings = self.options(document.get("settings", {}), "settings")
        checkpoint = document.get("checkpoint", COMPARED_CHECKPOINTS[0])
        if checkpoint not in COMPARED_CHECKPOINTS:
            raise self.error("checkpoint", f"checkpoint must be last or best, got {checkpoint!r}")
        plan = Plan(tasks, agents, self.seeds(document.get("seeds", 1)), settings, checkpoint)
        self.check(plan)
        return plan

    def task(self, name: str, table: dict[str, Any]) -> Task:
        """Return the task of a table."""
        where = f"tasks.{name}"
        settings = {key: value for key, value in table.items() if key not in KEYS["task"]}
        if ("env" in settings) == ("dataset" in settings):
            if "env" not in settings:
                self.check_spelling(settings, ("env", "dataset"), where)
            raise self.error(where, f"task {name} must have either env or dataset")
        overrides = dict(self.tables(table.get("agents", {}), f"{where}.agents"))
        return Task(name, settings, overrides, self.score_range(name, table.get("score_range")))

    def agent(self, name: str, table: dict[str, Any]) -> Agent:
        """Return the agent of a table."""
        command = self.command(f"agent {name}", f"agents.{name}", table, COMMANDS)
        settings = {key: value for key, value in table.items() if key not in KEYS["agent"]}
        return Agent(name, command, settings)

    def score_range(self, task: str, value: Any) -> tuple[float, float] | None:
        """Return the returns with scores 0 and 1 of a task."""
        if value is None:
            return None
        numbers = isinstance(value, list) and all(type(each) in (int, float) for each in value)
        valid = numbers and len(value) == 2 and all(abs(each) <= MAX_RETURN for each in value)
        if not valid or float(value[0]) >= float(value[1]):
            raise self.error(
                f"tasks.{task}.score_range",
                f"score_range of task {task} must be two returns up to {MAX_RETURN:g}, those with scores 0 "
                f"and 1, in increasing order, got {reprlib.repr(value)}",
            )
        return float(value[0]), float(value[1])

    def tables(self, value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of each table in a table, see `options`."""
        folders: dict[str, str] = {}
        for name, table in self.table(value, where).items():
            if not NAME.fullmatch(name):
                raise self.error(
                    f"{where}.{name}",
                    f"{where}.{name}: names must have letters, digits, dots, dashes and underscores only, "
                    f"and begin with a letter or digit, because they are names of folders",
                )
            if name.lower() in RESULT_FILES:
                raise self.error(
                    f"{where}.{name}", f"{where}.{name}: {name} is the name of a file with results"
                )
            other = folders.setdefault(name.casefold(), name)
            if other != name:
                raise self.error(
                    f"{where}.{name}",
                    f"{where}.{name}: {other} is the same name in other letter case, and both would be one "
                    f"folder on macOS and Windows: choose another name",
                )
            yield name, self.options(table, f"{where}.{name}")

    def check(self, plan: Plan) -> None:
        """Raise PlanError if a task or an agent has no partner, or a run is invalid."""
        self.check_tasks(plan)
        self.check_overrides(plan)
        self.check_agents(plan)
        self.check_episodes(plan)
        self.check_number(plan)

    def check_tasks(self, plan: Plan) -> None:
        """Raise PlanError if no agent trains on a task."""
        trained = {task.name for task, _ in plan.pairs()}
        for name in (task.name for task in plan.tasks if task.name not in trained):
            message = f"no agent trains on task {name}: add one, or remove the task"
            raise self.error(f"tasks.{name}", message)

    def check_overrides(self, plan: Plan) -> None:
        """Raise PlanError if a task has options of an unknown agent."""
        names = tuple(agent.name for agent in plan.agents)
        for task in plan.tasks:
            self.check_keys(task.overrides, names, f"tasks.{task.name}.agents")

    def check_agents(self, plan: Plan) -> None:
        """Raise PlanError if an agent trains on no task."""
        training = {agent.name for _, agent in plan.pairs()}
        for agent in (agent for agent in plan.agents if agent.name not in training):
            message = f"agent {agent.name} needs a task with {COMMANDS[agent.command]}, but none has it"
            raise self.error(f"agents.{agent.name}", message)

    def check_episodes(self, plan: Plan) -> None:
        """Raise PlanError if a run is not evaluated."""
        for task, agent in plan.pairs():
            if plan.options(task, agent).get("episodes") == 0:
                raise self.error(
                    "episodes",
                    f"runs of {agent.name} on {task.name} have episodes = 0, so nothing could be compared: "
                    f"give at least 1",
                )

    def check_number(self, plan: Plan) -> None:
        """Raise PlanError if there are too many runs."""
        if len(list(plan.pairs())) * len(plan.seeds) > MAX_RUNS:
            raise PlanError(
                f"{self.path} describes more than {MAX_RUNS:,} runs: reduce tasks, agents or seeds"
            )
