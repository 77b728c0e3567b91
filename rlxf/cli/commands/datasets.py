"""``rlxf datasets`` and ``rlxf collect``: list or inspect Minari datasets, record agents into a new one."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import HEAVY_HEAD, Box
from rich.table import Column
from tyro.conf import Positional

from rlxf.cli.env_options import EnvOptions
from rlxf.cli.options import (
    Command,
    Device,
    Json,
    Trust,
    check_counts,
    check_figure_path,
    check_options_not_negative,
    options,
)
from rlxf.cli.output import console, print_out
from rlxf.utils.tables import WIDTH, Table, printable

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.collection.behavior_policy import Agent
    from rlxf.data import DatasetReport, DatasetSummary
    from rlxf.envs.described_env import DescribedEnv
    from rlxf.training import RunFolder


@options
class Datasets(Command):
    """List the Minari datasets on this machine, or inspect one of them before training.

    Without ID, each dataset has one line with its steps, episodes and returns. With the ID of a dataset, its
    spaces, returns, normalized scores, ends of episodes, rewards and actions are shown, and a sentence about
    each property that affects the training. The dataset is converted once, as for training.

    Datasets are stored in the folder MINARI_DATASETS_PATH, by default ~/.minari/datasets. Record a dataset
    with "rlxf collect", or download one from Minari with --download.

    The mark "(JPEG)" means that images are stored with lossy compression, and differ from those of the
    environment.

    Example: rlxf datasets cartpole/random-v0 --plot returns.png
    """

    dataset: Positional[str | None] = None
    """Minari id of the dataset to inspect. None lists all datasets."""
    plot: Path | None = None
    """PNG file for a plot of the distribution of returns. None means no plot."""
    download: bool = False
    """Download the dataset if it is not on this machine."""
    progress_bar: bool = True
    """Show a progress bar while the dataset is converted."""

    def prepare(self) -> Callable[[], None]:
        """Check the options, read the dataset, and return the function that prints the list or the report."""
        from rlxf.agents.offline.dataset_info import DatasetInfo
        from rlxf.data import DatasetReport, load_trajectories

        if self.dataset is None:
            self._check_no_options()
            return _show_datasets
        if self.plot is not None:
            check_figure_path("--plot", self.plot)
        data = load_trajectories(self.dataset, download=self.download, progress_bar=self.progress_bar)
        return partial(_show_report, DatasetReport.of(data), DatasetInfo.of(data).env, self.plot)

    def _check_no_options(self) -> None:
        for name in ("plot", "download"):
            if getattr(self, name):
                raise ValueError(f"--{name} needs the id of a dataset: rlxf datasets ID --{name}")


def _show_datasets() -> None:
    """Print one row per dataset, followed by the errors of datasets that cannot be read."""
    from rlxf.data import DatasetError, local_folder, local_ids, summarize

    summaries, errors = [], []
    for dataset_id in local_ids():
        try:
            summaries.append(summarize(dataset_id))
        except (DatasetError, OSError) as error:
            errors.append(f"{dataset_id} cannot be read: {error}")
    if summaries:
        show_summaries(f"datasets in {local_folder()}", summaries)
    else:
        print_out(f"no datasets in {local_folder()}; record one with rlxf collect, or run minari download ID")
    for error_text in errors:
        print_out(printable(error_text))


def _show_report(report: "DatasetReport", env: "DescribedEnv | None", plot: Path | None) -> None:
    """Print the statistics of a dataset, the registration of its environment and the findings."""
    difference = None if env is None else env.registration()
    table = report.table()
    if env is not None:
        table.add_row("registered here", "no, see below" if difference else "yes, the same version")
    print_out(table)
    print_out(str(report.histogram("#" if console().options.ascii_only else "█")))
    findings = [*report.findings, *filter(None, [difference])]
    print_out(_as_list(findings or ["nothing unusual was found"]))
    if plot is not None:
        report.plot(plot)
        print_out(f"plot of the distribution of returns: {plot}")


def _as_list(findings: Sequence[str]) -> Table:
    """Return findings as a list that is wrapped at the width of the console."""
    title = "What to know before training"
    table = Table("", "", title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row("-", printable(finding))
    return table


TEXTS = ("dataset", "environment")
NUMBERS = ("steps", "episodes", "return: min", "mean", "max", "MB")
"""Columns of texts, and of numbers, which are aligned to the right."""


def show_summaries(title: str, summaries: "Sequence[DatasetSummary]") -> None:
    """Print one row per dataset. Ids are never wrapped, so that they can be copied.

    The table has a frame if the output is a terminal that is wide enough. Otherwise the title and plain
    columns are printed, with one line per dataset that begins with its id.
    """
    out = console()
    framed = _table(summaries, HEAVY_HEAD, title=title)
    needed = out.measure(framed, options=out.options.update(max_width=WIDTH)).maximum
    if out.is_terminal and needed <= out.width:
        out.print(framed)
    else:
        out.print(f"{title}\n{_table(summaries, None, pad_edge=False)}", soft_wrap=True)


def row(summary: "DatasetSummary") -> list[str]:
    """Return the cells of a dataset, one for each of `TEXTS` and `NUMBERS`.

    "(JPEG)" follows the environment if images are stored with lossy compression.
    """
    returns = summary.returns
    return [
        printable(summary.id),
        printable(summary.environment or "unknown") + " (JPEG)" * summary.lossy_images,
        f"{summary.lengths.sum():,}",
        f"{len(summary.lengths):,}",
        *(f"{value:,.1f}" for value in (returns.min(), returns.mean(), returns.max())),
        f"{summary.size / 1e6:.1f}",
    ]


def _table(summaries: "Sequence[DatasetSummary]", box: Box | None, **options: Any) -> Table:
    texts = [Column(name, no_wrap=True) for name in TEXTS]
    numbers = [Column(name, justify="right", no_wrap=True) for name in NUMBERS]
    table = Table(*texts, *numbers, box=box, **options)
    for summary in summaries:
        table.add_row(*row(summary))
    return table


@options
class SB3Files:
    """Agents saved by Stable-Baselines3 or sb3-contrib. Their files contain code; see --sb3.trust."""

    files: tuple[Path, ...] = ()
    """Files of agents, NAME.zip. Each agent plays the same number of episodes. Recording
    them requires --env or a run."""
    trust: bool = False
    """Trust the authors of these files. Loading a file executes the code that it contains."""
    normalizers: tuple[Path, ...] = ()
    """VecNormalize file of each agent, e.g. NAME/vecnormalize.pkl of the RL Zoo.
    By default observations are not normalized."""
    algorithm: str | None = None
    """Algorithm of the agents, named as in the RL Zoo, e.g. ppo or sac. None reads it from the files."""

    def check(self) -> None:
        """Raise ValueError if the files are not trusted, or the number of normalizers is wrong."""
        if self.files and not self.trust:
            raise ValueError(
                f"{self.files[0]} is not opened: loading a file of Stable-Baselines3 executes the code that "
                f"it contains. If you trust its author, add --sb3.trust"
            )
        if self.normalizers and len(self.normalizers) != len(self.files):
            raise ValueError(
                f"--sb3.normalizers must name one file for each of {len(self.files)} agents, or none, got "
                f"{len(self.normalizers)}"
            )

    def agents(self, env: "VecEnv", device: str) -> "list[BaseAlgorithm]":
        """Load the agents to act in ``env``, which has raw observations.

        Raises:
            ValueError, OSError, ImportError: as in `rlxf.import_sb3`.
        """
        from rlxf.agents.sb3 import import_sb3

        load = partial(import_sb3, trust=self.trust, env=env, algorithm=self.algorithm, device=device)
        pairs = zip(self.files, self.normalizers or (None,) * len(self.files), strict=True)
        return [load(file, normalizer=normalizer) for file, normalizer in pairs]


@options
class Collect(Command):
    """Record agents of runs, agents of Stable-Baselines3, or a random policy into a Minari dataset.

    The dataset holds whole episodes and names the agents that played them. Train on it with "rlxf train dt";
    "rlxf datasets" lists it. With --mix 0 0.1 1, a third of the episodes is played by the agent itself, a
    third with 10% random actions, and a third with random actions only.

    Example: rlxf collect runs/gtrxl-rlxf-TMaze-v0-0 --dataset tmaze/mixed-v0 --mix 0 0.1 1
    """

    runs: Positional[tuple[Path, ...]] = ()
    """Folders of runs. Each agent plays the same number of episodes. By default actions are random."""
    dataset: str
    """Minari id of the new dataset: namespace/name-v0.
    Datasets are stored in the folder MINARI_DATASETS_PATH, by default ~/.minari/datasets."""
    episodes: int = 1000
    """Total number of episodes to record."""
    mix: tuple[float, ...] = (0.0,)
    """Fractions of random actions, from 0 to 1. The episodes are divided equally among them."""
    target_returns: tuple[float, ...] = ()
    """Target returns for Decision Transformers. The episodes are divided equally among them.
    By default the target is the largest return in their training data."""
    env: str | None = None
    """Gymnasium id of the environment. None means that of the first run; it is required without a run."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. Without --env they update those of the run."""
    deterministic: bool = False
    """Take the most likely action instead of a sample."""
    n_envs: int = 32
    """Number of parallel environments."""
    seed: int = 0
    """Seed of environments, random actions and samples. The same seed records the same dataset."""
    author: str | None = None
    """Author in the metadata of the dataset."""
    trust: Trust = False
    progress_bar: bool = True
    """Show a progress bar."""
    sb3: SB3Files = field(default_factory=SB3Files)
    """Agents saved by Stable-Baselines3, in addition to those of runs. Their files contain code."""
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Check the options, load the agents, and return the recording to run."""
        from rlxf.collection.behavior_policy import plan_policies
        from rlxf.collection.storage import check_new, storage_space
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_options_not_negative(self, "seed")
        check_new(self.dataset)
        self.sb3.check()
        runs = [RunFolder.open(path) for path in self.runs]
        env = self._env(runs)
        storage_space(env.observation_space)  # raises if datasets cannot store it
        agents, targets = self._agents(runs, env)
        plan_policies(agents, self.mix, targets, self.episodes)  # raises if an option is out of range
        return partial(self._collect, agents, targets, env)

    def _env(self, runs: list["RunFolder"]) -> "VecEnv":
        from rlxf.cli.runs import make_env

        n_envs = min(self.n_envs, self._most_episodes(runs))
        if runs:
            return make_env(runs[0], self.env, self.env_kwargs, n_envs, self.trust)
        if self.env is None:
            raise ValueError(
                "no environment given: pass the folder of a run, or --env for random actions and --sb3.files"
            )
        return EnvOptions(env=self.env, env_kwargs=self.env_kwargs).make(n_envs, None)

    def _most_episodes(self, runs: list["RunFolder"]) -> int:
        """Return the largest number of episodes of one policy: more environments have nothing to record."""
        from rlxf.collection.behavior_policy import plan_policies
        from rlxf.evaluation.rollout import quotas

        agents = [None] * max(1, len(runs) + len(self.sb3.files))  # they are loaded for the environment
        policies = plan_policies(agents, self.mix, self.target_returns or None, self.episodes)
        return int(quotas(self.episodes, len(policies)).max())

    def _agents(
        self, runs: list["RunFolder"], env: "VecEnv"
    ) -> tuple[Sequence["Agent"], Sequence[float] | None]:
        """Return the agents, None for random actions, and their target returns."""
        from rlxf.cli.reports import default_target_returns
        from rlxf.cli.runs import load_agent

        agents: list[Agent] = []
        for run in runs:
            try:
                agents.append(load_agent(run, env, run.final_checkpoint, self.device))
            except ValueError as error:
                raise ValueError(f"{run.path}: {error}") from error
        agents += self.sb3.agents(env, self.device)
        return agents or [None], default_target_returns(agents, self.target_returns)

    def _collect(self, agents: Sequence["Agent"], targets: Sequence[float] | None, env: "VecEnv") -> None:
        from rlxf.collection import collect
        from rlxf.data import summarize

        with closing(env):
            collect(
                agents,
                env,
                self.dataset,
                self.episodes,
                mix=self.mix,
                target_returns=targets,
                deterministic=self.deterministic,
                seed=self.seed,
                author=self.author,
                progress_bar=self.progress_bar,
            )
        show_summaries("recorded", [summarize(self.dataset)])
