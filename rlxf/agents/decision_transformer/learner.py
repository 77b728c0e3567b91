"""Decision Transformer algorithm: offline training, online fine-tuning and prediction."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper
from torch import nn

from rlxf.agents.calibration import (
    THRESHOLDS,
    Calibration,
    calm_depth,
    check_levels,
    check_thresholds,
    reset_calibration,
)
from rlxf.agents.common.actions import to_environment
from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.distillation import Distillation
from rlxf.agents.common.policy_state import MissingStateWarning
from rlxf.agents.common.retrieval import (
    DiscreteRetrievalPolicy,
    RetrievalPolicy,
    check_no_datastore,
    check_no_early_exit,
)
from rlxf.agents.common.sb3_arguments import OFFLINE_SB3_ARGUMENTS, SB3_ONLINE_ARGUMENTS
from rlxf.agents.common.weight_transfer import transfer_weights
from rlxf.agents.decision_transformer import checkpoint
from rlxf.agents.decision_transformer.calibration import calibrate_exits
from rlxf.agents.decision_transformer.core import resolve_core
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.decision_transformer.episode_collector import ReplayBuffer
from rlxf.agents.decision_transformer.evaluations import find_eval_callbacks
from rlxf.agents.decision_transformer.heads import CategoricalHead, Head, StochasticHead
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.objectives import Imitation, Objective
from rlxf.agents.decision_transformer.online_finetuning import (
    OnlineFinetuning,
    load_online_state,
    online_state,
    read_online_run,
)
from rlxf.agents.decision_transformer.policy_state import (
    ConditionedObservation,
    append_step,
    empty_context,
    encode_conditioned_observation,
    encode_observations,
    episode_start_mask,
)
from rlxf.agents.decision_transformer.presets import check_sizes, check_weight_compatibility
from rlxf.agents.decision_transformer.retrieval import build_retrieval_memory, retrieval_head
from rlxf.agents.offline.algorithm import OfflineAlgorithm
from rlxf.agents.offline.context_window import ContextWindow
from rlxf.agents.offline.dataset_info import warn_on_version_mismatch
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.agents.offline.resume import restore_training_state
from rlxf.attention import KNNLM, TransformerSpec
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.validation import check_int
from rlxf.data import (
    DatasetError,
    ReferenceScores,
    Trajectories,
    Windows,
    action_encoder,
    as_trajectories,
    check_spaces_match,
)
from rlxf.data.dataset_source import Dataset
from rlxf.envs.make import make_copies, make_vec_env
from rlxf.envs.sb3_vec_env import make_sync_vec_env, watch_processes
from rlxf.envs.specs import make_single
from rlxf.envs.stateful_env import ActionReplay
from rlxf.envs.vector import as_vec_env
from rlxf.envs.wrappers.return_to_go import ReturnToGo, is_return_conditioned
from rlxf.training import Archive
from rlxf.training.checkpoints import clone_tensors

if TYPE_CHECKING:
    from rlxf.agents.gtrxl import GTrXLPPO


class DecisionTransformer(OfflineAlgorithm):
    """Decision Transformer: an agent conditioned on a target return and trained offline on Minari datasets.

    It has the interface of Stable-Baselines3: ``learn``, ``predict``, ``save``, ``load``, callbacks and
    loggers. ``num_timesteps`` counts updates, not environment steps. Observations are those of
    `rlxf.envs.ReturnToGo`, so the tools of Stable-Baselines3 can evaluate the agent in an environment with
    this wrapper.

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
        max_grad_norm: largest norm of the gradient.
        return_scale: divisor of returns in the model's input; None for the standard deviation of the
            return-to-go over all steps of the dataset.
        episode_length: number of time steps with an embedding; None for the longest episode of the dataset.
            Later steps share the last embedding.
        objective: None for `Imitation`; `MaximumEntropy` for a stochastic policy that supports online
            fine-tuning.
        core: spec of the transformer, which must be causal; None for `decision_transformer`.
        env: environment wrapped in `ReturnToGo` for callbacks that need one; None for none.
        download: True to download a dataset that is not on this machine.
        trust: use the full description of the environment in the dataset or the file of `load`: entry point,
            arguments and wrappers, which can run code. If False, `make_env`, `evaluate` and `learn_online`
            use, without ``env``, the environment registered under that id. Not saved.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: seed of weights, windows and dropout; None for a random one.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or contains a NaN.
        ValueError: if a setting is out of range; the message names it and an allowed value. Also if the
            device does not exist; SB3 would use the CPU instead of a missing GPU.
        TypeError: if a space is not supported, or for unknown arguments. For arguments of SB3's algorithms
            the message names the alternative.
    """

    NAME = "DecisionTransformer"
    policy: DecisionTransformerModel
    _rounds: OnlineFinetuning | None = None
    """State of the current `learn_online`; None outside of it."""

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
        env: VecEnv | None = None,
        download: bool = False,
        trust: bool = False,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        self.objective = Imitation() if objective is None else objective
        self.trust = trust
        self._stateless, self._other_versions = MissingStateWarning(stacklevel=5), set[str]()
        super().__init__(
            DecisionTransformerModel,
            dataset,
            context_length=context_length,
            learning_rate=learning_rate,
            batch_size=batch_size,
            weight_decay=weight_decay,
            warmup_updates=warmup_updates,
            max_grad_norm=max_grad_norm,
            return_scale=return_scale,
            episode_length=episode_length,
            core=resolve_core(core),
            download=download,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )
        if env is not None:
            self.set_env(env)

    def _model(self, normalization: nn.Module) -> DecisionTransformerModel:
        assert self.return_scale is not None
        assert self.episode_length is not None
        return DecisionTransformerModel(
            self.facts.encoder.shape,
            self.facts.action_space,
            normalization,
            self.core,
            self.objective,
            self.return_scale,
            self.episode_length,
        )

    def load_pretrained(self, source: "OfflineAlgorithm | GTrXLPPO") -> Self:
        """Copy the weights of another model, before `learn`. Heads are not copied.

        A `MaskedPretraining` or a `DecisionTransformer` gives transformer, token embeddings and feature
        extractor, with the observation normalization and the return scale of their training. A `GTrXLPPO`
        gives the transformer alone.

        Raises:
            TypeError: if ``source`` is of another type.
            ValueError: if the weights do not fit; the message names the first difference, and nothing is
                changed. Cores must be equal except for causal, memory, pattern and dropout. Also if the agent
                has a datastore (`attach_datastore`).
        """
        check_no_datastore(self.memory)
        if not isinstance(source, OfflineAlgorithm):
            transfer_weights(source, self.policy)
            reset_calibration(self.policy.transformer)
            return self
        check_weight_compatibility(source, self)
        transfer_weights(source, self.policy, ("transformer", "tokens", "features"))
        reset_calibration(self.policy.transformer)
        assert source.return_scale is not None
        self.return_scale = self.policy.tokens.return_scale = source.return_scale
        return self

    def distill(
        self,
        teacher: "DecisionTransformer",
        steps: int,
        distillation: Distillation | None = None,
        callback: MaybeCallback = None,
        log_interval: int = 100,
        tb_log_name: str = "DecisionTransformer_distilled",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Distill a teacher, usually a larger agent, into this agent on windows of this agent's dataset.

        The training loop is that of `learn` with the loss of `Distillation`. The dataset's actions are no
        targets.

        Args:
            teacher: agent to imitate; it is not changed. Its sizes, techniques and context length may differ.
            steps: number of updates, each on one batch of windows.
            distillation: loss settings; None for ``Distillation()``.
            callback: SB3 callback, called after each update.
            log_interval: number of updates between log outputs.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart warm-up and schedules; False to continue them.
            progress_bar: show a progress bar.

        Raises:
            ValueError: if a number is less than 1, the agent was loaded without a dataset, the teacher has
                other spaces, another kind of head or another device, or the teacher has a datastore.
        """
        self.ranks.check_single_process("distill")
        update = DistillationUpdate(self, teacher, distillation or Distillation())
        windows = update.windows(self._data())
        return self._learn(
            update, windows, steps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
        )

    @reject_unknown_arguments(SB3_ONLINE_ARGUMENTS)
    def learn_online(
        self,
        steps: int,
        target_return: float,
        env: str | gymnasium.Env | VectorEnv | VecEnv | None = None,
        n_envs: int = 8,
        round_steps: int = 1_000,
        round_updates: int = 300,
        replay_episodes: int = 1_000,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "DecisionTransformer_online",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fine-tune the agent online (Online Decision Transformer).

        The replay buffer initially holds the best episodes of the dataset. The agent collects episodes with
        sampled actions, conditioned on ``target_return``. Each episode is relabeled with its achieved
        returns-to-go (hindsight) and added to the buffer. After each round of environment steps the agent is
        updated on windows of the buffer. ``num_timesteps`` counts environment steps, as in SB3; there is no
        warm-up.

        Source: Zheng et al. 2022, arXiv:2202.05607, section 4 and algorithm 1. In the paper, a round is one
        episode of up to 1000 steps and 300 updates.

        Args:
            steps: total number of environment steps, over all environments.
            target_return: target return while collecting. In the paper it is twice that of the evaluation.
            env: environments, not wrapped in `ReturnToGo`, or a Gymnasium id; None for `make_env`.
                Environments that are passed stay open and remain the agent's environments. Those made here
                are closed at the end.
            n_envs: number of environments to make.
            round_steps: environment steps, over all environments, between rounds of updates.
            round_updates: number of updates in a round.
            replay_episodes: capacity of the replay buffer in episodes. The buffer is kept in memory.
            callback: SB3 callback, called after each step of the environments.
            log_interval: number of rounds between log outputs.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step count and schedules; False to continue them.
            progress_bar: show a progress bar.
            resume_from: a file that `rlxf.training.CheckpointWriter` wrote during `learn_online`, or a
            folder of
                them, whose newest intact file is used. Training continues from there, within the current
                episodes, to ``steps`` steps in total. On one machine the result is bitwise equal to that of
                an uninterrupted run. Agent, dataset and arguments must be the same. Environments made here
                are `ActionReplay`. Environments that are neither `ActionReplay` nor `StatefulVectorEnv` are
                reset, with a warning. Sets the global generators of torch, numpy and Python.

        Raises:
            ValueError: if a number is out of range, the agent was loaded without a dataset, its policy is
                deterministic (train it with ``objective=MaximumEntropy()``), or its settings or data differ
                from those in ``resume_from``.
            DatasetError: if the environment's spaces differ from those of the dataset.
            FileNotFoundError: if ``resume_from`` does not exist.
            CheckpointError: if the file is truncated, altered or of another format, or was not written
                during `learn_online`.
        """
        self.ranks.check_single_process("learn_online")
        check_sizes(steps=steps, round_steps=round_steps, round_updates=round_updates)
        check_sizes(replay_episodes=replay_episodes, log_interval=log_interval)
        replay = ReplayBuffer(self._data(), replay_episodes)
        if not isinstance(self.policy.loss.head, StochasticHead):
            raise ValueError(
                "learn_online needs a stochastic policy: train the agent with objective=MaximumEntropy()"
            )
        options = {
            "target_return": target_return,
            "round_steps": round_steps,
            "round_updates": round_updates,
            "replay_episodes": replay_episodes,
        }
        run = None if resume_from is None else read_online_run(self, resume_from, steps, options)
        if run is not None:
            checkpoint.restore(self, run)
            steps, reset_num_timesteps = steps - self.num_timesteps, False
        with self._collecting_in(env, n_envs, target_return):
            total_timesteps, callback = self._setup_learn(
                steps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
            self._update = OfflineUpdate(self.policy, self.optimizer, self.max_grad_norm)
            rounds = OnlineFinetuning(self, replay, options, log_interval)
            callback.on_training_start(locals(), globals())
            if run is not None:
                load_online_state(rounds, run)
                restore_training_state(self._update, run)
            self._play_and_learn(rounds, total_timesteps, callback)
        return self

    def _play_and_learn(self, rounds: OnlineFinetuning, total_timesteps: int, callback: BaseCallback) -> None:
        """Run rounds until the requested number of steps is reached or a callback stops the training."""
        self._rounds, self.resumable = rounds, True
        try:
            while self.num_timesteps < total_timesteps:
                rounds.update_if_due()
                rounds.play()
                callback.update_locals(locals())
                if not callback.on_step():
                    break
            else:
                rounds.update_if_due()
                rounds.update_remainder()
            callback.on_training_end()
        finally:
            self._rounds, self.resumable = None, False

    def snapshot(self) -> Archive:
        """Return a copy of the content of `save` and of the state of a current `learn_online`.

        For `rlxf.training.CheckpointWriter`.
        """
        own = super().snapshot()
        if self._rounds is None:
            return own
        online = online_state(self._rounds)
        return Archive(own.documents | online.documents, own.tensors | clone_tensors(online.tensors))

    @contextmanager
    def _collecting_in(
        self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int, target_return: float
    ) -> Iterator[None]:
        """Set the agent's environments for the duration of the context; close those made here at its end."""
        before, vec_env = self.env, self._environments(env, n_envs)
        try:
            self.check_env(vec_env)
            self.set_env(ReturnToGo(vec_env, target_return))
            yield
        finally:
            if env is None or isinstance(env, str):
                vec_env.close()
                self.env, self.n_envs = before, before.num_envs if before else 0

    def _environments(self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int) -> VecEnv:
        """Return the environments of `learn_online` as a VecEnv."""
        if env is None:
            return self.make_env(n_envs, self.seed, view=ActionReplay)
        if isinstance(env, str):
            return make_vec_env(env, n_envs, self.seed)
        if isinstance(env, VectorEnv):
            return as_vec_env(env)
        if isinstance(env, gymnasium.Env):
            return make_sync_vec_env([lambda: ActionReplay(Monitor(env))])
        watch_processes(env)
        return env

    def attach_datastore(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """Attach a kNN datastore of these trajectories, without training; it replaces an earlier one.

        The key of a step is the input of the action head, which is the transformer output at the state token.
        Its value is the logged action. For each action the agent retrieves the nearest keys and mixes their
        actions into its prediction. Keys depend on the return-to-go, so steps with a return near the target
        are nearer.

        N steps take ``4 N (C + A) + 8 N`` bytes, with C the width of the core and A the number of values in
        an action: 106 MB for 200,000 steps of Hopper at width 128. The datastore is saved with the agent. Its
        encoding takes one forward pass over about N windows. The gate of a `SPALM` is trained here on the
        same steps; retrieval for a step excludes its own episode.

        An agent with a datastore cannot be trained, since its outputs would no longer match the stored keys.
        Call `detach_datastore`, train, and call `attach_datastore` again.

        Args:
            dataset: as in the constructor; its spaces must be those of the agent's dataset.
            head: `KNNLM` or `SPALM`; None for ``KNNLM()``.
            download: True to download a dataset that is not on this machine.
            progress_bar: show a progress bar.

        Raises:
            DatasetError: if the dataset is unknown, empty or damaged, or its spaces differ.
            ValueError: if the head needs more neighbours than there are steps or, with a gate, than there are
                steps in other episodes. Also if the core has early exits, since their outputs come from
                different depths.
            ImportError: if the head needs faiss, which is not installed.
        """
        check_no_early_exit(self.core.depth)
        data = as_trajectories(dataset, download)
        self.memory = build_retrieval_memory(self, data, KNNLM() if head is None else head, progress_bar)
        return self

    def detach_datastore(self) -> Self:
        """Detach the datastore of `attach_datastore`."""
        self.memory = None
        return self

    @property
    def head(self) -> Head | RetrievalPolicy:
        """Action head of the policy; with a datastore, the head that also retrieves from it."""
        own = self.policy.loss.head
        return own if self.memory is None else retrieval_head(own, self.memory)

    def _learn(
        self, update: OfflineUpdate, windows: Windows, steps: int, callback: MaybeCallback, *others: Any
    ) -> Self:
        """Run `OfflineAlgorithm._learn` with an environment set, which SB3's `EvalCallback` needs.

        If the agent has none, it is the environment of the first `EvalCallback`.
        """
        before = self.env
        eval_envs = [] if before is not None else [each.eval_env for each in find_eval_callbacks(callback)]
        try:
            for env in eval_envs[:1]:
                self.set_env(env)
            return super()._learn(update, windows, steps, callback, *others)
        finally:
            self.env = before

    def _setup_learn(self, *args: Any, **options: Any) -> tuple[int, BaseCallback]:
        check_no_datastore(self.memory)
        return super()._setup_learn(*args, **options)

    def train(self, windows: Windows, learning_rate: float) -> None:
        """Run one update; a calibrated exit threshold is reset first, with a warning."""
        reset_calibration(self.policy.transformer)
        super().train(windows, learning_rate)

    def encode(
        self, observation: dict[str, NDArray[Any]], actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Encode observations of `rlxf.envs.ReturnToGo` and actions, (E, ...), as in `Trajectories`."""
        rows = encode_observations(observation["observation"], self.facts)
        return rows, action_encoder(self.facts.action_space)(actions)

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions, as in SB3; ``state`` holds the last K steps.

        Args:
            observation: observation of `rlxf.envs.ReturnToGo`, of a single environment or of E environments.
            state: the `ContextWindow` returned by the previous call; None at the beginning.
            episode_start: (E,) bool, True for the first observation of an episode. Observations with time
                step 0 always start an episode.
            deterministic: return the most likely action instead of a sample. With `Imitation`, Box actions
                are always deterministic.

        Returns:
            The actions, (E, ...), within the bounds of the space, and the state for the next call. The given
            state is not modified.

        Raises:
            TypeError: if the observation is not that of a `ReturnToGo`.
            ValueError: if the observation's shape differs from the dataset's, the batch size of ``state`` or
                ``episode_start`` differs from the observation's, or a number is NaN or infinite.

        Warns:
            UserWarning: once, if ``state`` is None in ten consecutive calls without ``episode_start`` at time
                steps other than 0, or in a call whose ``episode_start`` is False for an observation.
        """
        encoded, state = self._append_observation(observation, state, episode_start)
        with torch.no_grad():
            chosen = self.head.choose(self.policy.newest(state), deterministic)
        actions = to_environment(chosen, self.action_space)
        return (actions if encoded.batched else actions[0]), state

    @torch.no_grad()
    def action_logits(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits (E, A) that `predict` samples from, and the state; arguments as in `predict`.

        Raises the errors of `predict`.

        Raises:
            TypeError: also if the action space is not Discrete.
        """
        if not isinstance(self.action_space, spaces.Discrete):
            raise TypeError(f"choices needs Discrete actions, got {self.action_space}")
        _, state = self._append_observation(observation, state, episode_start)
        head: CategoricalHead | DiscreteRetrievalPolicy = self.head  # type: ignore[assignment]
        (logits,) = head.logits(self.policy.newest(state))
        return logits, state

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
        probability ``1 - delta`` over the draw of the episodes, the risk on episodes of the same distribution
        is at most ``alpha``. Continuous actions that differ by at most 0.05 on the scale of -1 to 1 count as
        equal. The threshold is saved with the agent. Further training resets it with a warning, since the
        guarantee holds for the current weights only.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            alpha: guaranteed risk.
            delta: probability that the guarantee does not hold.
            thresholds: candidate confidence thresholds in descending order within [0, 1], the safest first.
            steps: number of steps drawn from each episode, with the agent's seed.
            dataset: episodes that the agent was not trained on; None for its training data, for which the
                guarantee is weaker.

        Returns:
            The measured risk and depth of each threshold, and the chosen threshold.

        Raises:
            ValueError: before any computation, if the core has another depth, the thresholds do not descend,
                or a threshold, alpha, delta or steps is out of range.
            TypeError: if one of them is not a number.
        """
        depth, candidates = calm_depth(self.policy.transformer), tuple(thresholds)
        check_thresholds(candidates)
        check_levels(alpha, delta)
        check_int("steps", steps)
        data = self._data() if dataset is None else as_trajectories(dataset, False)
        windows = Windows(data, 1, burn_in=self.context_length + self.policy.burn_in_steps - 1)
        generator = torch.Generator().manual_seed(self.seed or 0)
        calibration = calibrate_exits(
            self.policy.eval(), windows, candidates, alpha, delta, steps, generator, self.device
        )
        depth.threshold.fill_(calibration.threshold)
        return calibration

    def mean_predict_depth(self) -> float | None:
        """Return the mean number of layers per token in `predict` since the last call or start of `evaluate`.

        None if the depth is fixed or there was no prediction. See `ACT`, `CALM` and `DepthAdaptive`.
        """
        depth = self.policy.transformer.acting_depth()
        return None if depth is None else depth.item()

    def observe_action(self, state: ContextWindow, actions: torch.Tensor) -> ContextWindow:
        """Return the state after a step with actions (E,), unchanged; the next observation contains them."""
        return state

    def _append_observation(
        self, observation: NDArray[Any] | dict[str, NDArray[Any]], state: Any, episode_start: Any
    ) -> tuple[ConditionedObservation, ContextWindow]:
        """Encode the observation and append it to the context; return both."""
        encoded = encode_conditioned_observation(observation, self.facts, self.device)
        start = episode_start_mask(encoded, episode_start)
        if self.policy.training:  # eval() visits each module, which takes a tenth of the time of a step
            self.policy.eval()
        self._stateless.record(
            state, None if episode_start is None and not start.all() else bool(start.all())
        )
        length = self.context_length + self.policy.burn_in_steps
        state = empty_context(self.policy, encoded, length) if state is None else state
        if len(state.mask) != len(start):
            raise ValueError(
                f"the state is of {len(state.mask)} environments, the observation of {len(start)}; "
                f"pass state=None to start with an empty context"
            )
        return encoded, append_step(self.policy, state, encoded, start)

    def make_env(
        self,
        n_envs: int,
        seed: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        view: Callable[[gymnasium.Env], gymnasium.Env] | None = None,
    ) -> VecEnv:
        """Make the evaluation environments that the dataset names, without the wrapper `ReturnToGo`.

        The environment is looked up by its id in Gymnasium's registry. The rest of the dataset's description
        (entry point, arguments, wrappers) is used if the agent was built or loaded with ``trust=True``.

        Args:
            n_envs: number of environments, at least 1.
            seed: environment i gets seed + i; None for random seeds.
            env_kwargs: arguments of the environment that override those of the dataset.
            view: wrapper around each environment; None for none.

        Raises:
            ValueError: if the dataset names no environment, the environment is not registered, or the
                dataset gives arguments or wrappers that are not trusted; the message names them.
            DatasetError: if the environment's spaces differ from those of the dataset.
            TypeError: if a space is not supported, or the environment does not accept ``env_kwargs``.
        """
        check_sizes(n_envs=n_envs)
        spec = self._env_spec(env_kwargs or {})
        if spec is None:
            raise ValueError(
                f"dataset {', '.join(self.facts.dataset_ids)} does not name its environment: "
                f"pass one, for example evaluate(agent, env='CartPole-v1')"
            )
        make = partial(make_single, spec, **(env_kwargs or {}))
        env = make_copies(make, n_envs, seed, view)
        try:
            self.check_env(env)
        except DatasetError:
            env.close()
            raise
        return env

    def _env_spec(self, given: Collection[str]) -> EnvSpec | None:
        """Return the spec of the evaluation environment; with trust, the dataset's own, which names code."""
        if self.trust and self.trajectories is not None:
            return self.trajectories.eval_env_spec
        return self.facts.env_spec(self.trust, given)

    def check_env(self, env: VecEnv) -> None:
        """Raise DatasetError unless the environments, without `ReturnToGo`, have the spaces of the dataset.

        Warns:
            UserWarning: once, if they are another version of the dataset's environment.
        """
        wrapper = unwrap_vec_wrapper(env, ReturnToGo)
        unwrapped = env if wrapper is None else wrapper.venv
        check_spaces_match(self.facts, unwrapped.observation_space, unwrapped.action_space)
        warn_on_version_mismatch(self.facts.env_id, unwrapped, self._other_versions)

    @property
    def return_range(self) -> tuple[float, float]:
        """Smallest and largest return of an episode in the dataset."""
        return self.facts.return_range

    @property
    def reference_scores(self) -> ReferenceScores | None:
        """Scores for the normalization of returns; None if there are none."""
        return self.facts.reference_scores

    def set_env(self, env: VecEnv, force_reset: bool = True) -> None:  # type: ignore[override]
        """Set the environment for callbacks, wrapped in `rlxf.envs.ReturnToGo`.

        Raises:
            TypeError: if it is not a VecEnv with that wrapper.
            DatasetError: if its spaces differ from those of the dataset.
        """
        if not isinstance(env, VecEnv) or not is_return_conditioned(env.observation_space):
            raise TypeError(
                f"{env!r} is not a return-conditioned VecEnv: make a VecEnv, e.g. "
                f"rlxf.envs.make_vec_env(id, n_envs), and wrap it, rlxf.envs.ReturnToGo(env, target_return)"
            )
        self.check_env(env)
        self.env, self.n_envs = env, env.num_envs

    @classmethod
    def load(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        dataset: Dataset | Sequence[Dataset] | Trajectories | None = None,
        env: VecEnv | None = None,
        device: torch.device | str = "auto",
        sha256: str | None = None,
        **settings: Any,
    ) -> Self:
        """Load an agent that `save` wrote.

        Args:
            path: path of the file; ".zip" is added if it has no suffix.
            dataset: training data; None to predict and evaluate only.
            env: as in the constructor.
            device: "auto", "cpu" or "cuda".
            sha256: expected SHA-256 of the file in hexadecimal digits, from a trusted source. It is compared
                before anything is parsed. None to accept any file.
            settings: arguments of the constructor that override the file's. ``trust`` and
                ``tensorboard_log`` are never taken from the file.

        Raises:
            FileNotFoundError: if the file does not exist.
            CheckpointError: if it is truncated, altered or of another format.
            DatasetError: if the dataset's spaces differ from the checkpoint's.
            TypeError: if the constructor has no such argument.
        """
        agent = super().load(path, dataset, device, sha256, **settings)
        if env is not None:
            agent.set_env(env)
        return agent
