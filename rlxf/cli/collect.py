"""``rlxf collect``: record agents into a Minari dataset."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.dataset_table import show_summaries
from rlxf.cli.sb3_files import SB3Files
from rlxf.cli.task import Json, Task

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.collection.skills import Agent, Skill
    from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Record the agents of runs, those of Stable-Baselines3, or random play, into a Minari dataset.

    "rlxf train dt" learns from it, and "rlxf datasets" lists it. It holds whole episodes and says who played
    them. With --mix 0 0.1 1 it holds less skill, too: a third of the episodes as the agent plays, a third
    with a tenth of its actions drawn at random, and a third of random play.

    Example: rlxf collect runs/gtrxl-rlxf-TMaze-v0-0 --dataset rlxf/tmaze/mixed-v0 --mix 0 0.1 1
    """

    runs: Positional[tuple[Path, ...]] = ()
    """Folders of runs, such as stages of learning; each plays equally often. None: random play."""
    dataset: str
    """The new Minari id: namespace/name-v0. Datasets are kept in MINARI_DATASETS_PATH, else in ~/.minari."""
    episodes: Count = 1000
    """Episodes to record in all."""
    mix: tuple[float, ...] = (0.0,)
    """Shares of random actions, from 0 to 1; an equal number of episodes is played with each of them."""
    target_returns: tuple[float, ...] = ()
    """What Decision Transformers are asked for, in equal numbers of episodes. None: the most they saw."""
    env: str | None = None
    """Gymnasium id of the task; None is that of the first run, and there is none without a run."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object; without --env they change those trained with."""
    deterministic: bool = False
    """Take the most likely action instead of a sample."""
    n_envs: Count = 32
    """Environments side by side."""
    seed: int = 0
    """Of environments, random actions and samples: the same seed records the same dataset."""
    author: str | None = None
    """Who is to be named as author of the dataset."""
    trust: bool = False
    """Trust the authors of the run and its data: the module that their environment names is imported, and its
    arguments and wrappers are used. Without this flag only registered environments are used."""
    progress_bar: bool = True
    """Show a progress bar."""
    sb3: SB3Files = field(default_factory=SB3Files)
    """Agents that Stable-Baselines3 saved, beside those of runs. Their files hold code, see --sb3.trust."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        from rlxf.collection.stored import stored_space
        from rlxf.collection.writing import check_new
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_from_zero(self, "seed")
        check_new(self.dataset)
        self.sb3.check()
        runs = [RunFolder.open(path) for path in self.runs]
        env = self._env(runs)
        stored_space(env.observation_space)  # refuses what no dataset keeps
        return partial(self._collect, self._skills(runs, env), env)

    def _env(self, runs: list["RunFolder"]) -> "VecEnv":
        from rlxf.cli.players import make_env

        n_envs = min(self.n_envs, self.episodes)
        if runs:
            return make_env(runs[0], self.env, self.env_kwargs, n_envs, self.trust)
        if self.env is None:
            raise ValueError(
                "there is no task: give the folder of a run, or --env for random play and --sb3.files"
            )
        return Task(env=self.env, env_kwargs=self.env_kwargs).make(n_envs, None)

    def _skills(self, runs: list["RunFolder"], env: "VecEnv") -> list["Skill"]:
        from rlxf.cli.players import load_agent, targets_of
        from rlxf.collection.skills import plan

        agents: list[Agent] = [load_agent(run, env, run.checkpoint, self.device) for run in runs]
        agents += self.sb3.agents(env, self.device)
        targets = targets_of(agents, self.target_returns)
        return plan(agents or [None], self.mix, targets, self.episodes)

    def _collect(self, skills: list["Skill"], env: "VecEnv") -> None:
        from rlxf.collection.recording import record
        from rlxf.envs.trajectories import summarize

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
