"""``rlxf evaluate``: play episodes with the agent of a run."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.screen import show
from rlxf.cli.task import Json

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.cli.players import Agent
    from rlxf.evaluation import Report, TargetSweep
    from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play whole episodes with the agent of a run and report its returns.

    If a best checkpoint was chosen while it learned, it plays too, and is reported beside the last one. The
    numbers also go to TensorBoard, in the folders "evaluation" and "evaluation-best" of the run. So does the
    picture of what was asked for and what was reached, if there are several target returns: targets.png.

    Example: rlxf evaluate runs/gtrxl-rlxf-TMaze-v0-0 --episodes 500
    """

    run: Positional[Path]
    """Folder of the run."""
    checkpoint: Literal["last", "best", "all"] = "all"
    """Which agent plays: the last one, the best one of the evaluations during training, or both."""
    episodes: Count = 200
    """Number of episodes: 200 resolve a success rate to about 0.07."""
    env: str | None = None
    """Gymnasium id of another task with the same spaces; None is the one trained on, or that of the data. An
    id that is given drops the arguments of the run; the environment of the data keeps those of the data."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object; without --env they change those of the run."""
    deterministic: bool = True
    """Take the most likely action instead of a sample."""
    n_envs: Count = 32
    """Environments side by side, at most one per episode."""
    target_returns: tuple[float, ...] = ()
    """Returns to ask a Decision Transformer for, in the same episodes; none: the highest in its data."""
    remember: tuple[str, ...] = ()
    """Minari ids of trajectories that the agent acts by, too, without learning from them."""
    head: str | None = None
    """How it reads them: knn-lm or spalm, or JSON like {"name": "KNNLM", "k": 8}; None is knn-lm."""
    seed: int = 1_000_000
    """Of the environments; far from the seeds one trains with, so that generated levels are new."""
    trust: bool = False
    """Trust the authors of the run and its data: the module that their environment names is imported, and its
    arguments and wrappers are used. Without this flag only registered environments are used."""
    progress_bar: bool = True
    """Show a progress bar."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        from rlxf.cli.checkpoints import chosen
        from rlxf.cli.players import load_agent, make_env, remembering, targets_of
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_from_zero(self, "seed")
        run = RunFolder.open(self.run)
        env = make_env(run, self.env, self.env_kwargs, min(self.n_envs, self.episodes), self.trust)
        files = chosen(run, self.checkpoint)
        agents = {name: load_agent(run, env, path, self.device) for name, path in files.items()}
        targets = targets_of(list(agents.values()), self.target_returns)
        agents = remembering(agents, self.remember, self.head, self.progress_bar)
        return partial(self._evaluate, agents, env, targets, run)

    def _evaluate(
        self, agents: "dict[str, Agent]", env: "VecEnv", targets: Sequence[float] | None, run: "RunFolder"
    ) -> None:
        from rlxf.cli.checkpoints import FOLDERS, draw_targets, tables

        with closing(env):
            reports = {name: self._report(agent, name, env, targets, run) for name, agent in agents.items()}
        steps = {name: agent.num_timesteps for name, agent in agents.items()}
        for table in tables(reports, steps):
            show(table)
        draw_targets(reports, {name: run.path / folder for name, folder in FOLDERS.items()})

    def _report(
        self, agent: "Agent", name: str, env: "VecEnv", targets: Sequence[float] | None, run: "RunFolder"
    ) -> "Report | TargetSweep":
        from torch.utils.tensorboard import SummaryWriter

        from rlxf.cli.checkpoints import FOLDERS
        from rlxf.evaluation import evaluate
        from rlxf.evaluation.environment import normalised_as_in_training

        with SummaryWriter(str(run.path / FOLDERS[name])) as writer:
            return evaluate(
                agent,
                normalised_as_in_training(agent, env),
                self.episodes,
                target_returns=targets,
                deterministic=self.deterministic,
                seed=self.seed,
                progress_bar=self.progress_bar,
                logger=writer,
            )
