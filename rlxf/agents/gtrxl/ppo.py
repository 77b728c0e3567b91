"""Proximal policy optimization (PPO) with a Gated Transformer-XL."""

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import MaybeCallback, PyTorchObs, Schedule
from stable_baselines3.common.utils import (
    FloatSchedule,
    LinearSchedule,
    check_for_correct_spaces,
    explained_variance,
    obs_as_tensor,
    set_random_seed,
)
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import Tensor

from rlxf.agents.calibration import (
    THRESHOLDS,
    Calibration,
    calibratable_exit,
    check_levels,
    check_thresholds,
    reset_calibration,
)
from rlxf.agents.common.arguments import check_device, load_settings, reject_unknown_arguments
from rlxf.agents.common.datastore import check_no_datastore
from rlxf.agents.common.distributed import sync_normalization_statistics, sync_processes
from rlxf.agents.common.losses import Distillation
from rlxf.agents.common.numerics import (
    check_initial_observations,
    check_step_results,
    normalizes_observations,
    numerical_error_context,
    restore_stats_on_error,
)
from rlxf.agents.common.retrieval import ActionDatastore
from rlxf.agents.common.sb3_arguments import PPO_SB3_ARGUMENTS
from rlxf.agents.common.weight_transfer import transfer_weights
from rlxf.agents.gtrxl import checkpoint, resume
from rlxf.agents.gtrxl.calibration import CalibrationRollout, calibrate_thresholds, check_independent_episodes
from rlxf.agents.gtrxl.config import (
    as_training_env,
    check_coefficients,
    check_compressive_blocks,
    check_has_env,
    check_policy,
    check_schedule,
    check_sizes,
    check_value_clipping,
    default_batch_size,
    default_n_steps,
    policy_class_by_name,
    record_hyperparameters,
    stack_observations,
    warn_of_filler_rows,
    warn_of_flattened_images,
)
from rlxf.agents.gtrxl.core import check_episode_length, check_unlimited_positions, resolve_core
from rlxf.agents.gtrxl.diagnostics import EpisodeStatistics, TrainingDiagnostics
from rlxf.agents.gtrxl.distillation import Actor, DistillationTraining
from rlxf.agents.gtrxl.memory_recompute import RecentSteps, memory_receptive_field
from rlxf.agents.gtrxl.policy import POLICIES, SB3_POLICIES, GTrXLPolicy
from rlxf.agents.gtrxl.policy_state import RecurrentPolicyState, mark_filler_rows
from rlxf.agents.gtrxl.retrieval import build_retrieval_policy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.agents.gtrxl.training_algorithm import PPOLoss, PPOTraining, TrainingAlgorithm
from rlxf.attention import KNNLM, State, TokenIndex, TransformerSpec
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.validation import check_int
from rlxf.data import Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.envs.batches import LOST
from rlxf.envs.sb3_vec_env import watch_processes
from rlxf.envs.step_checks import check_finite
from rlxf.envs.workers import restart_counts
from rlxf.training import Archive
from rlxf.training.checkpoints import clone_tensors
from rlxf.training.distributed import process_group

if TYPE_CHECKING:
    from rlxf.agents.offline.algorithm import OfflineAlgorithm

LEARNING_RATE = LinearSchedule(1e-3, 0.0, 1.0)
ENTROPY_COEFFICIENT = LinearSchedule(0.03, 0.0, 1.0)


