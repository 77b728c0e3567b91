"""Decision Transformer algorithm: settings, offline training, distillation and calibration."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.calibration import THRESHOLDS, Calibration, reset_calibration
from rlxf.agents.common.datastore import TEACHER_REASON, TRAINING_REASON, check_no_datastore
from rlxf.agents.common.losses import Distillation, check_distillation
from rlxf.agents.common.precision import Precision
from rlxf.agents.common.weights import transfer_weights
from rlxf.agents.decision_transformer.calibration import measure_exits
from rlxf.agents.decision_transformer.conditioning import (
    Conditioning,
    ElasticHistory,
    HighestValueReturn,
    MaxReturn,
    SampledReturn,
)
from rlxf.agents.decision_transformer.config import (
    CONTEXT_RULE,
    ContextKind,
    DecisionTransformerConfig,
    decision_transformer,
)
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.decision_transformer.elastic_history import ElasticHistoryModel
from rlxf.agents.decision_transformer.episode_context import EpisodeModel
from rlxf.agents.decision_transformer.highest_value import HighestValueReturnModel
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.online_finetuning import OnlineFinetuning
from rlxf.agents.decision_transformer.predicted_return import PredictedReturnModel
from rlxf.agents.offline.objectives import Objective
from rlxf.agents.offline.sb3_arguments import OFFLINE_SB3_ARGUMENTS
from rlxf.agents.offline.trajectory_algorithm import TrajectoryAlgorithm
from rlxf.attention import TransformerSpec
from rlxf.data import DatasetError, Trajectories, Windows, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.sampling import Sampling
from rlxf.utils.checks import check_int

if TYPE_CHECKING:
    from rlxf.agents.gtrxl import GTrXLPPO


MODELS: dict[str, type[DecisionTransformerModel]] = {
    "window": DecisionTransformerModel,
    "episode": EpisodeModel,
}
"""Model by context, for a given target return."""
PREDICTING_MODELS: dict[type, type[PredictedReturnModel]] = {
    MaxReturn: PredictedReturnModel,
    SampledReturn: PredictedReturnModel,
    ElasticHistory: ElasticHistoryModel,
    HighestValueReturn: HighestValueReturnModel,
}
"""Model by conditioning, if the model predicts the return."""


def model_class(context: ContextKind, conditioning: Conditioning) -> type[DecisionTransformerModel]:
    """Return the class of the model for a context and a conditioning.

    Raises:
        TypeError: if the conditioning predicts the return and there is no model for its class.
    """
    if conditioning.needs_target:
        return MODELS[context]
    if type(conditioning) not in PREDICTING_MODELS:
        names = ", ".join(kind.__name__ for kind in PREDICTING_MODELS)
        raise TypeError(f"conditioning must be TargetReturn, {names}, got {conditioning!r}")
    return PREDICTING_MODELS[type(conditioning)]


class DecisionTransformer(OnlineFinetuning):
    """Decision Transformer: an agent conditioned on a return and trained offline on Minari datasets.

    It has the interface of Stable-Baselines3: ``learn``, ``predict``, ``save``, ``load``, callbacks and
    loggers. ``num_timesteps`` counts updates, not environment steps. Observations are those of
    `rlxf.envs.ReturnToGo`, so the tools of Stable-Baselines3 can evaluate the agent in an environment with
    this wrapper. If the model predicts the return (``conditioning``), they are those of the environment.

    On the CPU, subnormal numbers (below 1e-38) slow training severalfold within minutes. The constructor
    therefore calls ``torch.set_flush_denormal``, which affects the whole process.

    Source: Chen et al. 2021, arXiv:2106.01345.

    Args:
        dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`.
        context_length: number of steps K in the context, including the current one. May exceed the longest
            episode.
        learning_rate: learning rate of AdamW; a number, or a schedule of the remaining progress, from 1 to 0.
        batch_size: windows of K steps in an update, over all processes under torchrun.
        weight_decay: weight decay of AdamW.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of the updates
            of `learn`.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        return_scale: divisor of returns in the model's input; None for the standard deviation of the
            return-to-go over all steps of the dataset.
        episode_length: number of time steps with an embedding; None for the longest episode of the dataset.
            Later steps share the last embedding.
        objective: None for `Imitation`; `MaximumEntropy` for a stochastic policy that supports online
            fine-tuning; `QRegularized` for imitation with a critic, which prefers actions of high value.
        core: spec of the transformer, which must be causal; None for `decision_transformer`.
        context: "window": an action depends on the last K steps, and on those before them that fill the
            core's memory. "episode": the state of the core lasts for the whole episode, at constant cost. It
            needs a core with memory or recurrence. Gradients reach as far back as the start of the window of
            K steps.
        conditioning: None for `TargetReturn`: the user gives a target return. With `MaxReturn`,
            `ElasticHistory`, `HighestValueReturn` or `SampledReturn`, the model chooses the return on which
            it conditions its actions, and no target is given.
        weight_averaging: decay of an exponential moving average of the weights, e.g. 0.999; None for none.
            The average acts and is the policy of a file, which also holds the newest weights. It covers about
            the last ``1 / (1 - decay)`` updates and starts with the first one (`WeightAverage`).
        validation_fraction: fraction of the episodes that are held out for `validation_losses`, above 0 and
            below 1; at least one episode, and at least one stays. None to train on all episodes.
        validation_seed: seed of the choice of held-out episodes. It is not ``seed``, so agents with different
            seeds are measured on the same episodes.
        sampling: probabilities with which windows are drawn. None for `UniformSteps`: all steps are equally
            likely; or `UniformEpisodes`, `ReturnWeighted` or `HighReturns`. A subclass of your own must be a
            frozen dataclass (`SamplingScheme`).
        state_loss_weight: weight of an auxiliary loss, the error of a prediction of the next observation; 0
            for no such head (`AuxiliaryHeads`).
        return_loss_weight: the same for the return-to-go of the next step.
        gradient_accumulation_steps: number of micro-batches into which each batch is divided. The update is
            that of the whole batch, apart from rounding, if its loss samples nothing: dropout, and the
            entropy of Box actions in `MaximumEntropy`, draw other random numbers. The activations of one
            micro-batch at a time are in memory.
        precision: "float32"; or "bf16-mixed" for matrix products of updates in bfloat16, see
            `rlxf.attention.linear.matmul_dtype`. Weights, optimizer, losses, validation and acting stay
            float32.
        cuda_graphs: on a GPU, capture losses and gradients as a CUDA graph, except for updates with micro-
            batches, of several processes, or by distillation. This takes about 0.1 seconds, and memory.
            Results are equal up to rounding. If they cannot be captured, a warning names the reason.
            Attributes of modules that change during `learn` have no effect on what is captured; while a
            module has hooks, nothing is captured, and a warning names it. It has no effect on a CPU. Not
            saved with the agent; `load` accepts it.
        env: environment wrapped in `ReturnToGo` for callbacks that need one; None for none.
        download: True to download a dataset that is not on this machine.
        trust: use the full description of the environment in the dataset or the file of `load`: entry point,
            arguments and wrappers, which can run code. If False, `make_env`, `evaluate` and `learn_online`
            use, without ``env``, the environment registered under that id. Not saved.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: seed of weights, windows and dropout; None for a random one. This seeds torch's global
            generator, which dropout and samples use, as in SB3: to repeat results, train an agent before the
            next one is built.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or contains a NaN; if the objective has a
            critic and no value target contains a reward, or no episode has a marked end.
        ValueError: if a setting is out of range (the message names it and an allowed value), or if the device
            does not exist; SB3 would use the CPU instead of a missing GPU. Also if all episodes to train on
            have the same return, and the conditioning predicts the return or the sampling needs returns.
        TypeError: if a space is not supported, or for unknown arguments. For arguments of SB3's algorithms
            the message names the alternative.

    Warns:
        UserWarning: if all episodes have the same return, on which conditioning has no effect; if episodes
            end neither terminated nor truncated; if the objective has a critic and ``return_scale`` is less
            than 1% of that of the data, or more than 10% of the rewards are in no value target.
    """

    NAME = "DecisionTransformer"
    config_class = DecisionTransformerConfig
    objective: Objective
    conditioning: Conditioning
    state_loss_weight: float
    return_loss_weight: float

    @reject_unknown_arguments(OFFLINE_SB3_ARGUMENTS)
    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        context_length: int = 20,
        learning_rate: float | Schedule = 1e-4,
        batch_size: int = 64,
        weight_decay: float = 1e-4,
        warmup_updates: int | None = None,
        max_grad_norm: float = 0.25,
        return_scale: float | None = None,
        episode_length: int | None = None,
        objective: Objective | None = None,
        core: TransformerSpec | None = None,
        context: ContextKind = "window",
        conditioning: Conditioning | None = None,
        weight_averaging: float | None = None,
        validation_fraction: float | None = None,
        validation_seed: int = 0,
        sampling: Sampling | None = None,
        state_loss_weight: float = 0.0,
        return_loss_weight: float = 0.0,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "float32",
        cuda_graphs: bool = True,
        env: VecEnv | None = None,
        download: bool = False,
        trust: bool = False,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        core = decision_transformer() if core is None else core
        CONTEXT_RULE.check_argument("context", context)
        config = DecisionTransformerConfig.of(locals())
        model = model_class(context, config.conditioning)
        super().__init__(
            model, dataset, config, env, download, trust, tensorboard_log, device, _init_setup_model
        )

    @property
    def return_conditioned(self) -> bool:
        """True if the agent acts for a target return, in environments wrapped in `rlxf.envs.ReturnToGo`."""
        return self.conditioning.needs_target

    def load_pretrained(self, source: "TrajectoryAlgorithm | GTrXLPPO") -> Self:
        """Copy the weights of another model, before `learn`. Heads are not copied.

        A `MaskedPretraining` or a `DecisionTransformer` gives transformer, token embeddings and feature
        extractor, with the observation normalization and the return scale of their training. A `GTrXLPPO`
        gives the transformer alone.

        Raises:
            TypeError: if ``source`` is of an unsupported type.
            ValueError: if the weights do not fit (the message names the first difference), or if the agent
                has a datastore (`attach_datastore`); nothing is changed. Cores must be equal except for
                causal, memory, pattern and dropout.

        Warns:
            UserWarning: if the agent has a critic and the return scale is less than 1% of that of its data.
        """
        check_no_datastore(self.datastore, TRAINING_REASON)
        if isinstance(source, TrajectoryAlgorithm):
            self._check_weights_fit(source)
            transfer_weights(source, self.policy, ("transformer", "tokens", "features"))
            assert source.return_scale is not None
            self.return_scale = source.return_scale
            models: Any = self._models()
            for model in models:
                model.tokens.return_scale = source.return_scale
            if self.trajectories is not None:
                self.policy.check_return_scale(self.trajectories)
        else:
            transfer_weights(source, self.policy)
        reset_calibration(self.policy.transformer)
        self._update.restart_average()
        return self

    def distill(
        self,
        teacher: "DecisionTransformer",
        steps: int,
        distillation: Distillation | None = None,
        callback: MaybeCallback = None,
        log_interval: int | None = 100,
        tb_log_name: str = "DecisionTransformer_distilled",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Distill a teacher, usually a larger agent, into this agent on windows of this agent's dataset.

        The training loop is that of `learn` with the loss of `Distillation`. The dataset's actions are
        not used as targets.

        Args:
            teacher: agent to imitate; it is not changed. Its sizes, techniques and context length may differ.
            steps: number of updates, each on one batch of windows.
            distillation: loss settings; None for ``Distillation()``.
            callback: SB3 callback, called after each update.
            log_interval: number of updates between log outputs; None for no log.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart warm-up and schedules; False to continue them.
            progress_bar: show a progress bar.

        Raises:
            TypeError: if the teacher is not a `DecisionTransformer`, or distillation not a `Distillation`.
            ValueError: if a number is less than 1, the agent was loaded without a dataset, the teacher is
                this agent or has different spaces, a different kind of head or a different device, an agent
                has a datastore or ``context="episode"`` or predicts the return, or several processes run.
        """
        distillation = Distillation() if distillation is None else distillation
        self.check_teacher(teacher, distillation)
        update = DistillationUpdate(
            self._new_update(),
            teacher.policy,
            (self.context_length, teacher.context_length),
            distillation,
            self.generator,
        )
        windows = self._training_windows(update.windows(self._data()))
        return self._learn(
            update,
            windows,
            steps,
            callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    def check_teacher(self, teacher: Any, distillation: Any) -> None:
        """Raise an error unless this agent can be trained by `distill` with these arguments."""
        check_distillation(self, DecisionTransformer, teacher, distillation)
        self.ranks.check_single_process("distill")
        for policy in (self.policy, teacher.policy):
            policy.check_window("distill")
        check_no_datastore(teacher.datastore, TEACHER_REASON)
        for name, agent in (("teacher", teacher), ("student", self)):
            if not agent.conditioning.needs_target:
                raise ValueError(
                    f"distill needs agents that act for a target return, but the {name} has "
                    f"conditioning={agent.conditioning}, and predictions of the return are not distilled; "
                    f"train it with conditioning=TargetReturn()"
                )
        for kind, mismatch in teacher.dataset_info.space_mismatches(self.dataset_info):
            raise ValueError(f"the {kind}s of teacher and student must match: {mismatch}")

    def calibrate(
        self,
        alpha: float = 0.05,
        delta: float = 0.05,
        thresholds: Sequence[float] = THRESHOLDS,
        steps: int = 64,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None = None,
    ) -> Calibration:
        """Choose the early-exit threshold of `predict` with a statistical guarantee. For the depth `CALM`.

        The risk of a threshold is the fraction of an episode's steps at which the most likely early-exit
        action differs from the full-depth action. It is averaged over episodes; each has equal weight. With
        probability at least ``1 - delta`` over the draw of the episodes, the risk on episodes of the same
        distribution is at most ``alpha``. Continuous actions that differ by at most 0.05 on the scale of -1
        to 1 count as equal. The threshold is saved with the agent. Further training resets it with a warning,
        since the guarantee holds for the current weights only.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            alpha: bound on the risk.
            delta: maximum probability that the guarantee fails.
            thresholds: candidate confidence thresholds in descending order within [0, 1], the safest first.
            steps: number of steps drawn from each episode, with the agent's seed.
            dataset: episodes that the agent was not trained on; None for its training data, for which the
                guarantee is weaker.

        Returns:
            The measured risk and depth of each threshold, and the chosen threshold.

        Raises:
            ValueError: before any computation, if the depth of the core is not `CALM`, ``context`` is
                "episode", the thresholds do not descend, or a threshold, alpha, delta or steps is out of
                range.
            TypeError: if one of them is not a number.
            DatasetError: if the spaces of ``dataset`` differ from those of the training data.
        """
        self.policy.check_window("calibrate")
        return self._calibrate(partial(self._measure_exits, steps, dataset), thresholds, alpha, delta)

    def _measure_exits(
        self, steps: int, dataset: Any, thresholds: tuple[float, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        check_int("steps", steps)
        data = self._data() if dataset is None else as_trajectories(dataset, False)
        for kind, mismatch in self.dataset_info.space_mismatches(data):
            raise DatasetError(f"the {kind}s of dataset must match those of the training data: {mismatch}")
        windows = Windows(data, 1, burn_in=self.context_length + self.policy.burn_in_steps - 1)
        generator = torch.Generator().manual_seed(self.seed or 0)
        return measure_exits(self.policy.eval(), windows, thresholds, steps, generator)
