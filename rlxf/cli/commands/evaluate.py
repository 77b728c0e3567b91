"""``rlxf evaluate``: evaluate the agent of a run."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Device, Json, Trust, check_counts, check_options_not_negative, options

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.cli.runs import Agent
    from rlxf.training import RunFolder


@options
class Evaluate(Command):
    """Evaluate the agent of a run over whole episodes, and report its returns.

    The checkpoints that the training selected are evaluated, too, if there are any. The results are also
    written to TensorBoard, with the tags "evaluation/...", "evaluation_best/..." and
    "evaluation_validation/..." of the run. With several target returns, targets.png in the subfolders
    "evaluation", "evaluation-best" and "evaluation-validation" plots achieved against requested returns.

    Example: rlxf evaluate runs/gtrxl-rlxf-TMaze-v0-0 --episodes 500
    """

    run: Positional[Path]
    """Folder of the run."""
    checkpoint: Literal["last", "best", "validation", "all"] = "all"
    """Checkpoint to evaluate: the last one, the best one of the evaluations during training, the one with the
    lowest validation loss (--validation-fraction), or all of them."""
    episodes: int = 200
    """Number of episodes. With 200, the 95% confidence interval of a success rate is at most +-0.07."""
    env: str | None = None
    """Gymnasium id of another environment with the same spaces.
    None means the environment of the training, or of the training data.
    With an id, the arguments of the run are not used; those of the data are used if they name the same id."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. Without --env they update those of the run."""
    deterministic: bool = True
    """Take the most likely action instead of a sample."""
    n_envs: int = 32
    """Number of parallel environments, at most one per episode."""
    target_returns: tuple[float, ...] = ()
    """Target returns for a Decision Transformer, each evaluated on the same episodes.
    By default the target is the largest return in its training data."""
    datastore: tuple[str, ...] = ()
    """Minari ids of datasets that serve as a kNN datastore. The weights do not change."""
    head: str | None = None
    """Output head that reads the datastore: knn-lm, spalm, or JSON like {"name": "KNNLM", "k": 8}.
    None means knn-lm."""
    seed: int = 1_000_000
    """Seed of the environments. The default differs from usual training seeds,
    so generated levels are new to the agent."""
    trust: Trust = False
    progress_bar: bool = True
    """Show a progress bar."""
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Load the agents, make the environments, and return the evaluation to run."""
        from rlxf.cli.reports import default_target_returns, select_checkpoints, with_datastore
        from rlxf.cli.runs import load_agent, make_env
        from rlxf.training import RunFolder

        check_counts(self, "episodes", "n_envs")
        check_options_not_negative(self, "seed")
        run = RunFolder.open(self.run)
        env = make_env(run, self.env, self.env_kwargs, min(self.n_envs, self.episodes), self.trust)
        files = select_checkpoints(run, self.checkpoint)
        agents = {name: load_agent(run, env, path, self.device) for name, path in files.items()}
        targets = default_target_returns(list(agents.values()), self.target_returns)
        agents = with_datastore(agents, self.datastore, self.head, self.progress_bar)
        return partial(self._evaluate, agents, env, targets, run)

    def _evaluate(
        self, agents: "dict[str, Agent]", env: "VecEnv", targets: Sequence[float] | None, run: "RunFolder"
    ) -> None:
        from rlxf.cli.reports import CHECKPOINT_EVALUATIONS, evaluate_checkpoints, plot_targets, print_reports
        from rlxf.training.tensorboard import evaluation_events

        folders = {name: run.path / CHECKPOINT_EVALUATIONS[name][0] for name in agents}
        with closing(env):
            reports = evaluate_checkpoints(
                run,
                agents,
                lambda name: evaluation_events(run.path, CHECKPOINT_EVALUATIONS[name][0]),
                self.progress_bar,
                env=env,
                episodes=self.episodes,
                target_returns=targets,
                deterministic=self.deterministic,
                seed=self.seed,
            )
        print_reports(run, agents, reports)
        plot_targets(reports, folders)
