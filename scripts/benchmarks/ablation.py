"""Effect of the implementation details of GTrXLPPO: training with one removed, replaced or added."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from benchmarks.ablation_runs import Run, print_runs
from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.result_cache import check_names
from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.attention import GRUGate
from rlxf.attention.positions.xl_relative import XLRelativeBias
from rlxf.attention.residuals.gates import GRUGateModule
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback
from rlxf.evaluation.report import Report

ENVS, EVALUATIONS = 32, 10


@dataclass(frozen=True)
class Task:
    """Task on which agents with and without a change are compared.

    Args:
        env: Gymnasium id.
        steps: environment steps of training.
        score: function of an evaluation; a perfect agent has the score 1.
        kwargs: arguments of the environment.
    """

    env: str
    steps: int
    score: Callable[[Report], float]
    kwargs: dict[str, Any] = field(default_factory=dict)


def success(report: Report) -> float:
    """Return the success rate."""
    return report.success_rate or 0.0


def normalized_return(report: Report) -> float:
    """Return the mean return of CartPole-v1 as a share of the largest one."""
    return report.mean / 500


TASKS = {
    "T-Maze": Task("rlxf/TMaze-v0", 60_000, success, {"corridor_length": 20}),
    "CartPole": Task("CartPole-v1", 50_000, normalized_return),
}


@dataclass(frozen=True)
class Change:
    """Removal, replacement or addition of an implementation detail.

    Args:
        detail: number of the detail on the page of implementation details; 0 for no change.
        options: arguments of GTrXLPPO.
        core: fields of the default core that differ.
        prepare: function that changes an agent before its training.
        wrapper: wrapper of each training environment.
    """

    detail: int
    options: Mapping[str, Any] = field(default_factory=dict)
    core: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[GTrXLPPO], object] = lambda agent: None
    wrapper: Callable[[gymnasium.Env], gymnasium.Env] | None = None

    def agent(self, task: Task, seed: int) -> GTrXLPPO:
        """Build a changed agent, with its training environments."""
        env = make_vec_env(task.env, ENVS, seed, task.kwargs, wrapper_class=self.wrapper)
        core = replace(gtrxl(), **self.core)
        agent = GTrXLPPO("MlpGTrXLPolicy", env, core=core, seed=seed, **self.options)
        self.prepare(agent)
        return agent


@torch.no_grad()
def unscale_token(agent: GTrXLPPO) -> None:
    """Divide the embedding of observations by the factor of its initialization."""
    token = agent.policy.token
    token.weight.div_(max(1.0, token.out_features / token.in_features) ** 0.5)


@torch.no_grad()
def enlarge_action_token(agent: GTrXLPPO) -> None:
    """Give the embedding of the previous action the scale of an orthogonal matrix."""
    assert agent.policy.action_token is not None
    agent.policy.action_token.weight.mul_(10)


def initialize_like_torch(agent: GTrXLPPO) -> None:
    """Replace orthogonal matrices of the transformer by torch's initialization of the weights of Linear.

    Biases stay 0, and so do those of relative positions, which are matrices, too.
    """
    for module in agent.policy.transformer.modules():
        if not isinstance(module, XLRelativeBias):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2:
                    nn.init.kaiming_uniform_(parameter, a=5**0.5)


def enlarge_heads(agent: GTrXLPPO) -> None:
    """Initialize the heads of policy and value with gain 1."""
    for head in (agent.policy.action_net, agent.policy.value_net):
        agent.policy.init_weights(head, gain=1.0)


class UnnormalizedValueHead(PopArtHead):
    """`PopArtHead` whose mean stays 0 and whose standard deviation stays 1."""

    def update(self, returns: Tensor) -> bool:
        """Ignore the returns (N,) of a rollout, and return True, since all values are preserved."""
        return True


def remove_normalization_of_values(agent: GTrXLPPO) -> None:
    """Predict values in units of the rewards.

    The weight of the value loss and the floor of the advantages then lose their units, too.
    """
    agent.policy.value_net.__class__ = UnnormalizedValueHead


class GateWithoutReLU(GRUGateModule):
    """`GRUGateModule` whose input y is the output of the sublayer without a ReLU."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply the gate to stream x (..., C) and sublayer output y (..., C): (..., C)."""
        return self.gate(x, y)


