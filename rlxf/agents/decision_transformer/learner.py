"""Learning from trajectories to act for a return that is asked for."""

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

from rlxf.agents.actions import to_environment
from rlxf.agents.arguments import explain_unknown
from rlxf.agents.calibration import (
    THRESHOLDS,
    Calibration,
    check_thresholds,
    confidence_of,
    forget_calibration,
)
from rlxf.agents.decision_transformer import checkpoint
from rlxf.agents.decision_transformer.acting import (
    Shown,
    encode_observations,
    no_steps,
    one_step_on,
    read_shown,
    started,
)
from rlxf.agents.decision_transformer.calibrating import calibrated
from rlxf.agents.decision_transformer.core import resolve_core
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.decision_transformer.env_version import warn_of_other_version
from rlxf.agents.decision_transformer.evaluations import evaluations
from rlxf.agents.decision_transformer.heads import Categorical, Head, RandomHead
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.objectives import Imitation, Objective
from rlxf.agents.decision_transformer.online_state import (
    load_online_state,
    online_state,
    read_online_run,
)
from rlxf.agents.decision_transformer.remembering import remembered, with_memory
from rlxf.agents.decision_transformer.replay import Replay
from rlxf.agents.decision_transformer.resuming import go_on
from rlxf.agents.decision_transformer.rounds import Rounds
from rlxf.agents.decision_transformer.sb3_arguments import SB3_ARGUMENTS, SB3_ONLINE_ARGUMENTS
from rlxf.agents.decision_transformer.settings import check_same_data, check_sizes
from rlxf.agents.decision_transformer.steps import Steps
from rlxf.agents.decision_transformer.update import Update
from rlxf.agents.decision_transformer.window_learner import WindowLearner
from rlxf.agents.distillation import Distillation
from rlxf.agents.handover import hand_over
from rlxf.agents.learn_then_test import check_levels
from rlxf.agents.remembering import Remembering, RememberingChoices, check_depth, check_forgotten
from rlxf.agents.stateless import StatelessCalls
from rlxf.attention import KNNLM, TransformerSpec
from rlxf.attention.checks import check_whole
from rlxf.attention.heads.base import OutputHead
from rlxf.envs.arguments import make_single
from rlxf.envs.make import copies, make_vec_env
from rlxf.envs.replayable import Replayable
from rlxf.envs.return_to_go import ReturnToGo, is_return_conditioned
from rlxf.envs.side_by_side import side_by_side
from rlxf.envs.trajectories import (
    DatasetError,
    ReferenceScores,
    Trajectories,
    Windows,
    action_encoder,
    as_trajectories,
    check_fits,
)
from rlxf.envs.trajectories.source import Dataset
from rlxf.envs.vector import as_vec_env
from rlxf.envs.watched_processes import watch_processes
from rlxf.training import Archive
from rlxf.training.checkpoints import copied

if TYPE_CHECKING:
    from rlxf.agents.gtrxl import GTrXLPPO


