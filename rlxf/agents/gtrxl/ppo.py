"""Proximal policy optimisation of a Gated Transformer-XL."""

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

from rlxf.agents.arguments import explain_unknown, load_settings
from rlxf.agents.calibration import (
    THRESHOLDS,
    Calibration,
    check_thresholds,
    confidence_of,
    forget_calibration,
)
from rlxf.agents.devices import check_device
from rlxf.agents.distillation import Distillation
from rlxf.agents.finite import naming
from rlxf.agents.gtrxl import checkpoint, loading, resuming
from rlxf.agents.gtrxl.acting import Acting, without
from rlxf.agents.gtrxl.alarms import Alarms
from rlxf.agents.gtrxl.calibrating import Rehearsal, calibrated, check_independent
from rlxf.agents.gtrxl.core import check_endless, check_episode_length, resolve_core
from rlxf.agents.gtrxl.distillation import Actor, Teaching
from rlxf.agents.gtrxl.ended import Ended
from rlxf.agents.gtrxl.hyperparameters import record_hyperparameters
from rlxf.agents.gtrxl.lessons import Lesson, Rewards
from rlxf.agents.gtrxl.past import Past, steps_that_count
from rlxf.agents.gtrxl.policy import POLICIES, SB3_POLICIES, GTrXLPolicy
from rlxf.agents.gtrxl.remembering import remembered
from rlxf.agents.gtrxl.rollout import SegmentBuffer
from rlxf.agents.gtrxl.sb3_arguments import SB3_ARGUMENTS
from rlxf.agents.gtrxl.settings import (
    as_training_env,
    check_coefficients,
    check_has_env,
    check_policy,
    check_schedule,
    check_sizes,
    check_value_clipping,
    check_whole_blocks,
    default_batch_size,
    default_n_steps,
    policy_named,
    stack_observations,
    warn_of_filler_rows,
    warn_of_flattened_images,
)
from rlxf.agents.gtrxl.update import Objective
from rlxf.agents.guards import check_first, check_step, normalizes_observations, unspoiled
from rlxf.agents.handover import hand_over
from rlxf.agents.learn_then_test import check_levels
from rlxf.agents.memory import Memory
from rlxf.agents.remembering import check_depth, check_forgotten
from rlxf.agents.together import agreed_statistics, begin_together
from rlxf.attention import KNNLM, Index, State, TransformerSpec
from rlxf.attention.checks import check_whole
from rlxf.attention.heads.base import OutputHead
from rlxf.envs.finite import check_finite
from rlxf.envs.infos import LOST
from rlxf.envs.trajectories import Trajectories, as_trajectories
from rlxf.envs.trajectories.source import Dataset
from rlxf.envs.watched_processes import watch_processes
from rlxf.envs.workers import trouble
from rlxf.training import Archive
from rlxf.training.checkpoints import copied
from rlxf.training.joining import here

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.window_learner import WindowLearner

LEARNING_RATE = LinearSchedule(1e-3, 0.0, 1.0)
ENTROPY_COEFFICIENT = LinearSchedule(0.03, 0.0, 1.0)


