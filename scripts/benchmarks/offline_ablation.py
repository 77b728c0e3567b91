"""Effect of the implementation details of DecisionTransformer: training with one removed or replaced."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.ablation_runs import Run, print_runs
from benchmarks.offline_setting import Setting
from benchmarks.result_cache import check_names
from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer.conditioning import MaxReturn
from rlxf.agents.offline.heads import DeterministicHead
from rlxf.agents.offline.objectives import MaximumEntropy, QRegularized
from rlxf.agents.offline.trajectory_model import residual_projections
from rlxf.attention import RoPE
from rlxf.data import Trajectories, UniformEpisodes, Windows, load_trajectories
from rlxf.evaluation import EvaluationCallback
from rlxf.evaluation.report import Report

EVALUATIONS = 5
SIZES = Setting(64, 2, context_length=10, batch_size=32, learning_rate=1e-3, decay=0.1)


@dataclass(frozen=True)
class Task:
    """Dataset on which agents with and without a change are compared.

    Args:
        dataset: Minari id of a dataset with reference scores.
        target: target return; None for the largest return in the data.
    """

    dataset: str
    target: float | None = None


TASKS = {
    "Pendulum": Task("rlxf/pendulum/mixed-v0", -143.0),
    "Hopper": Task("rlxf/hopper/medium-replay-like-v0"),
}
"""The target of Pendulum is the return of its reference policy; the largest one belongs to easy starts."""


@dataclass(frozen=True)
class Change:
    """Removal or replacement of an implementation detail.

    Args:
        detail: number of the detail on the page of implementation details; 0 for no change.
        options: arguments of DecisionTransformer.
        core: fields of the core that differ.
        prepare: function that changes an agent before its training.
    """

    detail: int
    options: Mapping[str, Any] = field(default_factory=dict)
    core: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[DecisionTransformer], object] = lambda agent: None

    def agent(self, data: Trajectories, seed: int) -> DecisionTransformer:
        """Build a changed agent."""
        settings = SIZES.arguments() | {"return_scale": None}
        settings["core"] = replace(settings["core"], **self.core)
        agent = DecisionTransformer(data, seed=seed, device="cpu", **(settings | dict(self.options)))
        self.prepare(agent)
        return agent


def keep_observations(agent: DecisionTransformer) -> None:
    """Do not standardize observations."""
    normalization: Any = agent.policy.features.normalization
    normalization.mean.zero_()
    normalization.std.fill_(1.0)


class FullWindows(Windows):
    """`Windows` that start at least K steps before the end of their episode, or at its first step."""

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the first steps of windows, int64 (batch_size,)."""
        drawn, offsets = super().draw(batch_size, generator).numpy(), self.trajectories.offsets
        episode = np.searchsorted(offsets, drawn, side="right") - 1
        last = np.maximum(offsets[episode], offsets[episode + 1] - self.length)
        return torch.from_numpy(np.minimum(drawn, last))


def draw_full_windows(agent: DecisionTransformer) -> None:
    """Draw no windows that are short because their episode ends."""
    model: Any = agent.policy
    model.windows = partial(FullWindows, length=agent.context_length)


def freeze_at_zero(path: str, agent: DecisionTransformer) -> None:
    """Set all parameters of a module of the policy to 0 and do not train them."""
    for parameter in agent.policy.get_submodule(path).parameters():
        nn.init.zeros_(parameter.requires_grad_(False))


def remove_norm_of_tokens(agent: DecisionTransformer) -> None:
    """Remove the layer norm of the tokens."""
    tokens: Any = agent.policy.tokens
    tokens.norm = nn.Identity()


def initialize_like_torch(agent: DecisionTransformer) -> None:
    """Initialize linear layers and embeddings as torch does."""
    for module in agent.policy.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()


@torch.no_grad()
def enlarge_residual_projections(agent: DecisionTransformer) -> None:
    """Undo the division of the output projections of sublayers by the square root of 2 L."""
    for part in residual_projections(agent.policy.transformer):
        part.weight.mul_((2 * agent.core.layers) ** 0.5)


class UnboundedHead(DeterministicHead):
    """`DeterministicHead` without tanh; the environment clips its actions."""

    def _scaled(self, y: Tensor) -> Tensor:
        scaled: Tensor = self.net(y)
        return scaled


class AbsoluteErrorHead(DeterministicHead):
    """`DeterministicHead` whose error is the mean absolute error of the components."""

    def error(self, y: Tensor, actions: Tensor) -> Tensor:
        """Compute the error of y (..., C) for actions (..., A): (...)."""
        return (self._scaled(y) - self.actions(actions)).abs().mean(dim=-1)


def use_head(head: type[DeterministicHead], agent: DecisionTransformer) -> None:
    """Replace the class of the head; its weights stay."""
    loss: Any = agent.policy.loss
    loss.head.__class__ = head


