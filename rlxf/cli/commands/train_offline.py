"""``rlxf train dt`` and ``rlxf pretrain``: training on Minari datasets, saved as a run."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro
from stable_baselines3.common.vec_env import VecEnv
from tyro.conf import arg

from rlxf.agents.decision_transformer import KZL, ODT, DecisionTransformer, Imitation, decision_transformer
from rlxf.agents.decision_transformer.conditioning import CONDITIONINGS, TargetReturn
from rlxf.agents.offline.objectives import OBJECTIVES
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import TransformerSpec
from rlxf.cli.choices import parse_choice
from rlxf.cli.options import (
    CheckpointSeconds,
    Device,
    Json,
    LogInterval,
    Pretrained,
    Quiet,
    check_counts,
    check_not_negative,
    given_options,
    options,
)
from rlxf.cli.output import print_out
from rlxf.cli.runs import FLOAT32_BYTES, OFFLINE, PRETRAINING, SOURCES, check_env_named, make_offline_env
from rlxf.cli.training_command import EvaluatedTrainingCommand, TrainingCommand
from rlxf.cli.training_session import StartPoint
from rlxf.data import Trajectories, load_trajectories
from rlxf.evaluation.episodes import validate_targets
from rlxf.training import RunFolder, parse_schedule, schedule_to_text
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.distributed import process_group

DEFAULTS = {name: each.default for name, each in inspect.signature(DecisionTransformer).parameters.items()}
"""Argument of `DecisionTransformer` -> default."""


@options
class WindowOptions:
    """Options of AdamW and of the windows of the data."""

    context_length: int = DEFAULTS["context_length"]
    """Context length in environment steps, including the current one."""
    batch_size: int = DEFAULTS["batch_size"]
    """Number of windows per update."""
    learning_rate: str = "0.0001"
    """Learning rate of AdamW over the training: NUMBER, linear:START:END[:FRACTION] or cosine:START:END."""
    weight_decay: float = DEFAULTS["weight_decay"]
    """Weight decay coefficient of AdamW."""
    warmup_updates: int | None = DEFAULTS["warmup_updates"]
    """Number of updates in which the learning rate rises from 0. None means a tenth of the training."""
    max_grad_norm: float = DEFAULTS["max_grad_norm"]
    """Maximum norm of the gradient; larger gradients are clipped."""
    return_scale: float | None = DEFAULTS["return_scale"]
    """Divisor of returns. None means the standard deviation of the returns-to-go in the data."""
    episode_length: int | None = DEFAULTS["episode_length"]
    """Number of time steps with an embedding. None means the longest episode of the data."""
    device: Device = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent or of the pretraining."""
        return asdict(self) | {"learning_rate": parse_schedule(self.learning_rate)}

    def memory_usage(self, core: TransformerSpec) -> dict[str, int]:
        """Return the bytes of a batch, three tokens per step, and of the time-step embeddings."""
        tokens = 3 * self.context_length * self.batch_size
        windows = f"windows of batch_size {self.batch_size}, context_length {self.context_length}"
        return {
            windows: tokens * core.width * FLOAT32_BYTES,
            f"episode_length {self.episode_length}": (self.episode_length or 0) * core.width * FLOAT32_BYTES,
        }


@options
class OfflineOptions(WindowOptions):
    """`WindowOptions`, the context of an action and the training objective."""

    context: Literal["window", "episode"] = "window"
    """Steps that an action depends on: those of a window, or all steps of the episode.
    "episode" needs a core with memory or recurrence, whose state lasts for the whole episode."""
    objective: str = Imitation.__name__
    """Training objective: Imitation, MaximumEntropy or QRegularized, or a JSON object with options, e.g.
    '{"name": "QRegularized", "eta": 2}'. MaximumEntropy trains a stochastic policy, which can be fine-tuned
    online; QRegularized adds a critic."""
    conditioning: str = TargetReturn.__name__
    """Return on which actions are conditioned: TargetReturn, or a return that the model predicts: MaxReturn,
    ElasticHistory or SampledReturn. A JSON object gives options, e.g.
    '{"name": "MaxReturn", "expectile": 0.9}'."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError, TypeError: if objective or conditioning is unknown or invalid.
        """
        return super().arguments() | {
            "objective": parse_choice("objective", self.objective, OBJECTIVES),
            "conditioning": parse_choice("conditioning", self.conditioning, CONDITIONINGS),
        }


