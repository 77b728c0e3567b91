"""Experiments: tasks, agents and seeds, and the runs that they describe."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from rlxf.experiments.toml_files import PlanError
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
RESULT_FILES = ("table.md", "results.json", "curves.png", "profile.png")
"""Files of a summary in the folder of an experiment, next to the folders of tasks."""


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

    def agents_on(self, task: Task) -> list[str]:
        """Return the names of the agents that train on a task."""
        return [agent.name for agent in self.agents if agent.trains_on(task)]

    def cells(self) -> list[Cell]:
        """Return all runs, the first seed of all tasks and agents first."""
        return [
            Cell(task.name, agent.name, seed, agent.command, self.options(task, agent))
            for seed in self.seeds
            for task, agent in self.pairs()
        ]

    def tables(self, task: Task, agent: Agent) -> dict[str, dict[str, Any]]:
        """Return the tables with options of an agent on a task by their names in the file, the weakest first.

        They are those of all runs, of the agent, of the task, and of the agent on this task.
        """
        return {
            "settings": self.settings,
            f"agents.{agent.name}": agent.settings,
            f"tasks.{task.name}": task.settings,
            f"tasks.{task.name}.agents.{agent.name}": task.overrides.get(agent.name, {}),
        }

    def options(self, task: Task, agent: Agent) -> dict[str, Any]:
        """Return the options of an agent on a task; later ones replace earlier ones of the same name.

        The order is that of `tables`. Options of a technique keep its name: ``core.memory.length`` changes
        the memory of an earlier ``core.memory``.
        """
        merged: dict[str, Any] = {}
        for layer in self.tables(task, agent).values():
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
