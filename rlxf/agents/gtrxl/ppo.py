"""Proximal policy optimization (PPO) with a Gated Transformer-XL."""

from typing import Any, Self

import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from stable_baselines3.common.type_aliases import MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule, explained_variance, get_device
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.arguments import (
    as_log_interval,
    check_device,
    reject_unknown_arguments,
)
from rlxf.agents.common.calibration import reset_calibration
from rlxf.agents.common.captured_function import supports_graphs
from rlxf.agents.common.environment_checks import check_teacher_normalization
from rlxf.agents.common.episode_statistics import EpisodeStatistics
from rlxf.agents.common.losses import Distillation, check_distillation
from rlxf.agents.common.numerics import check_parameters, numerical_error_context
from rlxf.agents.common.precision import Precision, check_precision
from rlxf.agents.common.training_env import as_training_env, warn_of_ignored_n_envs
from rlxf.agents.gtrxl.config import PPOConfig
from rlxf.agents.gtrxl.core import trained_core
from rlxf.agents.gtrxl.diagnostics import TrainingDiagnostics
from rlxf.agents.gtrxl.distillation import Actor, DistillationTraining
from rlxf.agents.gtrxl.losses import PPOLoss, normalize_advantages
from rlxf.agents.gtrxl.network_step import CompiledStep
from rlxf.agents.gtrxl.own_modules import check_own_modules
from rlxf.agents.gtrxl.policies import check_new_policy, check_policy, check_policy_kwargs
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.sb3_arguments import PPO_SB3_ARGUMENTS
from rlxf.agents.gtrxl.state_dependent_noise import check_sde
from rlxf.agents.gtrxl.training_algorithm import PPOTraining
from rlxf.agents.gtrxl.training_loop import TrainingLoop
from rlxf.attention import TransformerSpec
from rlxf.training.distributed import process_group
from rlxf.utils.checks import as_whole_number
from rlxf.utils.warnings import warn_user