CHANGES = {
    "nothing": Change(0),
    "return_scale=1": Change(2, {"return_scale": 1.0}),
    "observations not standardized": Change(3, prepare=keep_observations),
    "sampling=UniformEpisodes()": Change(5, {"sampling": UniformEpisodes()}),
    "no short windows": Change(6, prepare=draw_full_windows),
    "no returns": Change(9, prepare=partial(freeze_at_zero, "tokens.return_embedding")),
    "no previous actions": Change(9, prepare=partial(freeze_at_zero, "tokens.action_embedding")),
    "no time-step embedding": Change(11, prepare=partial(freeze_at_zero, "tokens.time")),
    "no norm of the tokens": Change(12, prepare=remove_norm_of_tokens),
    "rotary positions": Change(13, core={"position": RoPE()}),
    "no dropout": Change(14, core={"dropout": 0.0}),
    "weights with torch's initialization": Change(15, prepare=initialize_like_torch),
    "residual projections not scaled": Change(16, prepare=enlarge_residual_projections),
    "absolute error": Change(21, prepare=partial(use_head, AbsoluteErrorHead)),
    "no tanh": Change(22, prepare=partial(use_head, UnboundedHead)),
    "objective=MaximumEntropy()": Change(24, {"objective": MaximumEntropy()}),
    "conditioning=MaxReturn()": Change(25, {"conditioning": MaxReturn()}),
    "objective=QRegularized()": Change(26, {"objective": QRegularized()}),
    "QRegularized without warm-up": Change(27, {"objective": QRegularized(warmup_updates=0)}),
    "QRegularized with targets of one step": Change(28, {"objective": QRegularized(n_steps=1)}),
    "no weight decay": Change(29, {"weight_decay": 0.0}),
    "no warm-up": Change(30, {"warmup_updates": 0}),
    "constant learning rate of 1e-3": Change(31, {"learning_rate": 1e-3}),
    "constant learning rate of 1e-4": Change(31, {"learning_rate": 1e-4}),
    "no gradient clipping": Change(32, {"max_grad_norm": 1e9}),
    "weight_averaging=0.99": Change(33, {"weight_averaging": 0.99}),
}
"""Changes by name; numbers as in docs/explanation/implementation-details-decision-transformer.md."""
DETAILS = {name: change.detail for name, change in CHANGES.items()}


@dataclass
class OfflineAblation:
    """Scores of DecisionTransformer, and with one implementation detail changed at a time.

    Scores are normalized: 0 is the return of a random policy, 1 that of the reference policy of the data.
    Agents have width 64, 2 layers, a context of 10 steps and batches of 32 windows; the learning rate decays
    from 1e-3 to 1e-4. All else are default settings. Completed runs are lines of the output file and are not
    repeated. The datasets are read from MINARI_DATASETS_PATH; Hopper requires the extra mujoco.
    """

    tasks: tuple[str, ...] = ("Pendulum", "Hopper")
    """Names of the tasks."""
    changes: tuple[str, ...] = tuple(CHANGES)
    """Names of the changes."""
    seeds: int = 3
    """Runs of each change on each task."""
    updates: int = 2_500
    """Updates of each run."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-offline-ablation.jsonl")
    """Output file with a line for each run."""

    def __post_init__(self) -> None:
        check_names(tasks=(self.tasks, TASKS), changes=(self.changes, CHANGES))

    def run(self) -> None:
        """Make missing runs, and print the table."""
        for task in self.tasks:
            load_trajectories(TASKS[task].dataset)  # convert the data once, before processes read them
        jobs = {
            f"{change}, {task}, {self.updates} updates, {self.episodes} episodes, seed {seed}": partial(
                self.train, change, task, seed
            )
            for task, seed, change in product(self.tasks, range(self.seeds), self.changes)
        }
        print_runs(jobs, self.processes, self.output, DETAILS)

    def train(self, change: str, task: str, seed: int) -> Run:
        """Train one agent."""
        data = load_trajectories(TASKS[task].dataset)
        agent = CHANGES[change].agent(data, seed)
        target = TASKS[task].target
        target = float(data.returns.max()) if target is None else target
        callback = EvaluationCallback(
            agent.make_env(self.episodes),
            episodes=self.episodes,
            every_steps=self.updates // EVALUATIONS,
            target_returns=[target] if agent.return_conditioned else None,
        )
        start = time.process_time()
        agent.learn(self.updates, callback)
        curve = [(step, _score(report)) for step, report in callback.reports.items()]
        return Run(change, task, seed, curve, time.process_time() - start)


def _score(report: Report) -> float:
    """Return the normalized score in units of the reference policy."""
    if report.normalized_score is None:
        raise ValueError("the dataset has no reference scores")
    return report.normalized_score / 100
