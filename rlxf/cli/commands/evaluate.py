"""``rlxf evaluate``: evaluate the agent of a run."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.argument_checks import Count, check_counts, check_from_zero
from rlxf.cli.options.env_options import Json
from rlxf.cli.output import print_out

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.cli.run_loading import Agent
    from rlxf.evaluation import Report, TargetSweep
    from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate the agent of a run over whole episodes, and report its returns.

    The best checkpoint of the training is evaluated, too, if there is one. The results are also written to
    TensorBoard, in the subfolders "evaluation" and "evaluation-best" of the run. With several target returns,
    targets.png there plots the achieved returns against the requested ones.

    Example: rlxf evaluate runs/gtrxl-rlxf-TMaze-v0-0 --episodes 500
    """

    run: Positional[Path]
    """Folder of the run."""
    checkpoint: Literal["last", "best", "all"] = "all"
    """Checkpoint to evaluate: the last one, the best one of the training, or both."""
    episodes: Count = 200
    """Number of episodes. With 200, the 95% confidence interval of a success rate is at most +-0.07."""
    env: str | None = None
    """Gymnasium id of another environment with the same spaces.
    None means that of the training, or of the training data.
    With an id, the arguments of the run are not used; the environment of the data keeps its own."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. Without --env they update those of the run."""
    deterministic: bool = True
    """Take the most likely action instead of a sample."""
    n_envs: Count = 32
    """Number of parallel environments, at most one per episode."""
    target_returns: tuple[float, ...] = ()
    """Target returns for a Decision Transformer, each evaluated on the same episodes.
    By default the target is the largest return in its training data."""
    remember: tuple[str, ...] = ()
    """Minari ids of datasets that serve as a kNN datastore. The weights do not change."""
    head: str | None = None
    """Output head that reads the datastore: knn-lm, spalm, or JSON like {"name": "KNNLM", "k": 8}.
    None means knn-lm."""
    seed: int = 1_000_000
    """Seed of the environments. The default differs from usual training seeds, so that levels are new."""
    trust: bool = False
    """Trust the authors of the run and of its data.
    The module that their environment names is imported, and its arguments and wrappers are used.
    Without this flag, only registered environments are used."""
    progress_bar: bool = True
    """Show a progress bar."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. "auto" selects the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """Load the agents, make the environments, and return the evaluation to run."""
        from rlxf.cli.finalize_run import select_checkpoints
        from rlxf.cli.run_loading import default_target_returns, load_agent, make_env, with_datastore
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_from_zero(self, "seed")
        run = RunFolder.open(self.run)
        env = make_env(run, self.env, self.env_kwargs, min(self.n_envs, self.episodes), self.trust)
        files = select_checkpoints(run, self.checkpoint)
        agents = {name: load_agent(run, env, path, self.device) for name, path in files.items()}
        targets = default_target_returns(list(agents.values()), self.target_returns)
        agents = with_datastore(agents, self.remember, self.head, self.progress_bar)
        return partial(self._evaluate, agents, env, targets, run)

    def _evaluate(
        self, agents: "dict[str, Agent]", env: "VecEnv", targets: Sequence[float] | None, run: "RunFolder"
    ) -> None:
        from rlxf.cli.finalize_run import FOLDERS, plot_targets, tables

        with closing(env):
            reports = {name: self._report(agent, name, env, targets, run) for name, agent in agents.items()}
        steps = {name: agent.num_timesteps for name, agent in agents.items()}
        for table in tables(reports, steps):
            print_out(table)
        plot_targets(reports, {name: run.path / folder for name, folder in FOLDERS.items()})

    def _report(
        self, agent: "Agent", name: str, env: "VecEnv", targets: Sequence[float] | None, run: "RunFolder"
    ) -> "Report | TargetSweep":
        from torch.utils.tensorboard import SummaryWriter

        from rlxf.cli.finalize_run import FOLDERS
        from rlxf.evaluation import evaluate
        from rlxf.evaluation.environment import with_training_normalization

        with SummaryWriter(str(run.path / FOLDERS[name])) as writer:
            return evaluate(
                agent,
                with_training_normalization(agent, env),
                self.episodes,
                target_returns=targets,
                deterministic=self.deterministic,
                seed=self.seed,
                progress_bar=self.progress_bar,
                logger=writer,
            )