def remove_relu(agent: GTrXLPPO) -> None:
    """Remove the ReLU before each gate."""
    for module in agent.policy.transformer.modules():
        if isinstance(module, GRUGateModule):
            module.__class__ = GateWithoutReLU


class NoTruncation(gymnasium.Wrapper):
    """Report that an episode was terminated when its time limit truncates it."""

    def step(self, action: Any) -> Any:
        """Step the environment."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


CHANGES = {
    "nothing": Change(0),
    "embedding of observations not scaled": Change(1, prepare=unscale_token),
    "previous_action=False": Change(2, {"previous_action": False}),
    "larger embedding of actions": Change(2, prepare=enlarge_action_token),
    "norm after each sublayer": Change(5, core={"norm": "post"}),
    "no norm after the last layer": Change(5, core={"final_norm": False}),
    "no ReLU before the gate": Change(6, prepare=remove_relu),
    "bias of the gate 0": Change(8, core={"residual": GRUGate(bias=0.0)}),
    "weights with torch's initialization": Change(9, prepare=initialize_like_torch),
    "heads with gain 1": Change(10, prepare=enlarge_heads),
    "recompute_memory=True": Change(19, {"recompute_memory": True}),
    "segment_length=8": Change(20, {"segment_length": 8}),
    "n_steps=128": Change(21, {"n_steps": 128}),
    "truncation as termination": Change(22, wrapper=NoTruncation),
    "critic_lambda=1": Change(26, {"critic_lambda": 1.0}),
    "normalize_advantage=False": Change(27, {"normalize_advantage": False}),
    "advantage_epsilon near 0": Change(28, {"advantage_epsilon": 1e-8}),
    "value head in units of the rewards": Change(29, prepare=remove_normalization_of_values),
    "clip_range_vf=0.2": Change(30, {"clip_range_vf": 0.2}),
    "a quarter of the optimizer steps": Change(31, FEWER_UPDATES),
    "constant learning rate": Change(33, {"learning_rate": 1e-3}),
    "constant weight of the entropy": Change(33, {"ent_coef": 0.03}),
    "no entropy in the loss": Change(33, {"ent_coef": 0.0}),
    "epsilon of Adam 1e-8": Change(34, {"policy_kwargs": {"optimizer_kwargs": {"eps": 1e-8, "fused": True}}}),
    "no gradient clipping": Change(35, {"max_grad_norm": 1e9}),
    "target_kl=0.02": Change(36, {"target_kl": 0.02}),
    "reconstruction_coef=0.1": Change(38, {"reconstruction_coef": 0.1}),
}
"""Changes by name; the numbers are those of docs/explanation/implementation-details-gtrxl.md."""
DETAILS = {name: change.detail for name, change in CHANGES.items()}


@dataclass
class Ablation:
    """Scores of GTrXLPPO with default settings, and with one implementation detail changed at a time.

    Completed runs are lines of the output file and are not repeated.
    """

    tasks: tuple[str, ...] = ("T-Maze", "CartPole")
    """Names of the tasks."""
    changes: tuple[str, ...] = tuple(CHANGES)
    """Names of the changes."""
    seeds: int = 3
    """Runs of each change on each task."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-ablation.jsonl")
    """Output file with a line for each run."""

    def __post_init__(self) -> None:
        check_names(tasks=(self.tasks, TASKS), changes=(self.changes, CHANGES))

    def run(self) -> None:
        """Make missing runs, and print the table."""
        jobs = {
            f"{change}, {task}, {self.episodes} episodes, seed {seed}": partial(
                train, change, task, self.episodes, seed
            )
            for task, seed, change in product(self.tasks, range(self.seeds), self.changes)
        }
        print_runs(jobs, self.processes, self.output, DETAILS)


def train(change: str, task: str, episodes: int, seed: int) -> Run:
    """Train one agent."""
    setting = TASKS[task]
    agent = CHANGES[change].agent(setting, seed)
    env = make_vec_env(setting.env, ENVS, env_kwargs=setting.kwargs)
    callback = EvaluationCallback(env, episodes=episodes, every_steps=setting.steps // EVALUATIONS)
    start = time.process_time()
    agent.learn(setting.steps, callback=callback)
    curve = [(step, setting.score(report)) for step, report in callback.reports.items()]
    return Run(change, task, seed, curve, time.process_time() - start)
