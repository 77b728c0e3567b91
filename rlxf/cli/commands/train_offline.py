"""``rlxf train dt`` and ``rlxf pretrain``: training on Minari datasets, saved as a run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from stable_baselines3.common.callbacks import BaseCallback
from tyro.conf import arg

from rlxf.agents.decision_transformer import KZL, ODT, DecisionTransformer, Imitation, decision_transformer
from rlxf.agents.decision_transformer.conditioning import CONDITIONINGS, TargetReturn
from rlxf.agents.offline.objectives import OBJECTIVES
from rlxf.agents.pretraining import MaskedPretraining, as_predicted_tokens
from rlxf.attention import TransformerSpec
from rlxf.cli.baselines import evaluate_baselines, report_baselines, report_missing_baselines
from rlxf.cli.choices import choice_to_text, parse_choice
from rlxf.cli.evaluated_training import default_interval
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
from rlxf.cli.offline_training import EvaluatedOfflineTraining, OfflineTraining
from rlxf.cli.options import (
    CheckpointSeconds,
    ConfigFile,
    ConfigTrust,
    Device,
    LogInterval,
    Pretrained,
    Quiet,
    StopReturn,
    Track,
    TunedName,
    argument_defaults,
    given_options,
    options,
)
from rlxf.cli.run_options import FLOAT32_BYTES
from rlxf.cli.runs import OFFLINE, PRETRAINING
from rlxf.training import RunFolder, parse_schedule, schedule_to_text
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.distributed import process_group

DEFAULTS = argument_defaults(DecisionTransformer)
"""Argument of `DecisionTransformer` -> default."""


@options
class WindowOptions(OfflineTrainingOptions):
    """Options of AdamW and of the windows of the data."""

    context_length: int = DEFAULTS["context_length"]
    """Context length in environment steps, including the current one."""
    batch_size: int = DEFAULTS["batch_size"]
    """Number of windows per update."""
    learning_rate: str = str(DEFAULTS["learning_rate"])
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
        return super().arguments() | {"learning_rate": parse_schedule(self.learning_rate)}

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
    """Return on which actions are conditioned: TargetReturn, or a return that the model chooses: MaxReturn,
    ElasticHistory, SampledReturn or, with objective QRegularized, HighestValueReturn. A JSON object gives
    options, e.g. '{"name": "MaxReturn", "expectile": 0.9}'."""
    state_loss_weight: float = DEFAULTS["state_loss_weight"]
    """Weight of an auxiliary loss, the error of the predicted next observation. 0 means no such loss."""
    return_loss_weight: float = DEFAULTS["return_loss_weight"]
    """Weight of an auxiliary loss, the error of the predicted next return-to-go. 0 means no such loss."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError, TypeError: if objective or conditioning is unknown or invalid.
        """
        return super().arguments() | {
            "objective": parse_choice("objective", self.objective, OBJECTIVES),
            "conditioning": parse_choice("conditioning", self.conditioning, CONDITIONINGS),
        }


FEWEST_UPDATES_PER_MAP = 400
"""Smallest number of updates between two attention maps, each of which takes about as long as 20 updates."""
PUBLISHED = {"kzl": KZL, "odt": ODT}
"""Name on the command line -> settings."""


@options
class TrainDecisionTransformer(EvaluatedOfflineTraining):
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

    dataset: Datasets
    settings: Literal["kzl", "odt"] | None = None
    """Published settings, which other options override.
    They are those of Decision Transformer (kzl) or of Online Decision Transformer (odt).
    Add --help to show them."""
    updates: Updates = 100_000
    target_returns: tuple[float, ...] | None = None
    """Target returns of the evaluations. None means the largest return in the data, or no target if the model
    predicts the return (--conditioning).
    With several targets, targets.png in the folder plots achieved against requested returns."""
    download: Download = False
    trust_data: TrustData = False
    env: EvaluationEnv = None
    env_kwargs: EvaluationEnvArguments = field(default_factory=dict)
    seed: int = 0
    """Seed of weights, windows and dropout. Equal seeds give equal runs on one machine."""
    pretrained: Pretrained = None
    run: Path | None = None
    """New folder of the run. None means runs/dt-DATASET-SEED. It must not exist."""
    config: ConfigFile = None
    tuned: TunedName = None
    trust: ConfigTrust = False
    episodes: int = 100
    """Number of episodes of the final evaluation, per target return. 0 turns off all evaluations."""
    evaluate_every: EvaluateEvery = None
    evaluation_episodes: int = 20
    """Number of episodes of an evaluation during training, per target return. The training waits for it."""
    stop_return: StopReturn = None
    videos: Videos = True
    attention_maps: bool = True
    """Draw the attention of each layer and head over a window of the data, ten times during the training, but
    at most every 400 updates."""
    baselines: bool = False
    """Also train behavior cloning of all episodes, and of the best 10%, with as many updates.
    A table compares the data, both baselines and the agent. Its numbers are written to baselines.json."""
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates, loss and evaluations every few seconds, and progress bars."""
    quiet: Quiet = False
    track: Track = None
    learner: Annotated[OfflineOptions, arg(name="")] = OfflineOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. The default is that of Chen et al. 2021 (Decision Transformer)."""

    agent_name, folder_prefix = OFFLINE, "dt"
    evaluation_budget = 10.0
    """Default maximum number of environment steps of evaluations per update.

    An update of a small Transformer takes as long as about 50 steps of 20 parallel environments.
    """
    video_budget = 0.2
    """Default maximum number of recorded steps per update.

    An update of a small Transformer takes about 40 ms, and a recorded step 10 ms.
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
        learner["objective"] = choice_to_text(learner.get("objective", Imitation()))
        return cls(dataset=tyro.MISSING, learner=OfflineOptions(**learner), **chosen)

    @classmethod
    def replaced_options(cls, args: Sequence[str]) -> Collection[str]:
        """Return the names of the options that the published settings in ``args`` set."""
        return PUBLISHED.get(given_options(args, "settings").get("settings", ""), {}).keys()

    def build(self) -> DecisionTransformer:
        """Load the datasets, and return the agent."""
        options = self.learner.arguments() | {"trust": self.trust_data}
        return DecisionTransformer(self.load_data(), core=self.core, seed=self.seed, **options)

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        if self.baselines:
            process_group().check_single_process("--baselines")
            if self.episodes == 0:
                raise ValueError("--baselines needs an evaluation, got --episodes 0: leave one out")
        super().check()

    @contextmanager
    def callbacks(self, agent: DecisionTransformer, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """Context manager for the callbacks of the training, one of which draws the attention."""
        from rlxf.agents.decision_transformer.callbacks import ContextAttentionCallback  # loads matplotlib

        with super().callbacks(agent, run) as others:
            every = default_interval(self.total, FEWEST_UPDATES_PER_MAP)
            yield [*others, *([ContextAttentionCallback(every)] if self.attention_maps else [])]

    def check_agent(self, agent: Any) -> None:
        """Check environments and targets as the base class; say which baseline the data do not permit."""
        super().check_agent(agent)
        if self.baselines and agent.trajectories is not None:
            report_missing_baselines(agent.trajectories)

    def compare_reports(self, agent: DecisionTransformer, run: RunFolder, reports: Mapping[str, Any]) -> None:
        """Train and report the baselines, if they are requested."""
        if not self.baselines:
            return
        data = self.load_data() if agent.trajectories is None else agent.trajectories
        baselines = evaluate_baselines(
            data,
            self.fresh_env,
            updates=self.updates,
            episodes=self.episodes,
            verbose=self.verbose,
            seed=self.seed,
            device=self.learner.device,
            trust=self.trust_data,
        )
        report_baselines(run.path, baselines, reports)

    def resolved_options(self, agent: DecisionTransformer) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        sizes = {"return_scale": agent.return_scale, "episode_length": agent.episode_length}
        return super().resolved_options(agent) | sizes


@options
class Pretrain(OfflineTraining):
    """Pre-train weights by masked token prediction on trajectories, and save them in a new folder.

    Not recommended for a Decision Transformer on the same data: on Hopper, agents that were trained on 10% of
    the episodes reached a mean return of 1445 after pre-training on all episodes, and 1503 without it. With
    "--predicted-tokens return state action" it was 1220.

    Agents start from these weights with --pretrained FOLDER in "rlxf train dt" and "rlxf train gtrxl". Choose
    the same core options as for the agent. The folder contains config.json, checkpoint.zip, progress.csv and
    TensorBoard events. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its progress. "rlxf resume"
    continues it, even after a crash.

    Example: rlxf pretrain --dataset cartpole/random-v0 --updates 200 --core.width 32 --core.layers 1
    """

    dataset: Datasets
    updates: Updates = 100_000
    mask_probability: float = 0.15
    """Probability with which a token of the predicted kinds is selected for prediction."""
    predicted_tokens: tuple[Literal["return", "state", "action"], ...] = ("action",)
    """Kinds of tokens that are masked and predicted."""
    download: Download = False
    seed: int = 0
    """Seed of weights, windows, masks and dropout. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means runs/pretraining-DATASET-SEED. It must not exist."""
    config: ConfigFile = None
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates and loss every few seconds, and progress bars."""
    quiet: Quiet = False
    track: Track = None
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent.
    Pre-training uses it without memory, and bidirectionally unless it has a recurrence."""

    agent_name, folder_prefix = PRETRAINING, "pretraining"

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        as_predicted_tokens(self.predicted_tokens)
        super().check()

    def build(self) -> MaskedPretraining:
        """Load the datasets, and return the pretraining."""
        own = {name: getattr(self, name) for name in ("mask_probability", "predicted_tokens")}
        options = self.learner.arguments() | own
        return MaskedPretraining(self.load_data(), core=self.core, seed=self.seed, **options)

    def resolved_options(self, agent: MaskedPretraining) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        return {name: getattr(agent, name) for name in ("return_scale", "episode_length")}