class GTrXLPPO(OnPolicyAlgorithm):
    """Gated Transformer-XL (GTrXL), trained online with PPO.

    This class is an `OnPolicyAlgorithm` of SB3: callbacks, logger, schedules, ``VecNormalize`` and evaluation
    work as in SB3. Rollout, buffer and training loop support memory. The inputs of each layer are stored once
    per step. A rollout is split into segments. Each segment is trained with the M steps before it as memory:
    gradients flow through the segment, but not into the memory.

    Denormal numbers (below 1e-38) slow CPU training fourfold within minutes. The constructor therefore calls
    ``torch.set_flush_denormal(True)``, which affects the whole process.

    Sources: Schulman et al. 2017, arXiv:1707.06347; Parisotto et al. 2020, arXiv:1910.06764.

    Args:
        policy: "MlpGTrXLPolicy", "CnnGTrXLPolicy", "MultiInputGTrXLPolicy" or a class. The names of ``PPO``
            and ``RecurrentPPO``, e.g. "MlpPolicy" and "MlpLstmPolicy", are aliases.
        env: a Gymnasium id, an environment, an SB3 ``VecEnv`` or a Gymnasium ``VectorEnv``.
        learning_rate: learning rate of Adam; a number or a schedule of the progress remaining, from 1 to 0.
            The default decreases linearly to 0, which prevents a solved task from being unlearned.
        n_steps: steps of each environment between updates; a multiple of ``segment_length``. None: the fewest
            segments that give a rollout of at least 2048 steps over all environments, as in SB3's PPO: 64
            steps with 32 environments, 2048 with one.
        batch_size: steps in a minibatch; a multiple of ``segment_length``. None: 256, or the next multiple.
        n_epochs: passes over a rollout. 6 passes with minibatches of 256 steps are 48 optimizer steps per
            rollout; with a quarter of them, Acrobot is not learned within 100,000 steps.
        gamma: discount factor.
        gae_lambda: lambda of the generalized advantage estimates that train the policy.
        clip_range: epsilon of the clipped objective; a number or a schedule.
        clip_range_vf: largest change of a value in one update, a number or a schedule; None for no clipping.
            The unit is the standard deviation of recent returns. Unlike in SB3, it therefore does not depend
            on the scale of the rewards.
        normalize_advantage: normalize the advantages of a rollout to mean 0 and standard deviation 1. If
            False, the policy loss grows with the scale of the rewards.
        ent_coef: weight of the entropy; a number or a schedule.
        vf_coef: weight of the value loss, which is measured in units of the variance of recent returns. The
            value head is normalized in the same way (`PopArtHead`), so the critic learns returns of -1000 as
            fast as returns of 1, and rewards need no scaling.
        max_grad_norm: largest norm of the gradient.
        segment_length: steps T through which gradients flow.
        memory_length: steps M in memory before a segment. None: that of the core, or 128.
        critic_lambda: lambda of the returns that are the targets of the values; None for ``gae_lambda``. At 1
            the targets are sums of rewards up to the end of the rollout. In episodes of hundreds of steps,
            values then become accurate after few updates, while with 0.95 they propagate back only 20 steps
            per update (Yuan et al. 2025, arXiv:2503.01491, "decoupled GAE").
        target_kl: end an update when the KL divergence exceeds 1.5 times this; None for no limit.
        advantage_epsilon: share of the standard deviation of recent returns that is added to the standard
            deviation of the advantages, by which they are divided. It limits the amplification of noise when
            advantages are small.
        previous_action: add the previous action to the input of each step.
        persist_memory_across_episodes: memory persists across episodes (RL^2): a step attends to the
        previous M steps of its
            environment regardless of their episodes, and positions continue to count. This suits tasks that
            stay the same for several episodes and must be identified in the first of them (Duan et al. 2016,
            arXiv:1611.02779). Returns still end with each episode. Memory is cleared when `learn` resets the
            environments.
        recompute_memory: recompute the memory with the new weights after each update, from the observations
        of the
            last ``L M`` steps, with L layers. The memory then equals that of a forward pass over the episode
            with the current weights. Otherwise hidden states of earlier rollouts stay as computed with
            earlier weights. The cost is a forward pass over up to ``L M`` steps of each environment per
            rollout, a quarter of the training time at the default sizes, and the memory for these
            observations; both are larger with `KNN` memory.
        reconstruction_coef: weight of the observation reconstruction loss; 0 for none.
        n_envs: number of environments to create if ``env`` is an id; under torchrun, of all processes.
        core: specification of the transformer; None for `gtrxl`. It is rejected if acting step by step would
            differ from training on segments.
        stats_window_size: number of episodes in the logged means.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        policy_kwargs: further arguments of the policy.
        verbose: 0 no output, 1 info messages, 2 debug messages.
        seed: seed of weights, actions, order of minibatches and environments; None for a random seed.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: if an argument is invalid; the message names allowed values. Also if the device does not
            exist, where SB3 would silently use the CPU.
        TypeError: if a space is not supported, or for unknown arguments. For those of SB3's PPO and
            RecurrentPPO the message names the alternative.

    Warns:
        UserWarning: if "MlpGTrXLPolicy" flattens images that "CnnGTrXLPolicy" supports.
    """

    normalized_observations: bool
    """True if training observations came from a ``VecNormalize``; saved with the agent."""
    _warned_of_filler = False
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES | SB3_POLICIES
    policy: GTrXLPolicy  # type: ignore[assignment]

    @reject_unknown_arguments(PPO_SB3_ARGUMENTS)
    def __init__(
        self,
        policy: str | type[GTrXLPolicy],
        env: str | Env | VecEnv | VectorEnv | None,
        learning_rate: float | Schedule = LEARNING_RATE,
        n_steps: int | None = None,
        batch_size: int | None = None,
        n_epochs: int = 6,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float | Schedule = ENTROPY_COEFFICIENT,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        *,
        segment_length: int = 64,
        memory_length: int | None = None,
        critic_lambda: float | None = None,
        target_kl: float | None = None,
        advantage_epsilon: float = 0.05,
        previous_action: bool = True,
        persist_memory_across_episodes: bool = False,
        recompute_memory: bool = False,
        reconstruction_coef: float = 0.0,
        n_envs: int = 32,
        core: TransformerSpec | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        check_device(device)
        batch_size = default_batch_size(segment_length) if batch_size is None else batch_size
        check_sizes(n_steps, segment_length, batch_size, n_epochs)
        check_coefficients(
            gamma,
            gae_lambda,
            critic_lambda,
            vf_coef,
            max_grad_norm,
            target_kl,
            advantage_epsilon,
            reconstruction_coef,
        )
        for name, value in {
            "learning_rate": learning_rate,
            "clip_range": clip_range,
            "ent_coef": ent_coef,
        }.items():
            check_schedule(name, value)
        check_value_clipping(clip_range_vf)
        if env is None and _init_setup_model:
            raise ValueError("env is None: pass a Gymnasium id, an environment, a VecEnv or a VectorEnv")
        self.core = resolve_core(core, memory_length)
        self.persist_memory_across_episodes, self.recompute_memory = (
            persist_memory_across_episodes,
            recompute_memory,
        )
        if persist_memory_across_episodes:
            check_unlimited_positions(self.core)
        self.segment_length, self.batch_size, self.n_epochs = segment_length, batch_size, n_epochs
        self.clip_range, self.target_kl = clip_range, target_kl
        self.clip_range_vf, self.normalize_advantage = clip_range_vf, normalize_advantage
        self.advantage_epsilon, self.reconstruction_coef = advantage_epsilon, reconstruction_coef
        self.critic_lambda, self.previous_action = critic_lambda, previous_action
        torch.set_flush_denormal(True)
        self.ranks = process_group()
        training_env = as_training_env(env, n_envs, seed)
        super().__init__(
            policy,  # type: ignore[arg-type]  # SB3 annotates its own actor-critic policy
            training_env,
            learning_rate=learning_rate,
            n_steps=n_steps or default_n_steps(training_env, n_envs, segment_length),
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,  # type: ignore[arg-type]  # SB3 annotates a float; schedules also work
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )
        if _init_setup_model:
            warn_of_flattened_images(self.policy)
        if self.env is not None:
            self.check_env(self.env)

    def check_env(self, env: VecEnv) -> None:
        """Raise ValueError if an episode may have more observations than the core has positions."""
        check_episode_length(self.core, env)

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        return policy_class_by_name(policy_name)

    def set_env(self, env: str | Env | VecEnv | VectorEnv, force_reset: bool = True) -> None:
        """Replace the training environment; spaces and number of environments must be the same.

        Args:
            env: any type that the constructor accepts.
            force_reset: reset the environment at the next `learn`, as in SB3.
        """
        super().set_env(as_training_env(env, self.n_envs, self.seed), force_reset)

    def set_parameters(
        self,
        load_path_or_dict: str | os.PathLike[str] | dict[str, Any],
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Load the weights of SB3's ``get_parameters``, or of a file of `save`.

        Raises:
            CheckpointError: if the file was not written by `save`. SB3's files hold pickles and are not
                opened.
            ValueError: if the agent has a datastore.
        """
        check_no_datastore(self.datastore)
        if not isinstance(load_path_or_dict, dict):
            load_path_or_dict = checkpoint.parameters(self, checkpoint.read_checkpoint(load_path_or_dict))
        super().set_parameters(load_path_or_dict, exact_match, device)

    def load_pretrained(self, source: "GTrXLPPO | OfflineAlgorithm") -> Self:
        """Load the transformer weights of another agent or of a pre-training run; call it before `learn`.

        The embeddings of observations and actions, and the heads, are not loaded: here a step is one token,
        in offline agents it is three.

        Args:
            source: agent or pre-training run with the weights.

        Raises:
            TypeError: if ``source`` has no transformer.
            ValueError: if the weights do not fit, or the agent has a datastore; nothing is changed.
                Cores must be equal except for causal, memory, pattern, dropout and feed_forward_chunk. The
                message names the first difference.
        """
        check_no_datastore(self.datastore)
        transfer_weights(source, self.policy)
        reset_calibration(self.policy.transformer)
        return self

    def set_random_seed(self, seed: int | None = None) -> None:
        """Set seeds as in SB3; the environments of all processes get consecutive seeds."""
        super().set_random_seed(seed)
        if seed is not None and self.env is not None:
            self.env.seed(seed + self._env_numbers.start)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """Choose actions; see `GTrXLPolicy.predict`.

        Warns:
            UserWarning: additionally once, if memory persists across episodes and an observation of the
                agent's environments holds filler rows (NEXT_STEP), which are then treated as steps.
        """
        if self.persist_memory_across_episodes and not self._warned_of_filler and self.env is not None:
            self._warned_of_filler = warn_of_filler_rows(self.env, observation)
        return self.policy.predict(observation, state, episode_start, deterministic)

    @property
    def n_envs_total(self) -> int:
        """Number of environments of all processes; ``n_envs`` is that of this process."""
        return self.n_envs * self.ranks.count

    def _setup_model(self) -> None:
        check_policy(self.policy_class, self.observation_space)
        self._setup_lr_schedule()
        self.clip_range_schedule, self.ent_coef_schedule = (
            FloatSchedule(self.clip_range),
            FloatSchedule(self.ent_coef),
        )
        self.clip_range_vf_schedule = (
            None if self.clip_range_vf is None else FloatSchedule(self.clip_range_vf)
        )
        self.set_random_seed(self.seed)
        self.order = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        self.policy = self.policy_class(  # type: ignore[assignment]
            self.observation_space,
            self.action_space,
            self.lr_schedule,
            core=self.core,
            previous_action=self.previous_action,
            persist_memory_across_episodes=self.persist_memory_across_episodes,
            reconstruct=self.reconstruction_coef > 0,
            **self.policy_kwargs,
        ).to(self.device)
        self._algorithm: TrainingAlgorithm = PPOTraining()
        self._diagnostics, self._ended = TrainingDiagnostics(self.action_space), EpisodeStatistics()
        self._between_rollouts, self.iterations = False, 0
        self.normalized_observations = False

    @cached_property
    def rollout_buffer(self) -> SegmentBuffer:  # type: ignore[override]
        """Rollout buffer, created on first access, since an agent that only acts needs none."""
        return SegmentBuffer(
            self.observation_space,
            self.action_space,
            self.core,
            self.policy.encoded_action_width,
            self.n_envs,
            self.n_steps,
            self.segment_length,
            self.device,
        )

    def _reset_memory(self) -> None:
        """Clear the memory after a reset of the environments; no filler row follows."""
        self.rollout_buffer.clear_memory()
        self._past = RecentSteps.before(self.rollout_buffer)
        self._acting = self.policy.initial_state(self.n_envs)
        self._filler = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: SegmentBuffer, n_rollout_steps: int
    ) -> bool:
        """Take ``n_rollout_steps`` steps in every environment; return False if a callback stops training."""
        self.policy.set_training_mode(False)
        self._acting.cache = self.policy.build_cache(self._begin(rollout_buffer))
        self._algorithm.start_rollout()
        callback.on_rollout_start()
        self.ranks.broadcast_rng_state()
        self._between_rollouts = False
        with restore_stats_on_error(env):
            for _ in range(n_rollout_steps):
                if not self._act(env, callback, rollout_buffer):
                    return False
        next_values = self._values_ahead(self._acting.copy(), self._last_obs)
        critic_lambda = self.gae_lambda if self.critic_lambda is None else self.critic_lambda
        rollout_buffer.finish(next_values, self.gamma, self.gae_lambda, critic_lambda)
        self._ended.tell(self.ranks, super()._update_info_buffer)
        for name, value in restart_counts(env).items():
            counts = self.ranks.all_gather(torch.tensor([value], device=self.device))
            self.logger.record(f"env/{name}", int(counts.sum()))
        callback.on_rollout_end()
        return True

    def _begin(self, buffer: SegmentBuffer) -> State:
        """Start a rollout, and return its memory, recomputed with the current weights if
        ``recompute_memory``.
        """
        if not self.recompute_memory:
            return buffer.start_rollout()
        self._past = self.recent_steps
        buffer.start_rollout()
        state = self._past.recompute_memory(self.policy, self.segment_length)
        buffer.replace_memory(state)
        return state

    @property
    def recent_steps(self) -> RecentSteps:
        """Inputs of the last steps, including the current rollout; empty unless ``recompute_memory`` is
        True.
        """
        if not self.recompute_memory:
            return self._past
        return self._past.followed_by(self.rollout_buffer, memory_receptive_field(self.core))

    def _act(self, env: VecEnv, callback: BaseCallback, rollout_buffer: SegmentBuffer) -> bool:
        """Take a step in every environment; return False if a callback stops training."""
        obs = self._as_tensor(self._last_obs)
        index = self._next_index()
        previous = self._acting.action
        with torch.inference_mode():
            latent, hidden = self.policy.act(obs, self._acting, index)
            distribution, values = self.policy.heads(self.ranks.embed_rows(latent))
            actions = self._algorithm.choose(obs, index, distribution)
            log_probs = distribution.log_prob(actions)
            actions, values, log_probs = map(self.ranks.own, (actions, values, log_probs))
            self._acting.observe_action(self.policy.encode_actions(actions), index)
        new_obs, rewards, dones, infos = env.step(self.policy.to_environment(actions))
        self.num_timesteps += self.n_envs_total
        check_step_results(env, new_obs, rewards, self._env_steps, self._env_numbers, dones=dones)
        callback.update_locals(locals())
        keep_training = callback.on_step()  # a stopped step is stored too, since `learn` may be called again
        self._update_info_buffer(infos, dones)
        bootstrapped = self._bootstrap(rewards, dones, infos)
        ends = torch.as_tensor(dones, dtype=torch.bool, device=self.device) | self._filler
        lost = np.array([LOST in info for info in infos])
        if lost.any():
            bootstrapped, ends, index = self._handle_crashes(lost, values, bootstrapped, ends, index)
        rollout_buffer.add(obs, previous, actions, bootstrapped, ends, values, log_probs, hidden, index)
        self._last_obs = new_obs  # type: ignore[assignment]
        self._last_episode_starts = ends.cpu().numpy()
        self._filler = self._marked(infos, dones | lost, "filler_next")
        return keep_training

    def _handle_crashes(
        self, lost: np.ndarray, values: Tensor, rewards: Tensor, ends: Tensor, index: TokenIndex
    ) -> tuple[Tensor, Tensor, TokenIndex]:
        """Return rewards, episode ends and index corrected for crashed environments, and reset their memory.

        The result of the first lost step is unknown. V(s) replaces its reward, so its advantage is 0, and the
        step before is bootstrapped with V(s), as at a truncation.

        Args:
            lost: (E,) bool, the crashed environments.
            values: (E,), V(s) of the step.
            rewards: (E,), bootstrapped rewards of the step.
            ends: (E,) bool, whether the episode ended with the step.
            index: (E, 1), position and episode of the step.
        """
        rows = torch.as_tensor(lost, device=self.device)
        crashed = rows & ~self._filler
        self._acting.reset(rows)
        return torch.where(crashed, values, rewards), ends | crashed, mark_filler_rows(index, crashed)

    def _next_index(self) -> TokenIndex:
        """Return the index (E, 1) of the next step; filler rows are empty slots before the next episode."""
        start = torch.as_tensor(self._last_episode_starts, dtype=torch.bool, device=self.device)
        return mark_filler_rows(self._acting.advance(start & ~self._filler), self._filler)

    def _bootstrap(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> Tensor:
        """Return the rewards (E,), plus gamma V(last observation) for truncated episodes."""
        bootstrapped = torch.as_tensor(rewards, dtype=torch.float32, device=self.device)
        truncated = self._marked(infos, dones, "TimeLimit.truncated").nonzero()[:, 0]
        if not len(truncated):
            return bootstrapped
        last = stack_observations([infos[row]["terminal_observation"] for row in truncated.tolist()])
        numbers = [self._env_numbers[row] for row in truncated.tolist()]
        check_finite("last observation", last, self._env_steps, numbers)
        next_values = self._values_ahead(self._acting.rows(truncated), last)
        return bootstrapped.index_add(0, truncated, self.gamma * next_values)

    @property
    def _env_steps(self) -> int:
        """Number of steps that each environment has taken."""
        return self.num_timesteps // self.n_envs_total

    @property
    def _env_numbers(self) -> range:
        """Numbers of this process's environments among those of all processes."""
        return self.ranks.numbers(self.n_envs)

    def _values_ahead(self, acting: RecurrentPolicyState, obs: Any) -> Tensor:
        """Return V(obs), (E,), for obs as the next step of ``acting``, which is modified."""
        index = acting.advance(torch.zeros_like(acting.episode, dtype=torch.bool))
        latent, _ = self.policy.act(self._as_tensor(obs), acting, index)
        return self.policy.heads(latent)[1]

    def _marked(self, infos: list[dict[str, Any]], rows: np.ndarray, key: str) -> Tensor:
        """Return which environments of ``rows`` (E,) bool have a true ``key`` in their info, (E,) bool."""
        marked = np.zeros(len(infos), dtype=np.bool_)
        for row in np.flatnonzero(rows):
            marked[row] = infos[row].get(key, False)
        return torch.as_tensor(marked, device=self.device)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        """Prepare training as in SB3; also check the first observations and log hyperparameters."""
        check_no_datastore(self.datastore)
        if self.persist_memory_across_episodes and self.env is not None:
            check_compressive_blocks(self.core, self.env)
        if self.env is not None:
            self.check_env(self.env)
        sync_normalization_statistics(self.env, self.ranks)
        self.normalized_observations = normalizes_observations(self.env, self.normalized_observations)
        watch_processes(self.env)
        before = self._last_obs
        with restore_stats_on_error(self.env):
            result = super()._setup_learn(*args, **kwargs)
            assert self._last_obs is not None
            check_initial_observations(self.env, self._last_obs, self._env_steps, self._env_numbers)
        record_hyperparameters(self)
        self._diagnostics = TrainingDiagnostics(self.action_space)
        if self._last_obs is not before:
            self._reset_memory()
        return result

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        """Update episode statistics as in SB3; several processes exchange them after the rollout."""
        if self.ranks.count == 1 or dones is None:
            super()._update_info_buffer(infos, dones)
        else:
            self._ended.record(infos, dones)

    def _as_tensor(self, obs: Any) -> PyTorchObs:
        """Return observations on the device in the buffer's memory layout, on which rounding depends."""
        on_device = obs_as_tensor(obs, self.device)
        if isinstance(on_device, dict):
            return {key: _contiguous(part) for key, part in on_device.items()}
        return _contiguous(on_device)

    def train(self) -> None:
        """Update the policy with the rollout by PPO (or distillation), in ``n_epochs`` passes.

        Raises:
            NumericalError: before the optimizer step, if returns, a loss or a gradient are NaN or infinite.
        """
        if not self.ranks.all_gather(self.rollout_buffer.weight).any():
            return  # all steps were lost because environments crashed
        reset_calibration(self.policy.transformer)
        buffer = self.rollout_buffer
        with (
            numerical_error_context(f"the update after step {self.num_timesteps}"),
            self.ranks.rank_rng(self.order),
        ):
            buffer.check_finite(self._env_numbers)
            self.policy.set_training_mode(True)
            self._update_learning_rate(self.policy.optimizer)
            self.policy.value_net.update(self._real(buffer.returns))
            metrics = self._algorithm.learn(self)
        self._log_update(metrics)
        self._diagnostics.check(self, metrics)

    def _real(self, x: Tensor) -> Tensor:
        """Return the values of x (E, steps) of all processes at steps of weight 1, (N,)."""
        weight = self.ranks.all_gather(self.rollout_buffer.weight)
        return self.ranks.all_gather(x)[weight == 1]

    def objective(self) -> PPOLoss:
        """Return the current PPO objective, given the schedules and the scale of recent returns."""
        progress = self._current_progress_remaining
        deviation, bound = float(self.policy.value_net.deviation), self.clip_range_vf_schedule
        return PPOLoss(
            clip_range=self.clip_range_schedule(progress),
            clip_range_vf=None if bound is None else bound(progress) * deviation,
            ent_coef=self.ent_coef_schedule(progress),
            vf_coef=self.vf_coef / deviation**2,
            reconstruction_coef=self.reconstruction_coef,
        )

    def _log_update(self, metrics: dict[str, float]) -> None:
        buffer, record = self.rollout_buffer, self.logger.record
        for name, value in metrics.items():
            record(f"train/{name}", value)
        values, returns = (self._real(x).cpu().numpy() for x in (buffer.values, buffer.returns))
        record("train/explained_variance", explained_variance(values, returns))
        if hasattr(self.policy, "log_std"):
            record("train/std", self.policy.log_std.exp().mean().item())
        if self.clip_range_vf_schedule is not None:
            record("train/clip_range_vf", self.clip_range_vf_schedule(self._current_progress_remaining))
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("memory/filled", buffer.filled)

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GTrXLPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train for ``total_timesteps`` steps, counted over all environments; as in SB3.

        Args:
            total_timesteps: steps to train for.
            callback: callback or callbacks, as in SB3.
            log_interval: rollouts between two log lines.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step counter and the schedules; False to continue them.
            progress_bar: show a progress bar.
            resume_from: a file of `rlxf.training.CheckpointWriter`, or their folder, whose newest complete
            file is
                used. Training resumes in the middle of the episodes up to ``total_timesteps`` in total. On
                the same machine the result is bit-identical to an uninterrupted run. The agent must have the
                same arguments and environments. Environments must be `ActionReplay` or `StatefulVectorEnv`,
                like those of `rlxf.envs.make_vec_env`; others start new episodes with a warning. Sets the
                global random number generators of torch, numpy and Python.

        Raises:
            ValueError: before the first step, if the agent was loaded without an environment, a schedule is
                lost (`UnknownSchedule`) or becomes negative, the agent has a datastore, filler rows
                would break the blocks of its memory, or its settings differ from those of the file to resume
                from.
            FileNotFoundError: if the file does not exist.
            CheckpointError: if the file is truncated, altered or of another type, or was not written by
                `CheckpointWriter`.
            FaultyEnvironmentError: during training, if an environment returns NaN or infinity, or crashes
                too often (`BrokenEnvironmentError`).
            NumericalError: during training, if a loss or a gradient is NaN or infinite; the weights are those
                before that optimizer step.
        """
        check_has_env(self.env)
        for name in checkpoint.SCHEDULES:
            if getattr(self, name) is not None:
                check_schedule(name, getattr(self, name), progress=0.0)
        run = None if resume_from is None else resume.read_run(self, resume_from, total_timesteps)
        self.iterations = 0 if reset_num_timesteps else self.iterations
        if run is not None:
            resume.load_state(self, run)
            total_timesteps, reset_num_timesteps = total_timesteps - self.num_timesteps, False
        done = {"num_timesteps": self.num_timesteps, "n_updates": self._n_updates}
        sync_processes(
            self.ranks, self.core, self.policy, self.order, self.set_logger, **done, n_envs=self.n_envs
        )
        total_timesteps, callback = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        callback.on_training_start(locals(), globals())
        if run is not None:
            resume.restore_generators(self, run)
        try:
            self._iterate(total_timesteps, callback, log_interval)
            callback.on_training_end()
        finally:
            self._between_rollouts = False
        return self

    def _iterate(self, total_timesteps: int, callback: BaseCallback, log_interval: int) -> None:
        """Alternate rollouts and updates until ``total_timesteps``, or until a callback stops training."""
        assert self.env is not None
        self._between_rollouts = True
        while self.num_timesteps < total_timesteps:
            if not self.collect_rollouts(self.env, callback, self.rollout_buffer, self.n_steps):
                break
            self.iterations += 1
            self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
            if self.iterations % log_interval == 0:
                self.dump_logs(self.iterations)
            self.train()
            self._between_rollouts = True

    @property
    def resumable(self) -> bool:
        """True if a `snapshot` allows exact resumption, which is the case between two rollouts of PPO."""
        return self._between_rollouts and isinstance(self._algorithm, PPOTraining)

    def snapshot(self) -> Archive:
        """Return a copy of what `save` writes and of the state that `learn` needs to resume.

        Used by `rlxf.training.CheckpointWriter`.
        """
        archive = checkpoint.build_archive(self)
        documents, tensors = resume.resume_state(self)
        return Archive(archive.documents | documents, clone_tensors(archive.tensors | tensors))

    def load_training_state(self, path: str | os.PathLike[str]) -> Self:
        """Restore the state in a file of `rlxf.training.CheckpointWriter`, without further training.

        Weights, optimizer, progress, statistics of ``VecNormalize``, pending log values, and the global
        random number generators of torch, numpy and Python are restored. The environments are not changed: to
        continue their episodes, call `learn` with ``resume_from``.

        Args:
            path: path of the file, or of the folder of checkpoints.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        archive = resume.read_matching_run(self, path)
        resume.restore(self, archive)
        resume.restore_generators(self, archive)
        return self

    def distill(
        self,
        teacher: "GTrXLPPO",
        total_timesteps: int,
        distillation: Distillation | None = None,
        actor: Actor = "student",
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GTrXLPPO_distilled",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Distill a teacher, usually a larger agent, into this agent, in this agent's environments.

        This works like `learn` with the loss of `Distillation` in place of PPO's policy loss. Values are
        trained with the returns of the acting agent. Rollouts, segments, ``n_epochs``, minibatches and
        learning rate are those of the student. The environments are reset, and the teacher processes each
        step with its own memory. It gets the student's observations, so these must be normalized as in the
        teacher's training.

        Args:
            teacher: the agent to imitate; it is not changed. Its sizes, techniques and memory may differ.
            total_timesteps: steps to train for, over all environments.
            distillation: the distillation loss; None for ``Distillation()``.
            actor: the agent that acts, "student" or "teacher". If the student acts, it learns to correct its
                own mistakes. If it is too weak to make progress, let the teacher act first.
            callback: callback or callbacks, as in SB3.
            log_interval: rollouts between two log lines.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step counter and the schedules; False to continue them.
            progress_bar: show a progress bar.

        Raises:
            ValueError: if spaces or device of the teacher differ, the teacher has a datastore, or
                actor is unknown.
        """
        self.ranks.check_single_process("distill")
        self._algorithm = DistillationTraining(self, teacher, distillation or Distillation(), actor)
        self._last_obs = None  # makes SB3 reset the environments
        try:
            return self.learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self._algorithm = PPOTraining()

    def attach_datastore(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """Use trajectories as a datastore for retrieval in `predict`, without training.

        For each step of the trajectories, the datastore holds the transformer's output, which is the input of
        the action head, and the action taken. An earlier datastore is replaced. For every action, `predict`
        searches the nearest stored outputs and mixes their actions with the agent's own. Outputs depend on
        observations and actions, not on rewards, so the trajectories should show good behavior.

        Each episode is encoded once, with memory as while acting. Observations are normalized with the
        current statistics of the ``VecNormalize`` around the agent's environment, if there is one. N steps
        need ``4 N (C + A) + 8 N`` bytes, with C the width of the core and A the size of an action. The
        datastore is saved with the agent. If ``head`` is a `SPALM`, its gate is trained here on these steps,
        with neighbours from other episodes. Box actions are clipped to their bounds before they are mixed.

        An agent with a datastore cannot be trained, since its stored outputs would become stale. Call
        `detach_datastore`, train, and call `attach_datastore` again.

        Args:
            dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`, with the spaces
                of the agent.
            head: `KNNLM` or `SPALM`; None for ``KNNLM()``.
            download: whether to download a dataset that is not on this machine.
            progress_bar: show a progress bar.

        Raises:
            DatasetError: if the dataset is unknown, empty, damaged, or has other spaces.
            ValueError: if head needs more neighbours than there are steps, or, with a gate, than there are
                steps in other episodes; or if the core has early exits, since stored outputs must come from
                the same depth.
            ImportError: if head needs faiss, which is not installed.
        """
        self.core.depth.check_no_early_exit("attach_datastore")
        data = as_trajectories(dataset, download)
        self.policy.retrieval = build_retrieval_policy(
            self, data, KNNLM() if head is None else head, progress_bar
        )
        return self

    def detach_datastore(self) -> Self:
        """Remove the datastore of `attach_datastore`."""
        self.policy.retrieval = None
        return self

    @property
    def datastore(self) -> ActionDatastore | None:
        """Datastore of `attach_datastore`; None if there is none."""
        return None if self.policy.retrieval is None else self.policy.retrieval.datastore

    def calibrate(
        self,
        env: str | Env[Any, Any] | VecEnv | VectorEnv[Any, Any, Any],
        alpha: float = 0.05,
        delta: float = 0.05,
        thresholds: Sequence[float] = THRESHOLDS,
        episodes: int = 100,
        seed: int | None = None,
    ) -> Calibration:
        """Calibrate and set the exit threshold of `predict`, for a core with depth `CALM`.

        The risk is the expected share of an episode's steps whose most likely early-exit action differs from
        the full-depth action. It is at most ``alpha``, with probability at least ``1 - delta`` over the
        sampled episodes. The expectation is over episodes that the agent plays at full depth, with equal
        weight for short and long episodes. Box actions count as the same if they differ by at most half a
        standard deviation of the policy. The threshold is saved with the agent. It is valid only for the
        current weights: training resets it, with a warning.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            env: environment to act in, other than the training environment, or an id, whose environment is
                closed at the end. Observations are normalized as in training.
            alpha: bound on the risk, the expected share of steps with different actions.
            delta: probability with which the guarantee may fail.
            thresholds: confidence thresholds in falling order from 1 to 0, the safest first.
            episodes: minimum number of episodes, in equal shares of the environments.
            seed: seed of the environments and of torch's global generator, which samples the actions; None
                to leave them unchanged.

        Returns:
            The results of each threshold.

        Raises:
            ValueError: before the first step, if the core has another depth, memory persists across episodes,
                the environment has other spaces, thresholds do not decrease, or thresholds, alpha, delta or
                episodes are out of range.
            TypeError: if one of them is not a number.
        """
        check_independent_episodes(self)
        depth, candidates = calibratable_exit(self.policy.transformer), tuple(thresholds)
        check_thresholds(candidates)
        check_levels(alpha, delta)
        check_int("episodes", episodes)
        vec_env = self._wrap_env(as_training_env(env, self.n_envs, seed), verbose=0, monitor_wrapper=False)
        with closing(vec_env) if isinstance(env, str) else nullcontext():
            check_for_correct_spaces(vec_env, self.observation_space, self.action_space)
            if seed is not None:
                set_random_seed(seed)
                vec_env.seed(seed)
            self.policy.set_training_mode(False)
            normalization = None if unwrap_vec_normalize(vec_env) else self.get_vec_normalize_env()
            rehearsal = CalibrationRollout(self.policy, vec_env, candidates, normalization)
            calibration = calibrate_thresholds(rehearsal, episodes, alpha, delta)
        depth.threshold.fill_(calibration.threshold)
        return calibration

    def mean_predict_depth(self) -> float | None:
        """Return the mean number of passes per token in `predict` since the last call.

        The start of `evaluate` also resets the count.

        None if the core has no adaptive depth, or nothing was predicted. See `ACT`, `CALM`, `DepthAdaptive`.
        """
        depth = self.policy.transformer.acting_depth()
        return None if depth is None else depth.item()

    def save(  # type: ignore[override]
        self, path: str | os.PathLike[str], exclude: None = None, include: None = None
    ) -> None:
        """Write settings, weights, optimizer state, progress and datastore to a file, atomically.

        The file is a zip archive of JSON and safetensors with checksums. Loading it runs no code.

        Args:
            path: path of the file; ".zip" is added if it has no suffix.
            exclude, include: arguments of SB3 that must be None.

        Raises:
            ValueError: if exclude or include is not None.
            OSError: if the file cannot be written, e.g. the disk is full; an existing file is unchanged.
        """
        if exclude is not None or include is not None:
            raise ValueError("a checkpoint always holds the whole agent: leave out exclude and include")
        checkpoint.save(self, path)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        env: str | Env | VecEnv | VectorEnv | None = None,
        device: torch.device | str = "auto",
        policy: str | type[GTrXLPolicy] | None = None,
        sha256: str | None = None,
        **settings: Any,
    ) -> Self:
        """Load an agent from a file of `save`.

        Args:
            path: path of the file; ".zip" is added if it has no suffix.
            env: environment to train or evaluate in; None to only predict, until ``set_env`` is called.
            device: "auto", "cpu" or "cuda".
            policy: policy class; required if it is user-defined.
            sha256: required SHA-256 of the file in hexadecimal digits, from a source that you trust. It is
                compared before the file is parsed. None to skip this check.
            settings: constructor arguments that replace those in the file. SB3's ``custom_objects`` may hold
                them, too; ``print_system_info`` prints the versions on this machine. ``tensorboard_log`` is
                never loaded from the file.

        Raises:
            FileNotFoundError: if the file does not exist.
            CheckpointError: if the file is truncated, altered, of another type, or needs a user-defined
                object that is not passed.
            ValueError: if the environment's spaces differ from the checkpoint's, or the device does not
                exist.
            TypeError: if the constructor has no argument of this name.
        """
        check_device(device)
        settings = load_settings(settings)
        policy = settings.pop("policy", None) if policy is None else policy
        agent: Self = checkpoint.load_agent(cls, path, env, device, policy, settings, sha256)
        return agent


def _contiguous(x: Tensor) -> Tensor:
    """Copy x to row-major order; ``x.contiguous()`` does not change the strides of one-channel images."""
    return x.clone(memory_format=torch.contiguous_format)
