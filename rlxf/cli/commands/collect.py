"""``rlxf collect``: record agents into a Minari dataset."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.argument_checks import Count, check_counts, check_from_zero
from rlxf.cli.dataset_table import show_summaries
from rlxf.cli.options.env_options import EnvOptions, Json
from rlxf.cli.options.sb3_options import SB3Files

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.collection.behavior_policy import Agent, BehaviorPolicy
    from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Record agents of runs, agents of Stable-Baselines3, or a random policy into a Minari dataset.

    The dataset holds whole episodes and names the agents that played them. Train on it with "rlxf train dt",
    list it with "rlxf datasets". With --mix 0 0.1 1, a third of the episodes is played by the agent itself, a
    third with 10% random actions, and a third with random actions only.

    Example: rlxf collect runs/gtrxl-rlxf-TMaze-v0-0 --dataset rlxf/tmaze/mixed-v0 --mix 0 0.1 1
    """

    runs: Positional[tuple[Path, ...]] = ()
    """Folders of runs. Each agent plays the same number of episodes. By default actions are random."""
    dataset: str
    """Minari id of the new dataset: namespace/name-v0.
    Datasets are stored in the folder MINARI_DATASETS_PATH, by default ~/.minari/datasets."""
    episodes: Count = 1000
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
    n_envs: Count = 32
    """Number of parallel environments."""
    seed: int = 0
    """Seed of environments, random actions and samples. The same seed records the same dataset."""
    author: str | None = None
    """Author in the metadata of the dataset."""
    trust: bool = False
    """Trust the authors of the run and of its data.
    The module that their environment names is imported, and its arguments and wrappers are used.
    Without this flag, only registered environments are used."""
    progress_bar: bool = True
    """Show a progress bar."""
    sb3: SB3Files = field(default_factory=SB3Files)
    """Agents saved by Stable-Baselines3, in addition to those of runs. Their files contain code."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. "auto" selects the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """Check the options, load the agents, and return the recording to run."""
        from rlxf.collection.storage import check_new, storage_space
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_from_zero(self, "seed")
        check_new(self.dataset)
        self.sb3.check()
        runs = [RunFolder.open(path) for path in self.runs]
        env = self._env(runs)
        storage_space(env.observation_space)  # raises if datasets cannot store it
        return partial(self._collect, self._skills(runs, env), env)

    def _env(self, runs: list["RunFolder"]) -> "VecEnv":
        from rlxf.cli.run_loading import make_env

        n_envs = min(self.n_envs, self.episodes)
        if runs:
            return make_env(runs[0], self.env, self.env_kwargs, n_envs, self.trust)
        if self.env is None:
            raise ValueError(
                "no environment given: pass the folder of a run, or --env for random actions and --sb3.files"
            )
        return EnvOptions(env=self.env, env_kwargs=self.env_kwargs).make(n_envs, None)

    def _skills(self, runs: list["RunFolder"], env: "VecEnv") -> list["BehaviorPolicy"]:
        from rlxf.cli.run_loading import default_target_returns, load_agent
        from rlxf.collection.behavior_policy import plan_policies

        agents: list[Agent] = [load_agent(run, env, run.checkpoint, self.device) for run in runs]
        agents += self.sb3.agents(env, self.device)
        targets = default_target_returns(agents, self.target_returns)
        return plan_policies(agents or [None], self.mix, targets, self.episodes)

    def _collect(self, skills: list["BehaviorPolicy"], env: "VecEnv") -> None:
        from rlxf.collection.recording import record
        from rlxf.data import summarize

        with closing(env):
            record(
                skills,
                env,
                self.dataset,
                self.episodes,
                deterministic=self.deterministic,
                seed=self.seed,
                author=self.author,
                progress_bar=self.progress_bar,
            )
        show_summaries("recorded", [summarize(self.dataset)])