class GTrXLPPO(TrainingLoop):
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
            segments that give a rollout of at least 2048 steps over all environments: 64 steps with 32
            environments, 2048 with one. (SB3's PPO takes 2048 steps in each environment.)
        batch_size: steps in a minibatch, over all environments and processes; a multiple of
            ``segment_length``. None: 256, or the next multiple.
        n_epochs: passes over a rollout. 6 passes with minibatches of 256 steps are 48 optimizer steps per
            rollout; with a quarter of them, Acrobot is not learned within 100,000 steps.
        gamma: discount factor.
        gae_lambda: lambda of the generalized advantage estimates that train the policy. With 0.95, the
            default of SB3, a part of the seeds does not learn Acrobot.
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
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        segment_length: steps T through which gradients flow.
        memory_length: steps M in memory before a segment. None: that of the core, or 128.
        critic_lambda: lambda of the returns that are the targets of the values; None for ``gae_lambda``. At 1
            the targets are sums of rewards up to the end of the rollout. In episodes of hundreds of steps,
            values then become accurate after few updates. With 0.9, the default of ``gae_lambda``, returns
            propagate back only about 10 steps per update (Yuan et al. 2025, arXiv:2503.01491, "decoupled
            GAE").
        target_kl: end an update when the KL divergence exceeds 1.5 times this; None for no limit.
        advantage_epsilon: fraction of the standard deviation of recent returns that is added to the standard
            deviation of the advantages, by which they are divided. It limits the amplification of noise when
            advantages are small.
        use_sde: explore with generalized state-dependent noise (gSDE), for Box actions. The noise is a
            function of the state that is kept for several steps, see `StateDependentNoise`, so that it does
            not average out where rewards are far away. `predict` samples independent noise of the same size.
        sde_sample_freq: steps after which the noise function of an environment is drawn again, besides at
            the start of each rollout; -1 for no further times. It requires ``use_sde``.
        previous_action: add the previous action to the input of each step.
        persist_memory_across_episodes: memory persists across episodes (RL^2): a step attends to the previous
            M steps of its environment regardless of their episodes, and positions continue to count. This
            suits tasks that stay the same for several episodes and must be identified in the first of them
            (Duan et al. 2016, arXiv:1611.02779). Returns still end with each episode. Memory is cleared when
            `learn` resets the environments.
        recompute_memory: recompute the memory with the new weights after each update, from the observations
            of the last ``L M`` steps, with L layers. The memory then equals that of a forward pass over the
            episode with the current weights. Otherwise hidden states of earlier rollouts stay as computed
            with earlier weights. The cost is a forward pass over up to ``L M`` steps of each environment per
            rollout, a quarter of the training time at the default sizes, and the memory for these
            observations; both are larger with `KNN` memory.
        reconstruction_coef: weight of the observation reconstruction loss; 0 for none.
        gradient_accumulation_steps: number of micro-batches into which each minibatch is divided, at most its
            number of segments. The update is that of the whole minibatch, apart from rounding, and without
            dropout; the activations of one micro-batch at a time are in memory.
        precision: "float32"; or "bf16-mixed" for matrix products of updates in bfloat16, see
            `rlxf.attention.linear.matmul_dtype`. Weights, optimizer, heads, losses and acting stay
            float32. PPO's ratio is then not exactly 1 in the first minibatch of an update.
        compile: on a CPU, compile the acting step of the network, for rollouts and ``predict``, and also
            losses and gradients, except for updates with micro-batches, of several processes, of segments of
            one step, or of minibatches with reset steps. This needs a C++ compiler, and 10 to 60 seconds for
            each number of environments that act at once and for each size of minibatch. Results are equal up
            to rounding. If a part cannot be compiled, a warning names the reason, and the agent computes it
            as without this argument. Attributes of modules that change later have no effect on what is
            compiled. Hooks, and parts whose modules were replaced, are described for `cuda_graphs`. Not
            saved with the agent; `load` accepts it.
        cuda_graphs: on a GPU, capture the acting step as a CUDA graph, and also losses and gradients, except
            for updates with micro-batches or of minibatches with reset steps. This takes up to two
            seconds, and memory, for each number of environments and each size of minibatch. Results are equal
            up to rounding. If a part cannot be captured, a warning names the reason. Attributes of modules
            that change later have no effect on what is captured. After a module was replaced, the step and
            the updates are captured again. While a module has hooks or an assigned ``forward``, they are not
            captured, and a warning names the module. It has no effect on a CPU, and with several processes.
            Not saved with the agent; `load` accepts it.
        n_envs: number of environments to create if ``env`` is an id; under torchrun, of all processes.
        core: specification of the transformer; None for `gtrxl`. It is rejected if acting step by step would
            differ from training on segments.
        stats_window_size: number of episodes in the logged means.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        policy_kwargs: further arguments of the policy.
        verbose: 0 no output, 1 info messages, such as of updates that ``target_kl`` ends, 2 debug messages.
        seed: seed of weights, actions, order of minibatches and environments; None for a random seed.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: if an argument is invalid (the message names allowed values), if the device does not
            exist (SB3 would silently use the CPU), if an output of the features extractor or of a head has a
            wrong shape or dtype, or if the values of a new policy are not 0.
        TypeError: if an argument has another type, a space is not supported, a head is missing, the value
            head is not a `PopArtHead`, or for unknown arguments. For those of SB3's PPO and RecurrentPPO
            the message names the alternative.

    Warns:
        UserWarning: in each of these cases. "MlpGTrXLPolicy" flattens images, for which "CnnGTrXLPolicy" has
            convolutions. The actions of a new policy, whose mean is 0, hardly explore the range of the action
            space. ``n_envs`` is given, and ``env`` is an object with another number of environments. The
            features extractor or a head computes other outputs in updates than in rollouts, as with dropout.
    """

    batch_size: int
    n_epochs: int
    clip_range: float | Schedule
    clip_range_vf: float | Schedule | None
    normalize_advantage: bool
    target_kl: float | None
    advantage_epsilon: float
    previous_action: bool
    reconstruction_coef: float
    gradient_accumulation_steps: int
    precision: Precision
    compile: bool
    cuda_graphs: bool

    @reject_unknown_arguments(PPO_SB3_ARGUMENTS)
    def __init__(
        self,
        policy: str | type[GTrXLPolicy],
        env: str | Env | VecEnv | VectorEnv | None,
        learning_rate: float | Schedule = PPOConfig.learning_rate,
        n_steps: int | None = PPOConfig.n_steps,
        batch_size: int | None = PPOConfig.batch_size,
        n_epochs: int = PPOConfig.n_epochs,
        gamma: float = PPOConfig.gamma,
        gae_lambda: float = PPOConfig.gae_lambda,
        clip_range: float | Schedule = PPOConfig.clip_range,
        clip_range_vf: float | Schedule | None = PPOConfig.clip_range_vf,
        normalize_advantage: bool = PPOConfig.normalize_advantage,
        ent_coef: float | Schedule = PPOConfig.ent_coef,
        vf_coef: float = PPOConfig.vf_coef,
        max_grad_norm: float = PPOConfig.max_grad_norm,
        *,
        segment_length: int = PPOConfig.segment_length,
        memory_length: int | None = None,
        critic_lambda: float | None = PPOConfig.critic_lambda,
        target_kl: float | None = PPOConfig.target_kl,
        advantage_epsilon: float = PPOConfig.advantage_epsilon,
        use_sde: bool = PPOConfig.use_sde,
        sde_sample_freq: int = PPOConfig.sde_sample_freq,
        previous_action: bool = PPOConfig.previous_action,
        persist_memory_across_episodes: bool = PPOConfig.persist_memory_across_episodes,
        recompute_memory: bool = PPOConfig.recompute_memory,
        reconstruction_coef: float = PPOConfig.reconstruction_coef,
        gradient_accumulation_steps: int = PPOConfig.gradient_accumulation_steps,
        precision: Precision = PPOConfig.precision,
        compile: bool = PPOConfig.compile,
        cuda_graphs: bool = PPOConfig.cuda_graphs,
        n_envs: int = PPOConfig.n_envs,
        core: TransformerSpec | None = None,
        stats_window_size: int = PPOConfig.stats_window_size,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = PPOConfig.verbose,
        seed: int | None = PPOConfig.seed,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        config = PPOConfig.from_arguments(locals())
        check_policy_kwargs(policy_kwargs)
        check_device(device)
        check_precision(precision, get_device(device))
        if env is None and _init_setup_model:
            raise ValueError("env is None: pass a Gymnasium id, an environment, a VecEnv or a VectorEnv")
        self.core = trained_core(core, memory_length, config)
        vars(self).update(vars(config), batch_size=config.minibatch_size)
        self._chosen_n_steps = config.n_steps
        torch.set_flush_denormal(True)
        self.ranks = process_group()
        training_env = as_training_env(env, config.n_envs, config.seed)
        if _init_setup_model:  # the number in a file is not a choice
            warn_of_ignored_n_envs(config.n_envs, PPOConfig.n_envs, env)
        if training_env is not None:
            check_sde(use_sde, training_env.action_space)
        super().__init__(
            policy,  # type: ignore[arg-type]  # SB3 annotates its own actor-critic policy
            training_env,
            n_steps=config.steps_per_env(training_env),
            **config.sb3_arguments,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            device=device,
            _init_setup_model=_init_setup_model,
        )
        if _init_setup_model:
            check_new_policy(self.policy)
        if self.env is not None:
            self.check_env(self.env)

    def _setup_model(self) -> None:
        normalize_images = self.policy_kwargs.get("normalize_images", True)
        check_policy(self.policy_class, self.observation_space, normalize_images)
        self._setup_lr_schedule()
        self.order = torch.Generator()
        self.set_random_seed(self.seed)
        names = ("core", "previous_action", "persist_memory_across_episodes", "precision", "use_sde")
        own = {name: getattr(self, name) for name in names}
        own["reconstruct"] = self.reconstruction_coef > 0
        for name in own.keys() & self.policy_kwargs.keys():
            raise TypeError(f"policy_kwargs must not contain {name!r}, which is set by GTrXLPPO")
        self.policy = self.policy_class(  # type: ignore[assignment]
            self.observation_space, self.action_space, self.lr_schedule, **own, **self.policy_kwargs
        ).to(self.device)
        check_own_modules(self.policy)
        if self._compiles:
            self.policy.network_step = CompiledStep(self.device.type)
        self._algorithm = self._ppo_training()
        self._diagnostics = TrainingDiagnostics(self.action_space)
        self._episodes = EpisodeStatistics()
        self._between_rollouts = False
        self.iterations = 0
        self.normalized_observations = False

    def _ppo_training(self) -> PPOTraining:
        """Return a new training by PPO, with compiled or captured updates if those are chosen."""
        return PPOTraining(self.policy, self.order, self._compiles and self.ranks.world_size == 1)

    @property
    def _compiles(self) -> bool:
        """True to compile steps and updates on a CPU, or to capture them on a GPU.

        Collective operations of several processes cannot be captured.
        """
        if supports_graphs(self.device):
            return self.cuda_graphs and self.ranks.world_size == 1
        return self.compile

    @property
    def has_compiled_step(self) -> bool:
        """True if the acting step is compiled or captured, separately for each number of environments."""
        return self.policy.network_step is not None

    def train(self) -> None:
        """Update the policy with the rollout by PPO (or distillation), in ``n_epochs`` passes.

        Raises:
            NumericalError: before the optimizer step, if returns, a loss or a gradient are NaN or infinite,
                or a parameter is not finite or would make a recurrent state overflow.
        """
        weight = self.ranks.all_gather(self.rollout_buffer.weight)
        if not weight.any():
            return  # all steps were lost because environments crashed
        reset_calibration(self.policy.transformer)
        buffer = self.rollout_buffer
        with (
            numerical_error_context(f"the update after step {self.num_timesteps}"),
            self.ranks.rank_rng(self.order),
        ):
            check_parameters(self.policy)
            buffer.check_finite(self.collector.env_numbers)
            self.policy.set_training_mode(True)
            self._update_learning_rate(self.policy.optimizer)
            if not self.policy.value_net.update(self._values_at_trained_steps(buffer.returns, weight)):
                buffer.values.fill_(float(self.policy.value_net.mean))  # the values that are clipped
            metrics = self._update_policy(weight)
        self._log_update(metrics, weight)
        trained = buffer.weight == 1
        returns, rewards = buffer.returns[trained], buffer.rewards[trained & ~buffer.dones]
        episode_returns = [info["r"] for info in self.ep_info_buffer or ()]
        self._diagnostics.check(metrics, returns, rewards, self.policy.value_net, episode_returns)

    def _update_policy(self, weight: Tensor) -> dict[str, float]:
        """Train for ``n_epochs`` passes over the rollout, fewer if ``target_kl`` is exceeded.

        Args:
            weight: weights (E, steps) of the steps of all processes.
        """
        algorithm = self._algorithm
        buffer = self.rollout_buffer
        update = algorithm.start_update(
            self.objective(),
            max_grad_norm=self.max_grad_norm,
            target_kl=self.target_kl,
            accumulation_steps=self.gradient_accumulation_steps,
        )
        advantages = self._normalized_advantages(weight) if self.normalize_advantage else buffer.advantages
        segments = self.batch_size // self.segment_length
        for number in range(1, self.n_epochs + 1):
            self._n_updates += 1
            if not update.epoch(algorithm.minibatches(buffer, segments, advantages)):
                self._report_early_end(number, update.last("approx_kl"))
                break
        return update.metrics()

    def _report_early_end(self, number: int, divergence: float) -> None:
        """Print that ``target_kl`` ended the update in a pass, with ``verbose=1``, as SB3 does."""
        if self.verbose >= 1 and self.ranks.is_main:
            print(
                f"Early end of the update in pass {number} of {self.n_epochs}: the KL divergence "
                f"{divergence:.3g} exceeds 1.5 times target_kl={self.target_kl:g}"
            )

    def _normalized_advantages(self, weight: Tensor) -> Tensor:
        """Return the advantages (E, steps) of this process, normalized with those of all processes."""
        epsilon = self.advantage_epsilon * float(self.policy.value_net.deviation)
        advantages = self.ranks.all_gather(self.rollout_buffer.advantages)
        return self.ranks.local_rows(normalize_advantages(advantages, weight, epsilon))

    def _values_at_trained_steps(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the values of x (E, steps) of all processes at steps of weight 1, (N,)."""
        return self.ranks.all_gather(x)[weight == 1]

    def objective(self) -> PPOLoss:
        """Return the current PPO objective, given the schedules and the scale of recent returns."""
        deviation = float(self.policy.value_net.deviation)
        bound = self.clip_range_vf
        return PPOLoss(
            clip_range=self._scheduled(self.clip_range),
            clip_range_vf=None if bound is None else self._scheduled(bound) * deviation,
            ent_coef=self._scheduled(self.ent_coef),
            vf_coef=self.vf_coef / deviation**2,
            reconstruction_coef=self.reconstruction_coef,
        )

    def _scheduled(self, value: float | Schedule) -> float:
        """Return the current value of a number or schedule, which callbacks may replace, as in SB3."""
        return FloatSchedule(value)(self._current_progress_remaining)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Set seeds as in SB3, of the order of minibatches, too."""
        super().set_random_seed(seed)
        self.order.manual_seed(int(torch.randint(2**62, (), device="cpu")))

    def _log_update(self, metrics: dict[str, float], weight: Tensor) -> None:
        buffer = self.rollout_buffer
        record = self.logger.record
        for name, value in metrics.items():
            record(f"train/{name}", value)
        values, returns = (
            self._values_at_trained_steps(x, weight).cpu().numpy() for x in (buffer.values, buffer.returns)
        )
        record("train/explained_variance", explained_variance(values, returns))
        if (std := self.policy.mean_std()) is not None:
            record("train/std", std.item())
        if self.clip_range_vf is not None:
            record("train/clip_range_vf", self._scheduled(self.clip_range_vf))
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        if buffer.memory_length:
            record("memory/filled", buffer.filled)

    def distill(
        self,
        teacher: "GTrXLPPO",
        total_timesteps: int,
        distillation: Distillation | None = None,
        actor: Actor = "student",
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "GTrXLPPO_distilled",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Distill a teacher, usually a larger agent, into this agent, in this agent's environments.

        This works like `learn` with the loss of `Distillation` in place of PPO's policy loss, so clip_range,
        ent_coef, target_kl and the normalization of advantages have no effect. Values are trained with the
        returns of the acting agent. Rollouts, segments, ``n_epochs``, minibatches, learning rate, and the
        losses of values and reconstructed observations are those of the student. The environments are reset,
        and the teacher processes each step with its own memory. It gets the student's observations, so these
        must be normalized as in the teacher's training.

        Args:
            teacher: the agent to imitate; it is not changed. Its sizes, techniques and memory may differ.
            total_timesteps: steps to train for, over all environments; a whole number such as 1e5.
            distillation: the distillation loss; None for ``Distillation()``.
            actor: the agent that acts, "student" or "teacher"; the noise of a teacher is independent in each
                step. If the student acts, it learns to correct its own mistakes. If it is too weak to make
                progress, let the teacher act first.
            callback: callback or callbacks, as in SB3.
            log_interval: rollouts between two log lines; None for no log lines.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step counter and the schedules; False to continue them.
            progress_bar: show a progress bar.

        Raises:
            TypeError: if ``total_timesteps`` or ``log_interval`` is not a number, the teacher is not a
                `GTrXLPPO`, or distillation not a `Distillation`.
            ValueError: if numbers are out of range, the teacher is this agent, has other spaces or another
                device, or has a datastore, or actor is unknown.

        Warns:
            UserWarning: if target_kl is set, or the teacher was trained with ``VecNormalize`` and its
                statistics are missing or change in the student's environments.
        """
        total_timesteps = as_whole_number("total_timesteps", total_timesteps, least=0)
        log_interval = as_log_interval(log_interval)
        distillation = Distillation() if distillation is None else distillation
        check_distillation(self, GTrXLPPO, teacher, distillation)
        self.ranks.check_single_process("distill")
        if self.target_kl is not None:
            warn_user(f"distill has no KL limit, target_kl={self.target_kl} has no effect")
        check_teacher_normalization(self.env, teacher.normalized_observations)
        self._algorithm = DistillationTraining(
            student=self.policy,
            teacher=teacher.policy,
            n_envs=self.n_envs,
            distillation=distillation,
            actor=actor,
            generator=self.order,
        )
        self._last_obs = None  # makes SB3 reset the environments
        try:
            return self.learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self._algorithm = self._ppo_training()
