"""Experiment files: tasks, agents and seeds in TOML, and the runs that they describe."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from rlxf.experiments.toml_files import MAX_RUNS, PlanError, TomlReader, read_toml
from rlxf.utils.names import choose_one_of

COMMANDS = {
    "train gtrxl": "env",
    "train dt": "dataset",
    "train bc": "dataset",
    "train rvs": "dataset",
    "baseline ppo": "env",
    "baseline recurrent-ppo": "env",
    "baseline random": "env",
}
"""Words of the command that trains an agent -> setting of a task that it needs."""
CHECKPOINTS = ("last", "best")
"""Checkpoints of a run whose final evaluation may be compared."""
KEYS = {
    "": ("seeds", "checkpoint", "settings", "tasks", "agents"),
    "task": ("score_range", "agents"),
    "agent": ("command",),
}
"""Keys of an experiment file, of a task and of an agent that are not options of a training command."""
RESULT_FILES = ("table.md", "results.json", "curves.png", "profile.png")
"""Files of a summary in the folder of an experiment, next to the folders of tasks."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of tasks and agents, which are names of folders."""


@dataclass(frozen=True)
class Task:
    """Task of an experiment.

    Args:
        name: name in tables, and of its folder.
        settings: options of training commands, among them the environment or the datasets.
        overrides: agent name -> options that replace those of the agent on this task.
        score_range: returns with normalized scores 0 and 1; None to compare returns.
    """

    name: str
    settings: dict[str, Any]
    overrides: dict[str, dict[str, Any]]
    score_range: tuple[float, float] | None


@dataclass(frozen=True)
class Agent:
    """Agent of an experiment.

    Args:
        name: name in tables, and of its folders.
        command: words of the command that trains it, a key of `COMMANDS`.
        settings: options of this command.
    """

    name: str
    command: str
    settings: dict[str, Any]

    def trains_on(self, task: Task) -> bool:
        """Return whether the task has what the command needs: an environment, or datasets."""
        return COMMANDS[self.command] in task.settings


Named = TypeVar("Named", Task, Agent)


@dataclass(frozen=True)
class Cell:
    """One run of an experiment: an agent, a task and a seed.

    Args:
        task: name of the task.
        agent: name of the agent.
        seed: seed of the training.
        command: words of the command that trains the agent.
        settings: options of the command, without the seed and the folder.
    """

    task: str
    agent: str
    seed: int
    command: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Path of the run in the folder of the experiment."""
        return f"{self.task}/{self.agent}/seed-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """Content of an experiment file.

    Args:
        tasks: the tasks.
        agents: the agents. Each trains on the tasks with an environment, or on those with datasets.
        seeds: seed of each repetition.
        settings: options of all runs; those of agents and tasks replace them.
        checkpoint: checkpoint whose final evaluation is compared, "last" or "best".
    """

    tasks: tuple[Task, ...]
    agents: tuple[Agent, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    checkpoint: str = "last"

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read an experiment file.

        Raises:
            PlanError: if the file is not TOML, or a key or a value is invalid.
            OSError: if the file cannot be read.
        """
        document, text = read_toml(path, "experiment file")
        return _Reader(path, text).plan(document)

    def selection(self, tasks: Collection[str], agents: Collection[str]) -> "Plan":
        """Return the plan with the named tasks and agents only.

        Without names of tasks, it has those on which a named agent trains, and vice versa.

        Raises:
            PlanError: if a name is unknown, or the selection has nothing to train for a named task or agent.
        """
        chosen = replace(
            self, tasks=_named(self.tasks, tasks, "task"), agents=_named(self.agents, agents, "agent")
        )
        pairs = list(chosen.pairs())
        trained, training = {task.name for task, _ in pairs}, {agent.name for _, agent in pairs}
        _check_partners("task", tasks, trained)
        _check_partners("agent", agents, training)
        return replace(
            self,
            tasks=tuple(task for task in chosen.tasks if task.name in trained),
            agents=tuple(agent for agent in chosen.agents if agent.name in training),
        )

    def pairs(self) -> Iterator[tuple[Task, Agent]]:
        """Yield each task with each agent that trains on it."""
        yield from (
            (task, agent) for task, agent in product(self.tasks, self.agents) if agent.trains_on(task)
        )

    def cells(self) -> list[Cell]:
        """Return all runs, the first seed of all tasks and agents first."""
        return [
            Cell(task.name, agent.name, seed, agent.command, self.options(task, agent))
            for seed in self.seeds
            for task, agent in self.pairs()
        ]

    def options(self, task: Task, agent: Agent) -> dict[str, Any]:
        """Return the options of an agent on a task; later ones replace earlier ones of the same name.

        The order is that of all runs, of the agent, of the task, and of the agent on this task. Options of a
        technique keep its name: ``core.memory.length`` changes the memory of an earlier ``core.memory``.
        """
        layers = (self.settings, agent.settings, task.settings, task.overrides.get(agent.name, {}))
        merged: dict[str, Any] = {}
        for layer in layers:
            core = _merged_core(merged.get("core"), layer.get("core"))
            merged = merged | layer | ({} if core is None else {"core": core})
        return merged


