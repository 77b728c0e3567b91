"""``rlxf train dt``: train a Decision Transformer on datasets, evaluate it, and save it as a run."""

from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from stable_baselines3.common.vec_env import VecEnv
from tyro.conf import arg

from rlxf.agents.decision_transformer import DecisionTransformer, decision_transformer
from rlxf.attention import TransformerSpec
from rlxf.cli.options.common import (
    CheckpointSeconds,
    Count,
    Json,
    LogInterval,
    Pretrained,
    Quiet,
    check_counts,
    check_from_zero,
    options,
)
from rlxf.cli.options.offline_options import OfflineOptions, check_env_named, make_offline_env
from rlxf.cli.output import print_out
from rlxf.cli.run_loading import OFFLINE
from rlxf.cli.training_command import EvaluatedTrainingCommand
from rlxf.cli.training_session import Start
from rlxf.data import load_trajectories
from rlxf.evaluation.sweep import validate_targets
from rlxf.training import RunFolder
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.distributed import process_group

ENVIRONMENTS = 32
"""Maximum number of parallel environments of an evaluation."""


@options
class TrainDecisionTransformer(EvaluatedTrainingCommand):
    """Train a Decision Transformer on Minari datasets, evaluate it, and save it in a new folder.

    The folder contains config.json, checkpoint.zip, progress.csv and TensorBoard events; show them with the
    command "tensorboard --logdir runs". The checkpoint of the best evaluation during training is best.zip; it
    is reported next to the last checkpoint. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its
    progress, and "rlxf resume" continues it, also after a crash. Each batch is divided among the processes
    of torchrun: torchrun --nproc-per-node 4 -m rlxf train dt ...

    Each technique of the transformer is chosen by its name, e.g. --core.position rope; names are not case
    sensitive. With these options, --help shows the options of the chosen techniques. "rlxf techniques" lists
    all techniques. --settings kzl and --settings odt select published settings, which other options override.

    Example: rlxf train dt --dataset rlxf/cartpole/mixed-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine."""
    settings: Literal["kzl", "odt"] | None = None
    """Published settings, which other options override.
    They are those of Decision Transformer (kzl) or of Online Decision Transformer (odt).
    Add --help to show them."""
    updates: Count = 100_000
    """Number of weight updates, each on one batch."""
    target_returns: tuple[float, ...] | None = None
    """Target returns of the evaluations. None means the largest return in the data.
    With several targets, targets.png in the folder plots achieved against requested returns."""
    download: bool = False
    """Download datasets that are not on this machine."""
    trust_data: bool = False
    """Trust the authors of the data.
    Their full description of the environment (entry point, arguments, wrappers) is used, which can run code.
    Without this flag, the registered environment is used."""
    env: str | None = None
    """Gymnasium id of the environment for evaluations. None means that of the data.
    With package:id, the package is imported first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. In the environment of the data,
    they override its arguments."""
    seed: Count = 0
    """Seed of weights, windows and dropout. Equal seeds give equal runs on one machine."""
    pretrained: Pretrained = None
    run: Path | None = None
    """New folder of the run. None means runs/dt-DATASET-SEED. It must not exist."""
    episodes: Count = 100
    """Number of episodes of the final evaluation, per target return. 0 turns off all evaluations."""
    evaluate_every: Count | None = None
    """Number of updates between two evaluations during training.
    None means a tenth of the training, or longer if evaluations would take more than about a tenth of the
    training time; there is at least one evaluation, at the end. 0 means no evaluation during training."""
    evaluation_episodes: Count = 20
    """Number of episodes of an evaluation during training, per target return. The training waits for it."""
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates, loss and evaluations every few seconds, and progress bars."""
    quiet: Quiet = False
    learner: Annotated[OfflineOptions, arg(name="")] = OfflineOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. The default is that of Chen et al. 2021 (Decision Transformer)."""

    agent_name = OFFLINE
    evaluation_budget = 10.0
    """Default largest number of environment steps of evaluations for each update.

    An update of a small Transformer takes as long as about 50 steps of 20 parallel environments.
    """

    @property
    def total(self) -> int:
        """Number of updates of the training."""
        return self.updates

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"dt-{'+'.join(self.dataset)}"

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_counts(self, "updates", "log_interval")
        check_from_zero(self, "episodes")
        if self.evaluate_every and self.episodes == 0:
            raise ValueError(
                f"evaluate_every must be 0 or None if episodes is 0, got {self.evaluate_every}: leave one out"
            )
        super().check()

    def check_agent(self, agent: DecisionTransformer) -> None:
        """Raise ValueError or TypeError if environments or target returns are invalid."""
        validate_targets(self._targets(agent), agent.return_range)
        if self.episodes == 0:
            return
        check_env_named(agent, self.env, ", or train without evaluation: --episodes 0")
        with self.fresh_env(agent, 1):
            pass

    @classmethod
    def check_trust(cls, run: RunFolder) -> None:
        """Raise ValueError if the environment of a run needs trust."""
        super().check_trust(run)
        if run.config.get("trust_data"):
            raise ValueError(
                f"{run.path} was trained with --trust-data, in the environment described by its data: add "
                f"--trust if you trust the authors of the run and of "
                f"{', '.join(map(str, run.config['dataset']))}"
            )

    def with_trust(self) -> Self:
        """Return these options with trust in the descriptions of the environment in the datasets."""
        return replace(self, trust_data=True)

    def build(self) -> DecisionTransformer:
        """Load the datasets, and return the agent."""
        loading = {"download": self.download, "progress_bar": self.verbose}
        data = process_group().main_first(partial(load_trajectories, self.dataset, **loading))
        options = self.learner.arguments()
        return DecisionTransformer(data, core=self.core, seed=self.seed, trust=self.trust_data, **options)

    def build_at(self, start: Start) -> DecisionTransformer:
        """Return the agent to continue. After the last update it needs the data only if they are trusted."""
        if start.file is not None and start.steps >= self.updates and not self.trust_data:
            return DecisionTransformer.load(start.file, device=self.learner.device)
        return self.build()

    def resolved_options(self, agent: DecisionTransformer) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        return {
            "target_returns": self._targets(agent),
            "env": self.env or agent.dataset_info.env_id,
            "return_scale": agent.return_scale,
            "episode_length": agent.episode_length,
        }

    def make_env(self, agent: DecisionTransformer, episodes: int) -> VecEnv:
        """Make environments for an evaluation."""
        return make_offline_env(agent, self.env, self.env_kwargs, min(ENVIRONMENTS, episodes))

    def evaluation_interval(self, agent: DecisionTransformer) -> int:
        """Return the number of updates between two evaluations; 0 for no evaluation."""
        return super().evaluation_interval(agent) if self.episodes else 0

    def evaluation_options(self, agent: DecisionTransformer) -> dict[str, Any]:
        """Return the target returns as arguments of `evaluate`."""
        return {"target_returns": self._targets(agent)}

    def callback_options(self, agent: DecisionTransformer) -> dict[str, Any]:
        """Return the target returns, and the mean length of the episodes in the data."""
        assert agent.trajectories is not None  # it has the data to train on
        return super().callback_options(agent) | {"episode_length": float(agent.trajectories.lengths.mean())}

    def finish(self, agent: DecisionTransformer, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and the best one if there is one."""
        if self.episodes:
            super().finish(agent, run)
        else:
            env_option = "" if run.config["env"] else " --env ID"
            print_out(f"not evaluated because of --episodes 0; run: rlxf evaluate {run.path}{env_option}")

    def _targets(self, agent: DecisionTransformer) -> list[float]:
        return [agent.return_range[1]] if self.target_returns is None else list(self.target_returns)