class GTrXLPPO(OnPolicyAlgorithm):
    """A gated transformer with memory, trained online with PPO.

    SB3's `OnPolicyAlgorithm`: callbacks, logger, schedules, ``VecNormalize`` and evaluation work as
    they do there. Rollout, buffer and training loop are made for memory. The inputs of each layer
    are stored once a step. The rollout is cut into segments; each is learned from with the M steps
    before it as memory, without gradient, and with full gradient inside the segment.

    On CPU, numbers below 1e-38 slow training fourfold within minutes. The constructor has torch
    flush them to 0 (``torch.set_flush_denormal``), for the whole process.

    Sources: Schulman et al. 2017, arXiv:1707.06347; Parisotto et al. 2020, arXiv:1910.06764.

    Args:
        policy: "MlpGTrXLPolicy", "CnnGTrXLPolicy", "MultiInputGTrXLPolicy" or a class. The names of ``PPO``
            and ``RecurrentPPO``, "MlpPolicy" or "MlpLstmPolicy" and so on, stand for these.
        env: a Gymnasium id, an environment, an SB3 ``VecEnv`` or a Gymnasium ``VectorEnv``.
        learning_rate: Adam's; a number or a schedule of the progress remaining, from 1 to 0.
            Falling linearly to 0, so that a solved task stays solved.
        n_steps: steps of each environment between updates; a multiple of ``segment_length``. None: as many as
            make a rollout of at least 2048 steps over all environments, SB3's rollout, and at least one
            segment: 64 with 32 environments, 2048 with one.
        batch_size: steps in a minibatch; a multiple of ``segment_length``. None: 256, or the next multiple.
        n_epochs: passes over a rollout. 6 passes over minibatches of 256 steps are 48 steps of the optimizer
            for each rollout: with a quarter of them, Acrobot is not learned within 100,000 steps.
        gamma: discount.
        gae_lambda: lambda of generalised advantages, by which the policy learns.
        clip_range: epsilon of the clipped objective; a number or a schedule.
        clip_range_vf: largest change of a value in one update, a number or a schedule; None for no bound. In
            units of the standard deviation of recent returns, so it does not depend on the scale of the
            rewards, as it does in SB3.
        normalize_advantage: subtract the mean of a rollout's advantages and divide by their deviation. False:
            the policy's loss grows with the scale of the rewards.
        ent_coef: weight of the entropy; a number or a schedule.
        vf_coef: weight of the value loss, which is measured in units of the variance of recent returns. The
            value head is normalized in the same way (`PopArtHead`), so the critic learns returns of -1000 as
            fast as returns of 1, and rewards need no scaling.
        max_grad_norm: largest norm of the gradient.
        segment_length: steps T through which gradients flow.
        memory_length: steps M that are remembered from before a segment. None: the core's, or 128.
        critic_lambda: lambda of the returns that the values learn; None for ``gae_lambda``. At 1 they
            are sums of what was paid, up to the end of the rollout: in episodes of hundreds of steps
            values are right after few updates, where 0.95 lets them creep back 20 steps in each.
            (Yuan et al. 2025, arXiv:2503.01491, "decoupled GAE".)
        target_kl: end an update once the policy has moved 1.5 times as far; None for no bound.
        advantage_epsilon: share of the standard deviation of recent returns that is added to that of the
            advantages, by which they are divided. It keeps noise small when little is left to learn.
        previous_action: let the action before be part of each step's input.
        across_episodes: what is remembered outlasts the end of an episode: a step sees the M steps before
            it of its environment, whichever episodes they are from, and positions go on counting. For
            tasks that stay as they are for many episodes, to be found out in the first of them (Duan et
            al. 2016, arXiv:1611.02779). Returns still end with each episode. Memory begins anew where
            `learn` resets the environments.
        refresh: think of what is remembered anew after each update, with the new weights: from the
            observations of the last ``L M`` steps, L the layers. Without, hidden states of earlier
            rollouts stay as the weights of their day made them. The memory is then what reading the
            episode anew would give. It costs one more pass over ``L M`` steps of each environment, forward
            alone, in each rollout, less where episodes began later: at the default sizes a quarter of the
            time of a rollout and its update. And it keeps the observations of as many steps; more with
            `KNN` memory.
        reconstruction_coef: weight of the observation reconstruction loss; 0 for none.
        n_envs: environments to make when ``env`` is an id; those of all processes under torchrun.
        core: the transformer; None for `gtrxl`. What cannot act as it learns is refused.
        stats_window_size: episodes that the logged means cover.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        policy_kwargs: more arguments of the policy.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: of weights, actions, order of minibatches and environments; None for any.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: if a size or a name does not fit; the message names it and an allowed value. Also if the
            device does not exist: SB3 would use the CPU instead of a missing GPU.
        TypeError: if a space is not supported, or for other arguments. For those of SB3's PPO and
            RecurrentPPO the message names the alternative.

    Warns:
        UserWarning: if images are flattened, since "MlpGTrXLPolicy" reads them.
    """

    normalized_observations: bool
    """True if training observations came from a ``VecNormalize``; saved with the agent."""
    _warned_of_filler = False
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES | SB3_POLICIES
    policy: GTrXLPolicy  # type: ignore[assignment]

    @explain_unknown(SB3_ARGUMENTS)
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
        across_episodes: bool = False,
        refresh: bool = False,
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
            raise ValueError("env is None: give a Gymnasium id, an environment, a VecEnv or a VectorEnv")
        self.core = resolve_core(core, memory_length)
        self.across_episodes, self.refresh = across_episodes, refresh
        if across_episodes:
            check_endless(self.core)
        self.segment_length, self.batch_size, self.n_epochs = segment_length, batch_size, n_epochs
        self.clip_range, self.target_kl = clip_range, target_kl
        self.clip_range_vf, self.normalize_advantage = clip_range_vf, normalize_advantage
        self.advantage_epsilon, self.reconstruction_coef = advantage_epsilon, reconstruction_coef
        self.critic_lambda, self.previous_action = critic_lambda, previous_action
        torch.set_flush_denormal(True)
        self.ranks = here()
        training_env = as_training_env(env, n_envs, seed)
        super().__init__(
            policy,  # type: ignore[arg-type]  # SB3 asks for its own actor-critic here
            training_env,
            learning_rate=learning_rate,
            n_steps=n_steps or default_n_steps(training_env, n_envs, segment_length),
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,  # type: ignore[arg-type]  # a schedule is welcome here
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
        """Raise ValueError if episodes of ``env`` may be longer than the core has positions."""
        check_episode_length(self.core, env)

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        return policy_named(policy_name)

    def set_env(self, env: str | Env | VecEnv | VectorEnv, force_reset: bool = True) -> None:
        """Train on another environment of the same spaces and number; anything the constructor takes."""
        super().set_env(as_training_env(env, self.n_envs, self.seed), force_reset)

    def set_parameters(
        self,
        load_path_or_dict: str | os.PathLike[str] | dict[str, Any],
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Put in the weights of SB3's ``get_parameters``, or of a file that `save` wrote.

        Raises:
            CheckpointError: if it is no such file. SB3's own files hold pickles and are not opened.
            ValueError: if the agent remembers trajectories.
        """
        check_forgotten(self.memory)
        if not isinstance(load_path_or_dict, dict):
            load_path_or_dict = checkpoint.parameters(self, checkpoint.read(load_path_or_dict))
        super().set_parameters(load_path_or_dict, exact_match, device)

    def take_weights(self, source: "GTrXLPPO | WindowLearner") -> Self:
        """Begin with the transformer of another agent or of a pre-training; call it before `learn`.

        What makes observations tokens, and the heads, stay as they are: here a step is one token, and three
        elsewhere.

        Raises:
            TypeError: if ``source`` has no transformer.
            ValueError: if the weights do not fit: the first difference is named, nothing is changed. Cores
                must be equal but for causal, memory, pattern and dropout. Also if the agent remembers.
        """
        check_forgotten(self.memory)
        hand_over(source, self.policy)
        forget_calibration(self.policy.transformer)
        return self

    def set_random_seed(self, seed: int | None = None) -> None:
        """SB3's; the environments of all processes are seeded in a row, those of this one with its part."""
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
            UserWarning: also once, if the agent remembers across episodes and an observation of its own
                environments holds filler rows (NEXT_STEP): they are taken for steps.
        """
        if self.across_episodes and not self._warned_of_filler and self.env is not None:
            self._warned_of_filler = warn_of_filler_rows(self.env, observation)
        return self.policy.predict(observation, state, episode_start, deterministic)

    @property
    def all_envs(self) -> int:
        """Environments of all processes; ``n_envs`` are those of this one."""
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
            across_episodes=self.across_episodes,
            reconstruct=self.reconstruction_coef > 0,
            **self.policy_kwargs,
        ).to(self.device)
        self._lesson: Lesson = Rewards()
        self._alarms, self._ended = Alarms(self.action_space), Ended()
        self._resting, self.iterations = False, 0
        self.normalized_observations = False

    @cached_property
    def rollout_buffer(self) -> SegmentBuffer:  # type: ignore[override]
        """What a rollout leaves behind, made when it is first asked for: who only acts needs none."""
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

    def _begin_anew(self) -> None:
        """Remember nothing: environments are reset, and no filler row is due."""
        self.rollout_buffer.forget()
        self._past = Past.before(self.rollout_buffer)
        self._acting = self.policy.begin(self.n_envs)
        self._filler = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: SegmentBuffer, n_rollout_steps: int
    ) -> bool:
        """Act for ``n_rollout_steps`` steps of every environment; False if a callback says stop."""
        self.policy.set_training_mode(False)
        self._acting.cache = self.policy.remember(self._begin(rollout_buffer))
        self._lesson.begin()
        callback.on_rollout_start()
        self.ranks.agree_generators()
        self._resting = False
        with unspoiled(env):
            for _ in range(n_rollout_steps):
                if not self._act(env, callback, rollout_buffer):
                    return False
        next_values = self._values_ahead(self._acting.copy(), self._last_obs)
        critic_lambda = self.gae_lambda if self.critic_lambda is None else self.critic_lambda
        rollout_buffer.finish(next_values, self.gamma, self.gae_lambda, critic_lambda)
        self._ended.tell(self.ranks, super()._update_info_buffer)
        for name, value in trouble(env).items():
            told = self.ranks.gathered(torch.tensor([value], device=self.device))
            self.logger.record(f"env/{name}", int(told.sum()))
        callback.on_rollout_end()
        return True

    def _begin(self, buffer: SegmentBuffer) -> State:
        """Start a rollout; what is remembered, thought of anew if that is asked for."""
        if not self.refresh:
            return buffer.begin()
        self._past = self.past
        buffer.begin()
        state = self._past.read(self.policy, self.segment_length)
        buffer.replace_memory(state)
        return state

    @property
    def past(self) -> Past:
        """The last steps, those of the rollout at hand too; none unless they are read anew (`refresh`)."""
        if not self.refresh:
            return self._past
        return self._past.followed_by(self.rollout_buffer, steps_that_count(self.core))

    def _act(self, env: VecEnv, callback: BaseCallback, rollout_buffer: SegmentBuffer) -> bool:
        """One step of every environment; False if a callback says stop."""
        obs = self._as_tensor(self._last_obs)
        index = self._next_index()
        previous = self._acting.action
        with torch.inference_mode():
            latent, hidden = self.policy.act(obs, self._acting, index)
            distribution, values = self.policy.heads(self.ranks.among_all(latent))
            actions = self._lesson.choose(obs, index, distribution)
            log_probs = distribution.log_prob(actions)
            actions, values, log_probs = map(self.ranks.own, (actions, values, log_probs))
            self._acting.took(self.policy.encode_actions(actions), index)
        new_obs, rewards, dones, infos = env.step(self.policy.to_environment(actions))
        self.num_timesteps += self.all_envs
        check_step(env, new_obs, rewards, self._env_steps, self._env_numbers, dones=dones)
        callback.update_locals(locals())
        goes_on = callback.on_step()  # if not, the step counts all the same: another `learn` may follow
        self._update_info_buffer(infos, dones)
        paid = self._paid(rewards, dones, infos)
        ends = torch.as_tensor(dones, dtype=torch.bool, device=self.device) | self._filler
        lost = np.array([LOST in info for info in infos])
        if lost.any():
            paid, ends, index = self._broken_off(lost, values, paid, ends, index)
        rollout_buffer.add(obs, previous, actions, paid, ends, values, log_probs, hidden, index)
        self._last_obs = new_obs  # type: ignore[assignment]
        self._last_episode_starts = ends.cpu().numpy()
        self._filler = self._marked(infos, dones | lost, "filler_next")
        return goes_on

    def _broken_off(
        self, lost: np.ndarray, values: Tensor, paid: Tensor, ends: Tensor, index: Index
    ) -> tuple[Tensor, Tensor, Index]:
        """Rewards, ends and index where environments broke, those of ``lost`` (E,); their memory begins anew.

        Nobody knows what came of the first lost step. V(s) in place of its reward makes its advantage 0, and
        is what the step before looks ahead to, as at a truncation.
        """
        rows = torch.as_tensor(lost, device=self.device)
        broken = rows & ~self._filler
        self._acting.begin_anew(rows)
        return torch.where(broken, values, paid), ends | broken, without(index, broken)

    def _next_index(self) -> Index:
        """Where the coming step stands, (E, 1): nowhere for a filler row; behind it begins an episode."""
        start = torch.as_tensor(self._last_episode_starts, dtype=torch.bool, device=self.device)
        return without(self._acting.advance(start & ~self._filler), self._filler)

    def _paid(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> Tensor:
        """(E,): rewards; of a cut episode, plus gamma V(last observation), read with its own memory."""
        paid = torch.as_tensor(rewards, dtype=torch.float32, device=self.device)
        cut = self._marked(infos, dones, "TimeLimit.truncated").nonzero()[:, 0]
        if not len(cut):
            return paid
        last = stack_observations([infos[row]["terminal_observation"] for row in cut.tolist()])
        numbers = [self._env_numbers[row] for row in cut.tolist()]
        check_finite("last observation", last, self._env_steps, numbers)
        return paid.index_add(0, cut, self.gamma * self._values_ahead(self._acting.rows(cut), last))

    @property
    def _env_steps(self) -> int:
        """Steps that each environment has taken."""
        return self.num_timesteps // self.all_envs

    @property
    def _env_numbers(self) -> range:
        """Of this process's environments among those of all."""
        return self.ranks.numbers(self.n_envs)

    def _values_ahead(self, acting: Acting, obs: Any) -> Tensor:
        """(E,): V(obs) as the next step of ``acting``, which is used up."""
        index = acting.advance(torch.zeros_like(acting.episode, dtype=torch.bool))
        latent, _ = self.policy.act(self._as_tensor(obs), acting, index)
        return self.policy.heads(latent)[1]

    def _marked(self, infos: list[dict[str, Any]], rows: np.ndarray, key: str) -> Tensor:
        """(E,) bool: which of the environments of ``rows`` (E,) bool say ``key`` in their info."""
        marked = np.zeros(len(infos), dtype=np.bool_)
        for row in np.flatnonzero(rows):
            marked[row] = infos[row].get(key, False)
        return torch.as_tensor(marked, device=self.device)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        """SB3's; what the environments begin with is checked too, hyper-parameters are logged."""
        check_forgotten(self.memory)
        if self.across_episodes and self.env is not None:
            check_whole_blocks(self.core, self.env)
        if self.env is not None:
            self.check_env(self.env)
        agreed_statistics(self.env, self.ranks)
        self.normalized_observations = normalizes_observations(self.env, self.normalized_observations)
        watch_processes(self.env)
        before = self._last_obs
        with unspoiled(self.env):
            ready = super()._setup_learn(*args, **kwargs)
            assert self._last_obs is not None
            check_first(self.env, self._last_obs, self._env_steps, self._env_numbers)
        record_hyperparameters(self)
        self._alarms = Alarms(self.action_space)
        if self._last_obs is not before:
            self._begin_anew()
        return ready

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        """SB3's; what ended in one of several processes is told to all of them behind the rollout."""
        if self.ranks.count == 1 or dones is None:
            super()._update_info_buffer(infos, dones)
        else:
            self._ended.note(infos, dones)

    def _as_tensor(self, obs: Any) -> PyTorchObs:
        """Observations on the device, laid out as in the buffer: rounding depends on the layout of images."""
        there = obs_as_tensor(obs, self.device)
        if isinstance(there, dict):
            return {key: _laid_out(part) for key, part in there.items()}
        return _laid_out(there)

    def train(self) -> None:
        """Learn from the rollout, as a rule by PPO: ``n_epochs`` passes over its segments.

        Raises:
            NumericalError: before the optimiser's step, if returns, a loss or a gradient are NaN or infinite.
        """
        if not self.ranks.gathered(self.rollout_buffer.weight).any():
            return  # all steps were lost to environments that broke
        forget_calibration(self.policy.transformer)
        buffer = self.rollout_buffer
        with naming(f"the update behind step {self.num_timesteps}"), self.ranks.own_draws(self.order):
            buffer.check_finite(self._env_numbers)
            self.policy.set_training_mode(True)
            self._update_learning_rate(self.policy.optimizer)
            self.policy.value_net.update(self._real(buffer.returns))
            noted = self._lesson.learn(self)
        self._log_update(noted)
        self._alarms.look(self, noted)

    def _real(self, x: Tensor) -> Tensor:
        """The numbers x (E, steps) of the real steps of a rollout of all processes, (N,)."""
        weight = self.ranks.gathered(self.rollout_buffer.weight)
        return self.ranks.gathered(x)[weight == 1]

    def objective(self) -> Objective:
        """Return the current PPO objective, given the schedules and the scale of recent returns."""
        progress = self._current_progress_remaining
        deviation, bound = float(self.policy.value_net.deviation), self.clip_range_vf_schedule
        return Objective(
            clip_range=self.clip_range_schedule(progress),
            clip_range_vf=None if bound is None else bound(progress) * deviation,
            ent_coef=self.ent_coef_schedule(progress),
            vf_coef=self.vf_coef / deviation**2,
            reconstruction_coef=self.reconstruction_coef,
        )

    def _log_update(self, noted: dict[str, float]) -> None:
        buffer, record = self.rollout_buffer, self.logger.record
        for name, value in noted.items():
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
            callback: SB3's.
            log_interval: rollouts from one line of the log to the next.
            tb_log_name: of the run in TensorBoard.
            reset_num_timesteps: begin counting and schedules anew; False to go on with them.
            progress_bar: show one.
            resume_from: a file of `rlxf.training.Checkpoints`, or their folder, of which the newest whole one
                is taken. It goes on from there, amid the episodes, to ``total_timesteps`` in all, and on one
                machine ends with the same bits as if it had never been cut off. The agent must be built with
                the same arguments, in the same environments. These are `Replayable` or `Resumable`, as those
                of `rlxf.envs.make_vec_env` are; others begin fresh episodes, and a warning says so. Sets the
                global generators of torch, numpy and Python.

        Raises:
            ValueError: before the first step, if the agent was loaded without an environment, a schedule is
                lost (`LostSchedule`) or ends below 0, the agent remembers trajectories, filler rows would
                break the blocks of its memory, or it is not built as that of the file to resume from.
            FileNotFoundError: if there is no such file.
            CheckpointError: if it is truncated, altered or foreign, or was not written amid a training.
            FaultyEnvironmentError: amid the training, if an environment gave NaN or infinity, or broke too
                often (`BrokenEnvironmentError`).
            NumericalError: amid the training, if a loss or a gradient is NaN or infinite; the weights are
                those before that step of the optimiser.
        """
        check_has_env(self.env)
        for name in checkpoint.SCHEDULES:
            if getattr(self, name) is not None:
                check_schedule(name, getattr(self, name), progress=0.0)
        run = None if resume_from is None else resuming.read_run(self, resume_from, total_timesteps)
        self.iterations = 0 if reset_num_timesteps else self.iterations
        if run is not None:
            resuming.take_up(self, run)
            total_timesteps, reset_num_timesteps = total_timesteps - self.num_timesteps, False
        begin_together(self, n_envs=self.n_envs)
        total_timesteps, callback = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        callback.on_training_start(locals(), globals())
        if run is not None:
            resuming.go_on(self, run)
        try:
            self._iterate(total_timesteps, callback, log_interval)
            callback.on_training_end()
        finally:
            self._resting = False
        return self

    def _iterate(self, total_timesteps: int, callback: BaseCallback, log_interval: int) -> None:
        """Rollouts and updates by turns, until there are so many steps or a callback says stop."""
        assert self.env is not None
        self._resting = True
        while self.num_timesteps < total_timesteps:
            if not self.collect_rollouts(self.env, callback, self.rollout_buffer, self.n_steps):
                break
            self.iterations += 1
            self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
            if self.iterations % log_interval == 0:
                self.dump_logs(self.iterations)
            self.train()
            self._resting = True

    @property
    def at_rest(self) -> bool:
        """Whether `snapshot` holds all that is needed to go on to the same bits: between two rollouts."""
        return self._resting and isinstance(self._lesson, Rewards)

    def snapshot(self) -> Archive:
        """What `save` would write now, and all that `learn` needs to go on; later steps do not change it.

        For `rlxf.training.Checkpoints`.
        """
        archive = checkpoint.contents(self)
        documents, tensors = resuming.resumption(self)
        return Archive(archive.documents | documents, copied(archive.tensors | tensors))

    def load_training_state(self, path: str | os.PathLike[str]) -> Self:
        """Restore the state that a file of `rlxf.training.Checkpoints` holds, without further training.

        Weights, optimizer, progress, statistics of ``VecNormalize``, values that wait for the log, and the
        global generators of torch, numpy and Python are as they were. The environments are left alone:
        to continue their episodes, call `learn` with ``resume_from``.

        Args:
            path: of the file, or of their folder.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        archive = resuming.read_alike(self, path)
        resuming.restore(self, archive)
        resuming.go_on(self, archive)
        return self

    def learn_from(
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
        """Learn to do what a teacher would do, as a rule a larger agent, in this agent's environments.

        As `learn`, but the loss: that of `Distillation` in place of PPO's. Values learn beside it, from the
        returns of whoever acts. Rollouts, segments, ``n_epochs``, minibatches and learning rate are
        the student's. The teacher goes along step by step with a memory of its own, in episodes that begin
        anew; it sees what the student sees, so observations must be normalised as it knows them.

        Args:
            teacher: stays as it is. Sizes, techniques and memory may be others.
            total_timesteps: steps to learn from, over all environments.
            distillation: what is minimised; None for ``Distillation()``.
            actor: who plays, "student" or "teacher". A student that plays meets its own mistakes, and learns
                what to do about them; where it is too poor to get anywhere, let the teacher play first.
            callback: SB3's.
            log_interval: rollouts from one line of the log to the next.
            tb_log_name: of the run in TensorBoard.
            reset_num_timesteps: begin counting and schedules anew; False to go on with them.
            progress_bar: show one.

        Raises:
            ValueError: if spaces or device of the teacher are others, it remembers trajectories, or there is
                no such actor.
        """
        self.ranks.check_alone("learn_from")
        self._lesson = Teaching(self, teacher, distillation or Distillation(), actor)
        self._last_obs = None  # so the environments are reset
        try:
            return self.learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self._lesson = Rewards()

    def remember(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """From now on also act by these trajectories, without learning from them; they replace earlier ones.

        Each step of them is stored: what the policy's head reads there, the transformer's output after the
        episode up to this step, and the action that was taken. For every action that `predict` chooses the
        nearest of all are searched, and what was done there is mixed in. The output has seen observations and
        actions, no rewards: so what is remembered should be play that is worth repeating.

        The episodes are read once, as while acting, each by itself. Their observations are normalised by the
        ``VecNormalize`` around the agent's environment, if there is one, with its statistics of now. N steps
        take ``4 N (C + A) + 8 N`` bytes, C the width of the core and A the numbers of an action. They are
        saved with the agent. The gate of a `SPALM` is learned here, from the steps, each without its own
        episode.

        Box actions are mixed as the environment gets them, within its bounds.

        An agent that remembers does not learn: its outputs would not be those that are stored. `forget`,
        learn, and remember anew.

        Args:
            dataset: a Minari id, a ``MinariDataset``, several of these joined, or `Trajectories`; of the
                agent's spaces.
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
        self.policy.remembering = remembered(self, data, KNNLM() if head is None else head, progress_bar)
        return self

    def forget(self) -> Self:
        """Act without what was remembered."""
        self.policy.remembering = None
        return self

    @property
    def memory(self) -> Memory | None:
        """Logged actions that it acts by, too; None for none."""
        return None if self.policy.remembering is None else self.policy.remembering.memory

    def calibrate(
        self,
        env: str | Env[Any, Any] | VecEnv | VectorEnv[Any, Any, Any],
        alpha: float = 0.05,
        delta: float = 0.05,
        thresholds: Sequence[float] = THRESHOLDS,
        episodes: int = 100,
        seed: int | None = None,
    ) -> Calibration:
        """Find how early `predict` may leave, and leave as early from now on. For a core of depth `CALM`.

        The promise: with probability ``1 - delta`` over the draw of the episodes, the likeliest action is
        another one than with all passes in a share of at most ``alpha`` of an episode's steps, on average
        over episodes like these, as the agent plays them with all passes: a short one counts as much as a
        long one. Box actions count as the same if they differ by no more than half a deviation of the policy.
        The threshold is saved with the agent. Learning takes it back, with a warning: it holds for the
        weights of now.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            env: to play in, or the id of one, which is closed at the end; not the one that the agent learns
                in. Observations are normalised as in training.
            alpha: promised risk: such a share, on average over episodes.
            delta: probability with which the promise may be broken.
            thresholds: of confidence, from 1 down to 0, the safest first.
            episodes: at least, in equal shares of the environments.
            seed: of the environments, and of torch's global generator, which draws the actions; None for
                whatever they are.

        Returns:
            What came of each threshold.

        Raises:
            ValueError: before anything is played, if the core has another depth, episodes remember others
                (``across_episodes``), the environment has other spaces, thresholds do not fall, or one of
                them, alpha, delta or episodes is out of range.
            TypeError: if one is no number.
        """
        check_independent(self)
        depth, falling = confidence_of(self.policy.transformer), tuple(thresholds)
        check_thresholds(falling)
        check_levels(alpha, delta)
        check_whole("episodes", episodes)
        vec_env = self._wrap_env(as_training_env(env, self.n_envs, seed), verbose=0, monitor_wrapper=False)
        with closing(vec_env) if isinstance(env, str) else nullcontext():
            check_for_correct_spaces(vec_env, self.observation_space, self.action_space)
            if seed is not None:
                set_random_seed(seed)
                vec_env.seed(seed)
            self.policy.set_training_mode(False)
            normalization = None if unwrap_vec_normalize(vec_env) else self.get_vec_normalize_env()
            rehearsal = Rehearsal(self.policy, vec_env, falling, normalization)
            found = calibrated(rehearsal, episodes, alpha, delta)
        depth.threshold.fill_(found.threshold)
        return found

    def acting_depth(self) -> float | None:
        """Passes that `predict` took on average for a token, since last asked or since `evaluate` began.

        None if all take all, or if nothing was predicted. See `ACT`, `CALM` and `DepthAdaptive`.
        """
        depth = self.policy.transformer.acting_depth()
        return None if depth is None else depth.item()

    def save(  # type: ignore[override]
        self, path: str | os.PathLike[str], exclude: None = None, include: None = None
    ) -> None:
        """Write settings, weights, optimiser and progress to one file, whole or not at all.

        Trajectories that the agent remembers (`remember`) are in it, too.

        The file is a zip of JSON and safetensors with a checksum of each: safe to open.

        Args:
            path: of the file; ".zip" is added if it has no suffix.
            exclude, include: SB3's; leave them out, a file always holds the same.

        Raises:
            OSError: if it cannot be written, e.g. the disk is full; what was there before stays.
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
        """The agent that `save` wrote.

        Args:
            path: of the file; ".zip" is added if it has no suffix.
            env: to train on or to evaluate in; None to predict only, until ``set_env``.
            device: "auto", "cpu" or "cuda".
            policy: the policy's class, needed if it was your own.
            sha256: SHA-256 that the file must have, in hexadecimal digits, from a source that you trust. It
                is compared before anything is parsed. None to take any file.
            settings: arguments of the constructor that shall differ from the file's. SB3's ``custom_objects``
                may hold them, too; ``print_system_info`` prints the versions of this machine.
                ``tensorboard_log`` is never taken from the file.

        Raises:
            FileNotFoundError: if there is no such file.
            CheckpointError: if it is truncated, altered, foreign, or lacks an object of your own.
            ValueError: if the environment's spaces differ from the checkpoint's, or there is no such device.
            TypeError: if the constructor has no such argument.
        """
        check_device(device)
        settings = load_settings(settings)
        policy = settings.pop("policy", None) if policy is None else policy
        agent: Self = loading.loaded(cls, path, env, device, policy, settings, sha256)
        return agent


def _laid_out(x: Tensor) -> Tensor:
    """In the order of its axes; ``contiguous`` leaves images of one channel as they are."""
    return x.clone(memory_format=torch.contiguous_format)
