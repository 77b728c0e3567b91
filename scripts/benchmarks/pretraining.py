"""Effect of pre-training on all trajectories if only some of them are used for fine-tuning, with controls."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.offline_setting import SHORT
from benchmarks.result_cache import check_names, run_missing
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.offline.trajectory_algorithm import TrajectoryAlgorithm
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.agents.token_masking import KINDS
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation.intervals import stratified_interquartile_mean
from rlxf.utils.checks import check_choice

PARTS = ("transformer", "tokens", "features")
"""Names of the modules that `DecisionTransformer.load_pretrained` copies."""
COLUMNS = ("initial weights", "agents", "IQM (95% interval)", "mean", "mean of each agent")


@dataclass(frozen=True)
class Initialization:
    """Initial weights of an agent.

    Args:
        title: name in tables.
        pretraining: what is trained on all episodes before; None for random weights.
        parts: modules that are copied from it, among `PARTS`; the others stay random.
    """

    title: str
    pretraining: Callable[..., TrajectoryAlgorithm] | None = None
    parts: tuple[str, ...] = PARTS


FRESH, MASKED = "fresh", "masked"
predict_all = partial(MaskedPretraining, predicted_tokens=KINDS)
INITIALIZATIONS = {
    FRESH: Initialization("fresh weights"),
    MASKED: Initialization("masked pre-training on all tokens", predict_all),
    "masked-actions": Initialization("masked pre-training on actions, the default", MaskedPretraining),
    "masked-transformer": Initialization("on all tokens, its transformer only", predict_all, PARTS[:1]),
    "masked-embeddings": Initialization("on all tokens, its embeddings only", predict_all, PARTS[1:]),
    "imitation": Initialization("Decision Transformer", DecisionTransformer),
}
"""Initial weights by name. Those after "masked" are controls that separate possible causes of its effect."""


@dataclass(frozen=True)
class Run:
    """Result of one agent.

    Args:
        initialization: name of its initial weights in `INITIALIZATIONS`.
        seed: random seed.
        returns: returns of the evaluation episodes.
        lengths: lengths of these episodes, in steps.
    """

    initialization: str
    seed: int
    returns: list[float]
    lengths: list[int]


@dataclass
class Pretraining:
    """Pre-training on all windows of a dataset, then a Decision Transformer on a part of its episodes.

    Initial weights: fresh (random), masked (masked pre-training on returns, observations and actions),
    masked-actions (masked pre-training on actions only), masked-transformer and masked-embeddings (a part of
    the weights of "masked"; the others are random), imitation (a Decision Transformer that is trained on all
    episodes). All but the first are trained for the same number of updates before.

    Each seed selects another random part of the episodes, on which all agents are trained for as many
    updates. Their target return is the largest return in the data. Intervals are over seeds and episodes. The
    dataset is read from MINARI_DATASETS_PATH; Hopper requires the extra mujoco. Completed agents are lines of
    the output file and are not repeated.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    initializations: tuple[str, ...] = tuple(INITIALIZATIONS)
    """Names of initial weights."""
    setting: str = "small"
    """Sizes: small (width 64, 2 layers) or published (width 128, 3 layers)."""
    share: float = 0.1
    """Fraction of the episodes that is used for fine-tuning."""
    pretraining_updates: int = 10_000
    """Updates of pre-training."""
    updates: int = 5_000
    """Updates of each agent."""
    seeds: int = 3
    """Agents with each kind of initial weights."""
    episodes: int = 50
    """Episodes of an evaluation."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-pretraining.jsonl")
    """Output file with the returns of each agent."""

    def __post_init__(self) -> None:
        check_names(initializations=(self.initializations, INITIALIZATIONS))
        check_choice("setting", self.setting, tuple(SHORT))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be more than 0 and at most 1, got {self.share}")

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the table."""
        load_trajectories(self.dataset)  # convert the data once, before processes read it
        jobs: dict[str, Callable[[], Run]] = {
            self.key(seed, name): partial(self.learn, seed, name)
            for seed in range(self.seeds)
            for name in self.initializations
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=120).print(self.table(runs), f"numbers: {self.output}")

    def key(self, seed: int, name: str) -> str:
        """Return the key of an agent in the output file."""
        kind = "" if name == MASKED else f" of {name}"
        begun = INITIALIZATIONS[FRESH].title
        if name != FRESH:
            begun = f"{self.pretraining_updates} updates{kind} before"
        task = f"{self.dataset}, {self.share:g} of it, {self.setting}, {self.updates} updates"
        return f"{task}, {begun}, {self.episodes} episodes, seed {seed}"

    def learn(self, seed: int, name: str) -> Run:
        """Train and evaluate one agent."""
        whole, initial = load_trajectories(self.dataset), INITIALIZATIONS[name]
        agent = self.build(whole, seed)
        if initial.pretraining is not None:
            settings = SHORT[self.setting].arguments()
            source = initial.pretraining(whole, seed=seed, **settings).learn(self.pretraining_updates)
            load_parts(agent, source, initial.parts)
        agent.learn(self.updates)
        target = float(whole.returns.max())
        report = evaluate(agent, agent.make_env(self.episodes), self.episodes, target_returns=[target]).first
        return Run(name, seed, report.returns.tolist(), report.lengths.tolist())

    def build(self, whole: Trajectories, seed: int) -> DecisionTransformer:
        """Build an agent with random weights that is trained on a part of the episodes."""
        part, settings = some_episodes(whole, self.share, seed), SHORT[self.setting].arguments()
        return DecisionTransformer(part, episode_length=int(whole.lengths.max()), seed=seed, **settings)

    def table(self, runs: list[Run]) -> Table:
        """Return the table of results: a row for each kind of initial weights."""
        table = Table(*COLUMNS, title=f"{self.dataset}, {self.share:.0%} of the episodes")
        for name in self.initializations:
            returns = np.array([run.returns for run in runs if run.initialization == name])
            table.add_row(
                INITIALIZATIONS[name].title,
                str(len(returns)),
                f"{stratified_interquartile_mean([returns]):.0f}",
                f"{returns.mean():.0f}",
                ", ".join(f"{each:.0f}" for each in returns.mean(axis=1)),
            )
        return table


def load_parts(agent: DecisionTransformer, source: TrajectoryAlgorithm, parts: tuple[str, ...]) -> None:
    """Copy these modules from pre-training to an agent; its other modules keep their weights."""
    kept = {name: deepcopy(getattr(agent.policy, name).state_dict()) for name in PARTS if name not in parts}
    agent.load_pretrained(source)
    for name, state in kept.items():
        getattr(agent.policy, name).load_state_dict(state)


def some_episodes(data: Trajectories, share: float, seed: int) -> Trajectories:
    """Return a random part of the episodes, at least one, with the normalization of all episodes."""
    number = max(1, round(share * data.episodes))
    chosen = np.sort(np.random.default_rng(seed).permutation(data.episodes)[:number])
    bounds = [slice(*data.offsets[e : e + 2].tolist()) for e in chosen]

    def part(array: NDArray) -> NDArray:
        return np.concatenate([array[steps] for steps in bounds])

    return replace(
        data,
        observations=part(data.observations),
        actions=part(data.actions),
        rewards=part(data.rewards),
        return_to_go=part(data.return_to_go),
        offsets=np.cumsum([0, *data.lengths[chosen]]),
        terminated=data.terminated[chosen],
        truncated=data.truncated[chosen],
    )