def _named(items: tuple[Named, ...], names: Collection[str], kind: str) -> tuple[Named, ...]:
    """Return the items with the given names in the order of the file, or all items if there are no names."""
    known = [item.name for item in items]
    for name in names:
        if name not in known:
            raise PlanError(f"unknown {kind} {name}{choose_one_of(name, known)}")
    return tuple(item for item in items if item.name in names) if names else items


def _check_partners(kind: str, names: Collection[str], found: Collection[str]) -> None:
    """Raise PlanError if a named task or agent is not among those that are found in pairs."""
    for name in names:
        if name not in found:
            raise PlanError(
                f"{kind} {name} has no partner in this selection: an agent trains either on tasks with env "
                f"or on tasks with dataset"
            )


def _merged_core(first: Any, second: Any) -> Any:
    """Return an option of a core after another value of it; None stands for no value.

    A table without ``name`` changes entries of a table, or options of a technique. Other values replace.
    """
    if second is None:
        return first
    if not isinstance(second, dict) or "name" in second:
        return second
    technique = {"name": first} if isinstance(first, str) and first.lower() != "none" else {}
    table = first if isinstance(first, dict) else technique
    return table | {key: _merged_core(table.get(key), value) for key, value in second.items()}


class _Reader(TomlReader):
    """Conversion of a TOML document into a plan."""

    def plan(self, document: dict[str, Any]) -> Plan:
        """Return the plan of a document."""
        self.check_keys(document, KEYS[""], "the file")
        for name in ("tasks", "agents"):
            if not document.get(name):
                raise PlanError(f"{self.path} has no {name}: add a table [{name}.NAME] for each of them")
        tasks = tuple(self.task(*item) for item in self.tables(document["tasks"], "tasks"))
        agents = tuple(self.agent(*item) for item in self.tables(document["agents"], "agents"))
        settings = self.options(document.get("settings", {}), "settings")
        checkpoint = document.get("checkpoint", CHECKPOINTS[0])
        if checkpoint not in CHECKPOINTS:
            raise self.error("checkpoint", f"checkpoint must be last or best, got {checkpoint!r}")
        plan = Plan(tasks, agents, self.seeds(document.get("seeds", 1)), settings, checkpoint)
        self.check_pairs(plan)
        return plan

    def task(self, name: str, table: dict[str, Any]) -> Task:
        """Return the task of a table."""
        settings = self.options({k: v for k, v in table.items() if k not in KEYS["task"]}, name)
        if ("env" in settings) == ("dataset" in settings):
            raise self.error(f"tasks.{name}", f"task {name} must have either env or dataset")
        where = f"tasks.{name}.agents"
        overrides = {
            agent: self.options(options, f"{where}.{agent}")
            for agent, options in self.tables(table.get("agents", {}), where)
        }
        return Task(name, settings, overrides, self.score_range(name, table.get("score_range")))

    def agent(self, name: str, table: dict[str, Any]) -> Agent:
        """Return the agent of a table."""
        command = self.command(f"agent {name}", f"agents.{name}", table.get("command"), COMMANDS)
        settings = self.options({k: v for k, v in table.items() if k not in KEYS["agent"]}, name)
        return Agent(name, command, settings)

    def score_range(self, task: str, value: Any) -> tuple[float, float] | None:
        """Return the returns with scores 0 and 1 of a task."""
        if value is None:
            return None
        numbers = isinstance(value, list) and all(type(each) in (int, float) for each in value)
        if not numbers or len(value) != 2 or not all(map(isfinite, value)) or value[0] >= value[1]:
            raise self.error(
                f"tasks.{task}.score_range",
                f"score_range of task {task} must be two returns, those with scores 0 and 1, in increasing "
                f"order, got {value!r}",
            )
        return float(value[0]), float(value[1])

    def tables(self, value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of each table in a table."""
        for name, table in self.table(value, where).items():
            if not NAME.fullmatch(name):
                raise self.error(
                    f"{where}.{name}",
                    f"{where}.{name}: names must have letters, digits, dots, dashes and underscores only, "
                    f"and begin with a letter or digit, because they are names of folders",
                )
            if name in RESULT_FILES:
                raise self.error(
                    f"{where}.{name}", f"{where}.{name}: {name} is the name of a file with results"
                )
            yield name, self.table(table, f"{where}.{name}")

    def check_pairs(self, plan: Plan) -> None:
        """Raise PlanError if a task or an agent has no partner, or there are too many runs."""
        pairs = list(plan.pairs())
        names = {agent.name for agent in plan.agents}
        for task in plan.tasks:
            if task not in [each for each, _ in pairs]:
                raise self.error(
                    f"tasks.{task.name}", f"no agent trains on task {task.name}: add one, or remove the task"
                )
            self.check_keys(task.overrides, tuple(names), f"tasks.{task.name}.agents")
        for agent in plan.agents:
            if agent not in [each for _, each in pairs]:
                needed = COMMANDS[agent.command]
                raise self.error(
                    f"agents.{agent.name}", f"agent {agent.name} needs a task with {needed}, but none has it"
                )
        for task, agent in pairs:
            if plan.options(task, agent).get("episodes") == 0:
                raise self.error(
                    "episodes",
                    f"runs of {agent.name} on {task.name} have episodes = 0, so nothing could be compared: "
                    f"give at least 1",
                )
        if len(pairs) * len(plan.seeds) > MAX_RUNS:
            raise PlanError(
                f"{self.path} describes more than {MAX_RUNS:,} runs: reduce tasks, agents or seeds"
            )