class OfflineTraining(TrainingCommand):
    """Training on Minari datasets, whose progress is counted in updates."""

    dataset: tuple[str, ...]
    updates: int
    download: bool
    folder_prefix: str
    """Start of the default name of the run folder."""

    @property
    def total(self) -> int:
        """Number of updates of the training."""
        return self.updates

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"{self.folder_prefix}-{'+'.join(self.dataset)}"

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_counts(self, "updates", "log_interval")
        super().check()

    def load_data(self) -> Trajectories:
        """Load the datasets; of several processes, the first one loads and downloads before the others."""
        loading = {"download": self.download, "progress_bar": self.verbose}
        return process_group().main_first(partial(load_trajectories, self.dataset, **loading))

    def build_for_resume(self, start: StartPoint) -> Any:
        """Return the agent to continue. If all updates are done, the datasets are not loaded."""
        if start.file is not None and start.steps >= self.updates:
            return SOURCES[self.agent_name].load(start.file, device=self.learner.device)
        return self.build()


PUBLISHED = {"kzl": KZL, "odt": ODT}
"""Name on the command line -> settings."""
ENVIRONMENTS = 32
"""Maximum number of parallel environments of an evaluation."""


@options
class TrainDecisionTransformer(OfflineTraining, EvaluatedTrainingCommand):
    """Train a Decision Transformer on Minari datasets, evaluate it, and save it in a new folder.

    The folder contains config.json, checkpoint.zip, progress.csv and TensorBoard events; show them with the
    command "tensorboard --logdir runs". The checkpoint of the best evaluation during training is best.zip; it
    is reported together with the last checkpoint. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its
    progress, and "rlxf resume" continues it, even after a crash. Each batch is divided among the processes
    of torchrun: torchrun --nproc-per-node 4 -m rlxf train dt ...

    Each technique of the transformer is chosen by its name, e.g. --core.position rope; case, dashes and
    underscores in names are ignored. With these options, --help shows the options of the chosen techniques.
    "rlxf techniques" lists all techniques. --settings kzl and --settings odt select published settings, which
    other options override.

    Example: rlxf train dt --dataset cartpole/random-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine."""
    settings: Literal["kzl", "odt"] | None = None
    """Published settings, which other options override.
    They are those of Decision Transformer (kzl) or of Online Decision Transformer (odt).
    Add --help to show them."""
    updates: int = 100_000
    """Number of weight updates, each on one batch."""
    target_returns: tuple[float, ...] | None = None
    """Target returns of the evaluations. None means the largest return in the data, or no target if the model
    predicts the return (--conditioning).
    With several targets, targets.png in the folder plots achieved against requested returns."""
    download: bool = False
    """Download datasets that are not on this machine."""
    trust_data: bool = False
    """Trust the authors of the data.
    Their full description of the environment (entry point, arguments, wrappers) is used, which can run code.
    Without this flag, the registered environment is used."""
    env: str | None = None
    """Gymnasium id of the environment for evaluations. None means that of the data.
    With module:id, the module is imported first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. In the environment of the data,
    they override its arguments."""
    seed: int = 0
    """Seed of weights, windows and dropout. Equal seeds give equal runs on one machine."""
    pretrained: Pretrained = None
    run: Path | None = None
    """New folder of the run. None means runs/dt-DATASET-SEED. It must not exist."""
    episodes: int = 100
    """Number of episodes of the final evaluation, per target return. 0 turns off all evaluations."""
    evaluate_every: int | None = None
    """Number of updates between two evaluations during training.
    None means a tenth of the training, or longer if evaluations would take more than about a tenth of the
    training time; there is at least one evaluation, at the end. 0 means no evaluation during training."""
    evaluation_episodes: int = 20
    """Number of episodes of an evaluation during training, per target return. The training waits for it."""
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates, loss and evaluations every few seconds, and progress bars."""
    quiet: Quiet = False
    learner: Annotated[OfflineOptions, arg(name="")] = OfflineOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. The default is that of Chen et al. 2021 (Decision Transformer)."""

    agent_name, folder_prefix = OFFLINE, "dt"
    evaluation_budget = 10.0
    """Default maximum number of environment steps of evaluations per update.

    An update of a small Transformer takes as long as about 50 steps of 20 parallel environments.
    """

    @classmethod
    def defaults(cls, args: Sequence[str]) -> Any:
        """Return the options with the published settings that ``args`` name, if there are any."""
        name = given_options(args, "settings").get("settings", "")
        if name not in PUBLISHED:
            return super().defaults(args)
        learner = {**PUBLISHED[name]}
        chosen: dict[str, Any] = {"settings": name, "core": learner.pop("core")}
        learner["learning_rate"] = str(schedule_to_text(learner["learning_rate"]))
        learner["objective"] = type(learner.get("objective", Imitation())).__name__
        return cls(dataset=tyro.MISSING, learner=OfflineOptions(**learner), **chosen)

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_not_negative(self, "episodes")
        if self.evaluate_every and self.episodes == 0:
            raise ValueError(
                f"--evaluate-every must be 0 or None if --episodes is 0, got {self.evaluate_every}: "
                f"leave one out"
            )
        super().check()

    def check_agent(self, agent: DecisionTransformer) -> None:
        """Raise ValueError or TypeError if environments or target returns are invalid."""
        self._check_targets(agent)
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
        options = self.learner.arguments() | {"trust": self.trust_data}
        return DecisionTransformer(self.load_data(), core=self.core, seed=self.seed, **options)

    def build_for_resume(self, start: StartPoint) -> DecisionTransformer:
        """Return the agent to continue. If all updates are done, only trusted data are loaded."""
        return self.build() if self.trust_data else super().build_for_resume(start)

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
        """Evaluate and report the last checkpoint, and the best one if there is one.

        With ``--episodes 0``, nothing is evaluated; the command that evaluates the run is printed.
        """
        if self.episodes:
            super().finish(agent, run)
        else:
            env_option = "" if run.config["env"] else " --env ID"
            print_out(f"not evaluated because of --episodes 0; run: rlxf evaluate {run.path}{env_option}")

    def _targets(self, agent: DecisionTransformer) -> list[float] | None:
        """Return the target returns; None if the agent predicts the return."""
        if not agent.return_conditioned:
            return None
        return [agent.return_range[1]] if self.target_returns is None else list(self.target_returns)

    def _check_targets(self, agent: DecisionTransformer) -> None:
        targets = self._targets(agent)
        if targets is not None:
            validate_targets(targets, agent.return_range)
        elif self.target_returns is not None:
            raise ValueError(
                f"--target-returns has no effect with --conditioning {self.learner.conditioning}, which "
                f"predicts the return: leave one of them out"
            )