class DecisionTransformer(WindowLearner):
    """A transformer that reads what return is wanted, and acts so; trained offline on Minari datasets.

    It speaks Stable-Baselines3's ``learn``, ``predict``, ``save`` and ``load``, and takes its callbacks and
    loggers. A step is an update here: ``num_timesteps`` counts updates. Its observations are those of
    `rlxf.envs.ReturnToGo`, so any tool of Stable-Baselines3 can evaluate it in an environment that is
    wrapped so.

    On CPU, numbers below 1e-38 slow training severalfold within minutes. The constructor has torch flush
    them to 0 (``torch.set_flush_denormal``), for the whole process.

    Source: Chen et al. 2021, arXiv:2106.01345.

    Args:
        dataset: a Minari id, a ``MinariDataset``, several of these joined, or `Trajectories`.
        context_length: steps K that the agent sees, the present one included. May exceed the longest episode.
        learning_rate: AdamW's; a number, or a schedule of the progress remaining, from 1 to 0.
        batch_size: windows of K steps in an update, over all processes under torchrun.
        weight_decay: AdamW's.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of those that
            `learn` is asked for.
        max_grad_norm: largest norm of the gradient.
        return_scale: what returns are divided by before the model reads them; None for the standard
            deviation of the return to go over all steps of the data.
        episode_length: time steps that have an embedding of their own; None for the longest episode of the
            data. Steps beyond share the last one.
        objective: None for `Imitation`; `MaximumEntropy` for a stochastic policy, which can go on
            learning online.
        core: the transformer; None for `decision_transformer`. Any that is causal will do.
        env: wrapped in `ReturnToGo`, for callbacks that ask the agent for an environment; None for none.
        download: whether a dataset that is not on this machine is downloaded.
        trust: use the full description of the environment in the dataset or the file of `load`: entry point,
            arguments and wrappers, which can run code. If False, `make_env`, `evaluate` and `learn_online`
            use, without ``env``, the environment of that id that is registered here. Not saved.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: of weights, windows and dropout; None for any.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or holds a NaN.
        ValueError: if a size or number does not fit; the message names it and an allowed value. Also if the
            device does not exist: SB3 would use the CPU instead of a missing GPU.
        TypeError: if a space is not supported, or for other arguments. For those of SB3's algorithms the
            message names the alternative.
    """

    NAME = "DecisionTransformer"
    policy: DecisionTransformerModel
    _rounds: Rounds | None = None
    """Rounds of the current `learn_online`, if any."""

    @explain_unknown(SB3_ARGUMENTS)
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
        self._stateless, self._other_versions = StatelessCalls(stacklevel=5), set[str]()
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

    def take_weights(self, source: "WindowLearner | GTrXLPPO") -> Self:
        """Begin with the weights of another: call it before `learn`. Heads stay as they are.

        From a `MaskedPretraining` or a `DecisionTransformer` come transformer, tokens and what reads
        observations; with them how these are normalised and what returns are divided by, since the tokens
        were learned so. From a `GTrXLPPO` comes the transformer alone.

        Raises:
            TypeError: if ``source`` is none of these.
            ValueError: if the weights do not fit: the first difference is named, nothing is changed. Cores
                must be equal but for causal, memory, pattern and dropout. Also if the agent remembers.
        """
        check_forgotten(self.memory)
        if not isinstance(source, WindowLearner):
            hand_over(source, self.policy)
            forget_calibration(self.policy.transformer)
            return self
        check_same_data(source, self)
        hand_over(source, self.policy, ("transformer", "tokens", "features"))
        forget_calibration(self.policy.transformer)
        assert source.return_scale is not None
        self.return_scale = self.policy.tokens.return_scale = source.return_scale
        return self

    def learn_from(
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
        """Learn to do what a teacher would do, as a rule a larger agent, on windows of this agent's data.

        As `learn`, but the loss: that of `Distillation`. The actions of the data do not matter.

        Args:
            teacher: stays as it is. Sizes, techniques and context lengths may be others.
            steps: updates, each of one batch of windows.
            distillation: what is minimised; None for ``Distillation()``.
            callback: SB3's, called after each update.
            log_interval: updates from one line of the log to the next.
            tb_log_name: of the run in TensorBoard.
            reset_num_timesteps: begin warm-up and schedules anew; False to go on with them.
            progress_bar: show one.

        Raises:
            ValueError: if a number is less than 1, the agent was loaded without a dataset, the teacher's
                spaces, kind of head or device are others, or it remembers trajectories.
        """
        self.ranks.check_alone("learn_from")
        update = DistillationUpdate(self, teacher, distillation or Distillation())
        windows = update.windows(self._data())
        return self._learn(
            update, windows, steps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
        )

    @explain_unknown(SB3_ONLINE_ARGUMENTS)
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
        """Go on learning from episodes that the agent plays itself, asked for more than it reaches yet.

        The replay begins with the best episodes of the data. The agent plays, sampling its actions; what an
        episode returned in fact takes the place of what was asked for (hindsight), and it enters the
        replay. After every round of steps come updates on windows of the replay. Here ``num_timesteps``
        counts steps of the environments, as in SB3; there is no warm-up.

        Source: Zheng et al. 2022, arXiv:2202.05607, section 4 and algorithm 1: there a round is one episode
        of up to 1000 steps and 300 updates.

        Args:
            steps: of the environments, over all of them.
            target_return: what is asked for while playing. In the paper twice that of the evaluation.
            env: environments to play in, or a Gymnasium id; not wrapped in `ReturnToGo`. None for `make_env`.
                Given ones stay open, and are the agent's from then on; those made here are closed at the end.
            n_envs: environments to make.
            round_steps: steps over all environments from one round of updates to the next.
            round_updates: updates in a round.
            replay_episodes: episodes that the replay holds. They are kept in memory.
            callback: SB3's, called after each step of the environments.
            log_interval: rounds from one line of the log to the next.
            tb_log_name: of the run in TensorBoard.
            reset_num_timesteps: begin counting and schedules anew; False to go on with them.
            progress_bar: show one.
            resume_from: a file that `rlxf.training.Checkpoints` wrote during such a training, or their
                folder, of which the newest whole one is taken. It continues from there, within the episodes
                and with its replay, to ``steps`` steps in all, and on one machine ends with the same bits as
                if it had never been interrupted. Agent, data and arguments must be the same. Environments
                that are made here are `Replayable`; others that are neither that nor `Resumable` begin
                fresh episodes, with a warning. Sets the global generators of torch, numpy and Python.

        Raises:
            ValueError: if a number is out of range, the agent was loaded without a dataset, it cannot
                explore, since it does not sample: train it with ``objective=MaximumEntropy()``; or it is not
                built as that of the file to resume from.
            DatasetError: if the environment does not fit the data.
            FileNotFoundError: if there is no file to resume from.
            CheckpointError: if it is truncated, altered or foreign, or was not written by `learn_online`.
        """
        self.ranks.check_alone("learn_online")
        check_sizes(steps=steps, round_steps=round_steps, round_updates=round_updates)
        check_sizes(replay_episodes=replay_episodes, log_interval=log_interval)
        replay = Replay(self._data(), replay_episodes)
        if not isinstance(self.policy.loss.head, RandomHead):
            raise ValueError(
                "the agent does not sample its actions: train it with objective=MaximumEntropy()"
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
        with self._playing_in(env, n_envs, target_return):
            total_timesteps, callback = self._setup_learn(
                steps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
            self._update = Update(self.policy, self.optimizer, self.max_grad_norm)
            rounds = Rounds(self, replay, options, log_interval)
            callback.on_training_start(locals(), globals())
            if run is not None:
                load_online_state(rounds, run)
                go_on(self._update, run)
            self._play_and_learn(rounds, total_timesteps, callback)
        return self

    def _play_and_learn(self, rounds: Rounds, total_timesteps: int, callback: BaseCallback) -> None:
        """Run rounds until the number of steps is reached or a callback stops the training."""
        self._rounds, self.at_rest = rounds, True
        try:
            while self.num_timesteps < total_timesteps:
                rounds.learn_if_due()
                rounds.play()
                callback.update_locals(locals())
                if not callback.on_step():
                    break
            else:
                rounds.learn_if_due()
                rounds.learn_rest()
            callback.on_training_end()
        finally:
            self._rounds, self.at_rest = None, False

    def snapshot(self) -> Archive:
        """Return the content of `save` and the state that `learn` or `learn_online` needs to continue.

        Later updates do not change it. For `rlxf.training.Checkpoints`.
        """
        own = super().snapshot()
        if self._rounds is None:
            return own
        online = online_state(self._rounds)
        return Archive(own.documents | online.documents, own.tensors | copied(online.tensors))

    @contextmanager
    def _playing_in(
        self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int, target_return: float
    ) -> Iterator[None]:
        """Meanwhile the agent's environments are these. What is made for it is closed at the end."""
        before, played = self.env, self._environments(env, n_envs)
        try:
            self.check_env(played)
            self.set_env(ReturnToGo(played, target_return))
            yield
        finally:
            if env is None or isinstance(env, str):
                played.close()
                self.env, self.n_envs = before, before.num_envs if before else 0

    def _environments(self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int) -> VecEnv:
        """What `learn_online` plays in."""
        if env is None:
            return self.make_env(n_envs, self.seed, view=Replayable)
        if isinstance(env, str):
            return make_vec_env(env, n_envs, self.seed)
        if isinstance(env, VectorEnv):
            return as_vec_env(env)
        if isinstance(env, gymnasium.Env):
            return side_by_side([lambda: Replayable(Monitor(env))])
        watch_processes(env)
        return env

    def remember(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """From now on also act by these trajectories, without learning from them; they replace earlier ones.

        Each step of them is stored: what the head reads there (the output of the transformer at the state
        token) and the action that was taken. For every action the nearest of all are searched, and what was
        done there is mixed in. The output has seen the return to go: steps that had about the return that is
        asked for are nearer by themselves.

        N steps take ``4 N (C + A) + 8 N`` bytes, C the width of the core and A the numbers of an action: 106
        MB for 200,000 steps of Hopper at width 128. They are saved with the agent. To encode them, about N
        windows are read, once. The gate of a `SPALM` is learned here, from the steps, each without its own
        episode.

        An agent that remembers does not learn: its outputs would not be those that are stored. `forget`,
        learn, and remember anew.

        Args:
            dataset: as in the constructor; of the same spaces as the data that the agent learned from.
            head: `KNNLM` or `SPALM`; None for ``KNNLM()``.
            download: whether a dataset that is not on this machine is downloaded.
            progress_bar: show one.

        Raises:
            DatasetError: if the dataset is unknown, empty, damaged, or its spaces are others.
            ValueError: if head asks for more neighbours than there are steps, or, with a gate, than there are
                steps in other episodes; if tokens may leave early, as their outputs would be of many depths.
            ImportError: if head asks for faiss, which is not installed.
        """
        check_depth(self.core.depth)
        data = as_trajectories(dataset, download)
        self.memory = remembered(self, data, KNNLM() if head is None else head, progress_bar)
        return self

    def forget(self) -> Self:
        """Act without what was remembered."""
        self.memory = None
        return self

    @property
    def head(self) -> Head | Remembering:
        """What actions are read off: the policy's own head, or one that also reads the memory."""
        own = self.policy.loss.head
        return own if self.memory is None else with_memory(own, self.memory)

    def _learn(
        self, update: Update, windows: Windows, steps: int, callback: MaybeCallback, *others: Any
    ) -> Self:
        """As all learners, but SB3's `EvalCallback` finds an environment: its own, if the agent has none."""
        before = self.env
        lent = [] if before is not None else [each.eval_env for each in evaluations(callback)]
        try:
            for env in lent[:1]:
                self.set_env(env)
            return super()._learn(update, windows, steps, callback, *others)
        finally:
            self.env = before

    def _setup_learn(self, *args: Any, **options: Any) -> tuple[int, BaseCallback]:
        check_forgotten(self.memory)
        return super()._setup_learn(*args, **options)

    def train(self, windows: Windows, learning_rate: float) -> None:
        """As all learners; a threshold that was calibrated is taken back, with a warning."""
        forget_calibration(self.policy.transformer)
        super().train(windows, learning_rate)

    def encode(
        self, observation: dict[str, NDArray[Any]], actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Observations of `rlxf.envs.ReturnToGo` and actions, (E, ...), as `Trajectories` have them."""
        rows = encode_observations(observation["observation"], self.facts)
        return rows, action_encoder(self.facts.action_space)(actions)

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions, as in SB3; the last K steps go in and come out as ``state``.

        Args:
            observation: of `rlxf.envs.ReturnToGo`, of one environment or of E.
            state: the `Steps` that the last call gave; None to begin.
            episode_start: (E,) bool, which observations are the first of an episode. Those with time step 0
                are so anyway.
            deterministic: the most likely action instead of a sample. With `Imitation`, Box actions are
                always the same.

        Returns:
            The actions, (E, ...), within the bounds of the space, and the state for the next call. The one
            given stays as it was.

        Raises:
            TypeError: if the observation is not that of a `ReturnToGo`.
            ValueError: if it does not fit the data, or state or starts its batch size; if a number in it is
                NaN or infinite.

        Warns:
            UserWarning: once, if there is no state ten times in a row, although time steps are not 0, or if
                ``episode_start`` marks an observation as not the first of its episode.
        """
        shown, state = self._consider(observation, state, episode_start)
        with torch.no_grad():
            chosen = self.head.choose(self.policy.newest(state), deterministic)
        actions = to_environment(chosen, self.action_space)
        return (actions if shown.batched else actions[0]), state

    @torch.no_grad()
    def choices(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Logits (E, A) that `predict` would choose from, and the state; arguments and errors as there.

        Raises:
            TypeError: also if actions are not Discrete.
        """
        if not isinstance(self.action_space, spaces.Discrete):
            raise TypeError(f"choices needs Discrete actions, got {self.action_space}")
        _, state = self._consider(observation, state, episode_start)
        head: Categorical | RememberingChoices = self.head  # type: ignore[assignment]
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
        """Find how early `predict` may leave, and leave as early from now on. For a core of depth `CALM`.

        The promise: with probability ``1 - delta`` over the draw of the episodes, the most likely action is
        another one than with all passes in a share of at most ``alpha`` of an episode's steps, on average
        over episodes like these: a short one counts as much as a long one. Numbers that differ by no more
        than 0.05 on the scale of -1 to 1 are the same action. The threshold is saved with the agent. Learning
        takes it back, with a warning: it holds for the weights of now.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            alpha: promised risk: such a share, on average over episodes.
            delta: probability with which the promise may be broken.
            thresholds: of confidence, from 1 down to 0, the safest first.
            steps: of each episode, drawn from the agent's seed.
            dataset: episodes that the agent did not learn from; None for those that it did, which promises
                less.

        Returns:
            What came of each threshold.

        Raises:
            ValueError: before anything is read, if the core has another depth, thresholds do not fall, or one
                of them, alpha, delta or steps is out of range.
            TypeError: if one is no number.
        """
        depth, falling = confidence_of(self.policy.transformer), tuple(thresholds)
        check_thresholds(falling)
        check_levels(alpha, delta)
        check_whole("steps", steps)
        data = self._data() if dataset is None else as_trajectories(dataset, False)
        windows = Windows(data, 1, burn_in=self.context_length + self.policy.remembered - 1)
        generator = torch.Generator().manual_seed(self.seed or 0)
        found = calibrated(self.policy.eval(), windows, falling, alpha, delta, steps, generator, self.device)
        depth.threshold.fill_(found.threshold)
        return found

    def acting_depth(self) -> float | None:
        """Passes that `predict` took on average for a token, since last asked or since `evaluate` began.

        None if all take all, or if nothing was predicted. See `ACT`, `CALM` and `DepthAdaptive`.
        """
        depth = self.policy.transformer.acting_depth()
        return None if depth is None else depth.item()

    def took(self, state: Steps, actions: torch.Tensor) -> Steps:
        """The state after a step in which actions (E,) were taken: as it is. The next step shows them."""
        return state

    def _consider(
        self, observation: NDArray[Any] | dict[str, NDArray[Any]], state: Any, episode_start: Any
    ) -> tuple[Shown, Steps]:
        """What is shown, and the steps that end with it."""
        shown = read_shown(observation, self.facts, self.device)
        start = started(shown, episode_start)
        if self.policy.training:  # to look at each module takes a tenth of a step
            self.policy.eval()
        self._stateless.note(state, None if episode_start is None and not start.all() else bool(start.all()))
        length = self.context_length + self.policy.remembered
        state = no_steps(self.policy, shown, length) if state is None else state
        if len(state.mask) != len(start):
            raise ValueError(
                f"the state is of {len(state.mask)} environments, the observation of {len(start)}; "
                f"pass state=None to begin anew"
            )
        return shown, one_step_on(self.policy, state, shown, start)

    def make_env(
        self,
        n_envs: int,
        seed: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        view: Callable[[gymnasium.Env], gymnasium.Env] | None = None,
    ) -> VecEnv:
        """So many of the environments that the dataset names for evaluation, to be wrapped in `ReturnToGo`.

        It is looked up by its id among the environments that are registered here. The rest of its
        description (entry point, arguments, wrappers) is used if the agent was built or loaded with
        ``trust=True``.

        Args:
            n_envs: how many, at least 1.
            seed: environment i gets seed + i; None for any.
            env_kwargs: arguments of the environment to change; the others are those of the data.

        Raises:
            ValueError: if the dataset names none; if it is not registered here, or its spaces are others; if
                the dataset gives arguments or wrappers that are not trusted, which the message names.
            TypeError: if a space is of a kind that nothing here reads, or the environment does not take
                ``env_kwargs``.
        """
        check_sizes(n_envs=n_envs)
        spec = self._env_spec(env_kwargs or {})
        if spec is None:
            raise ValueError(
                f"dataset {', '.join(self.facts.dataset_ids)} does not say which environment it is from: "
                f"pass one, for example evaluate(agent, env='CartPole-v1')"
            )
        make = partial(make_single, spec, **(env_kwargs or {}))
        env = copies(make, n_envs, seed, view)
        try:
            self.check_env(env)
        except DatasetError:
            env.close()
            raise
        return env

    def _env_spec(self, given: Collection[str]) -> EnvSpec | None:
        """Spec of the environment to evaluate in. The dataset's own, which names code, is used with trust."""
        if self.trust and self.trajectories is not None:
            return self.trajectories.eval_env_spec
        return self.facts.env_spec(self.trust, given)

    def check_env(self, env: VecEnv) -> None:
        """Raise DatasetError unless the environments, but for a `ReturnToGo`, have the spaces of the data.

        Warns:
            UserWarning: once, if they are another version of the environment of the data.
        """
        asking = unwrap_vec_wrapper(env, ReturnToGo)
        seen = env if asking is None else asking.venv
        check_fits(self.facts, seen.observation_space, seen.action_space)
        warn_of_other_version(self.facts.env_id, seen, self._other_versions)

    @property
    def return_range(self) -> tuple[float, float]:
        """Smallest and largest return of an episode in the data: what lies outside was never seen."""
        return self.facts.return_range

    @property
    def reference_scores(self) -> ReferenceScores | None:
        """To normalise returns with; None if there are none."""
        return self.facts.reference_scores

    def set_env(self, env: VecEnv, force_reset: bool = True) -> None:  # type: ignore[override]
        """The environment that callbacks get when they ask for one, wrapped in `rlxf.envs.ReturnToGo`.

        Raises:
            TypeError: if it is not.
            DatasetError: if its spaces are not those of the data.
        """
        if not isinstance(env, VecEnv) or not is_return_conditioned(env.observation_space):
            raise TypeError(
                f"{env!r} asks for no return: make a VecEnv, e.g. rlxf.envs.make_vec_env(id, n_envs), and "
                f"wrap it, rlxf.envs.ReturnToGo(env, target_return)"
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
        """The agent that `save` wrote.

        Args:
            path: of the file; ".zip" is added if it has no suffix.
            dataset: to train on; None to predict and evaluate only.
            env: as in the constructor.
            device: "auto", "cpu" or "cuda".
            sha256: SHA-256 that the file must have, in hexadecimal digits, from a source that you trust. It
                is compared before anything is parsed. None to take any file.
            settings: arguments of the constructor that shall differ from the file's. ``trust`` and
                ``tensorboard_log`` are never taken from the file.

        Raises:
            FileNotFoundError: if there is no such file.
            CheckpointError: if it is truncated, altered or foreign.
            DatasetError: if the dataset's spaces differ from the checkpoint's.
            TypeError: if the constructor has no such argument.
        """
        agent = super().load(path, dataset, device, sha256, **settings)
        if env is not None:
            agent.set_env(env)
        return agent
