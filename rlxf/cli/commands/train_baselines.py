"""``rlxf train bc`` and ``rlxf train rvs``: multilayer perceptrons on Minari datasets, saved as a run."""

from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from rlxf.agents.mlp import BehaviorCloning, ReturnConditionedMLP
from rlxf.agents.offline.objectives import OBJECTIVES
from rlxf.cli.offline_options import (
    Datasets,
    Download,
    EvaluateEvery,
    EvaluationEnv,
    EvaluationEnvArguments,
    OfflineTrainingOptions,
    TrustData,
    Updates,
    Videos,
)
from rlxf.cli.offline_training import EvaluatedOfflineTraining
from rlxf.cli.options import (
    CheckpointSeconds,
    ConfigFile,
    ConfigTrust,
    Device,
    LogInterval,
    Quiet,
    StopReturn,
    Track,
    TunedName,
    argument_defaults,
    options,
)
from rlxf.cli.run_options import FLOAT32_BYTES, check_config_budget
from rlxf.cli.runs import CLONING, RVS
from rlxf.training import RunFolder, parse_schedule
from rlxf.training.checkpoints import EVERY_SECONDS

DEFAULTS = argument_defaults(BehaviorCloning)
"""Argument of `BehaviorCloning` -> default."""


@options
class MLPOptions(OfflineTrainingOptions):
    """Options of the multilayer perceptron and of AdamW."""

    context_length: int = DEFAULTS["context_length"]
    """Number of the last observations that an action depends on."""
    hidden_sizes: tuple[int, ...] = DEFAULTS["hidden_sizes"]
    """Widths of the hidden layers."""
    dropout: float = DEFAULTS["dropout"]
    """Dropout probability of the hidden layers."""
    learning_rate: str = str(DEFAULTS["learning_rate"])
    """Learning rate of AdamW over the training: NUMBER, linear:START:END[:FRACTION] or cosine:START:END."""
    batch_size: int = DEFAULTS["batch_size"]
    """Number of steps per update."""
    weight_decay: float = DEFAULTS["weight_decay"]
    """Weight decay coefficient of AdamW."""
    warmup_updates: int | None = DEFAULTS["warmup_updates"]
    """Number of updates in which the learning rate rises from 0. None means a tenth of the training."""
    max_grad_norm: float = DEFAULTS["max_grad_norm"]
    """Maximum norm of the gradient; larger gradients are clipped."""
    objective: Literal["Imitation", "MaximumEntropy"] = "Imitation"
    """Training objective. MaximumEntropy trains a stochastic policy."""
    device: Device = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError: if the objective is unknown, e.g. in a ``config.json``.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        own = {"learning_rate": parse_schedule(self.learning_rate), "objective": OBJECTIVES[self.objective]()}
        return super().arguments() | own

    def memory_usage(self) -> dict[str, int]:
        """Return lower bounds of the bytes of the weights and of a batch."""
        sizes = self.hidden_sizes
        weights = sum(one * other for one, other in pairwise((self.context_length, *sizes)))
        batch = self.batch_size * (self.context_length + sum(sizes))
        return {
            f"weights of hidden_sizes {sizes}": weights * FLOAT32_BYTES,
            f"a batch of batch_size {self.batch_size}": batch * FLOAT32_BYTES,
        }


@options
class MLPTraining(EvaluatedOfflineTraining):
    """Options of all commands that train a multilayer perceptron on datasets."""

    dataset: Datasets
    updates: Updates = 100_000
    download: Download = False
    trust_data: TrustData = False
    env: EvaluationEnv = None
    env_kwargs: EvaluationEnvArguments = field(default_factory=dict)
    seed: int = 0
    """Seed of weights, batches and dropout. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means runs/NAME-DATASET-SEED. It must not exist."""
    config: ConfigFile = None
    trust: ConfigTrust = False
    episodes: int = 100
    """Number of episodes of the final evaluation. 0 turns off all evaluations."""
    evaluate_every: EvaluateEvery = None
    evaluation_episodes: int = 20
    """Number of episodes of an evaluation during training. The training waits for it."""
    stop_return: StopReturn = None
    videos: Videos = True
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates, loss and evaluations every few seconds, and progress bars."""
    quiet: Quiet = False
    track: Track = None
    learner: Annotated[MLPOptions, arg(name="")] = MLPOptions()

    evaluation_budget = 1.0
    """Default maximum number of environment steps of evaluations per update."""
    video_budget = 0.02
    """Default maximum number of recorded steps per update.

    An update takes about 4 ms, and a recorded step 10 ms.
    """

    def core_config(self, agent: Any) -> dict[str, Any]:
        """Return no entry: there is no transformer."""
        return {}

    def check_memory(self, run: RunFolder) -> None:
        """Raise ValueError if the options of a run need more memory than the budget allows."""
        check_config_budget(run, self.learner.memory_usage())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the agent other than the dataset and those of one agent only."""
        return self.learner.arguments() | {"seed": self.seed, "trust": self.trust_data}


@options
class TrainBehaviorCloning(MLPTraining):
    """Train behavior cloning on Minari datasets, evaluate it, and save it in a new folder.

    A multilayer perceptron imitates all episodes, or the best fraction of them. It needs no target return.
    The folder has the files of "rlxf train dt", and "rlxf resume" continues an interrupted training.

    Example: rlxf train bc --dataset cartpole/random-v0 --updates 500 --best 0.1
    """

    tuned: TunedName = None
    best: float = 1.0
    """Fraction of the episodes to imitate, those with the highest returns. Below 1 it needs ten episodes."""

    agent_name, folder_prefix = CLONING, "bc"

    def build(self) -> BehaviorCloning:
        """Load the datasets, and return the agent."""
        return BehaviorCloning(self.load_data(), self.best, **self.arguments())


@options
class TrainReturnConditionedMLP(MLPTraining):
    """Train a return-conditioned multilayer perceptron (RvS-R) on Minari datasets, and save it.

    It is evaluated for target returns, as a Decision Transformer. The folder has the files of "rlxf train
    dt", and "rlxf resume" continues an interrupted training.

    Example: rlxf train rvs --dataset cartpole/random-v0 --updates 500 --hidden-sizes 64 64
    """

    target_returns: tuple[float, ...] | None = None
    """Target returns of the evaluations. None means the largest return in the data."""
    return_scale: float | None = None
    """Divisor of returns. None means the standard deviation of the returns-to-go in the data."""
    learner: Annotated[MLPOptions, arg(name="")] = MLPOptions(hidden_sizes=(1024, 1024))

    agent_name, folder_prefix = RVS, "rvs"

    def build(self) -> ReturnConditionedMLP:
        """Load the datasets, and return the agent."""
        return ReturnConditionedMLP(self.load_data(), return_scale=self.return_scale, **self.arguments())

    def resolved_options(self, agent: ReturnConditionedMLP) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        return super().resolved_options(agent) | {"return_scale": agent.return_scale}