@options
class Pretrain(OfflineTraining):
    """Pre-train weights by masked token prediction on trajectories, and save them in a new folder.

    Agents start from these weights with --pretrained FOLDER in "rlxf train dt" and "rlxf train gtrxl". Choose
    the same core options as for the agent. The folder contains config.json, checkpoint.zip, progress.csv and
    TensorBoard events. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its progress. "rlxf resume"
    continues it, even after a crash.

    Example: rlxf pretrain --dataset cartpole/random-v0 --updates 200 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine."""
    updates: int = 100_000
    """Number of weight updates, each on one batch."""
    mask_probability: float = 0.15
    """Probability with which a token is selected for prediction."""
    download: bool = False
    """Download datasets that are not on this machine."""
    seed: int = 0
    """Seed of weights, windows, masks and dropout. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means runs/pretraining-DATASET-SEED. It must not exist."""
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates and loss every few seconds, and progress bars."""
    quiet: Quiet = False
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent.
    Pre-training uses it without memory, and bidirectionally unless it has a recurrence."""

    agent_name, folder_prefix = PRETRAINING, "pretraining"

    def build(self) -> MaskedPretraining:
        """Load the datasets, and return the pretraining."""
        options = self.learner.arguments() | {"mask_probability": self.mask_probability}
        return MaskedPretraining(self.load_data(), core=self.core, seed=self.seed, **options)

    def resolved_options(self, agent: MaskedPretraining) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        return {name: getattr(agent, name) for name in ("return_scale", "episode_length")}
