"""Training loop of the agent: alternating rollouts and updates."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.arguments import as_log_interval, check_gradients_enabled
from rlxf.agents.common.datastore import TRAINING_REASON, check_no_datastore
from rlxf.agents.common.environment_checks import (
    check_observations,
    normalizes_observations,
    restore_stats_on_error,
)
from rlxf.agents.common.episode_statistics import EpisodeStatistics, episode_infos
from rlxf.agents.common.numerics import check_parameters
from rlxf.agents.common.training_env import check_has_env
from rlxf.agents.common.weights import sync_normalization_statistics, sync_processes
from rlxf.agents.gtrxl import resume
from rlxf.agents.gtrxl.config import check_schedules
from rlxf.agents.gtrxl.core import check_filler_rows
from rlxf.agents.gtrxl.diagnostics import TrainingDiagnostics
from rlxf.agents.gtrxl.environments import RolloutEnvs
from rlxf.agents.gtrxl.hyperparameters import hyperparameters
from rlxf.agents.gtrxl.observations import as_array, map_obs
from rlxf.agents.gtrxl.resumable_agent import ResumableAgent
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.agents.gtrxl.tensor_environments import rollout_envs
from rlxf.envs.gymnasium_wrappers import warn_of_unsaved_statistics
from rlxf.envs.sb3_vec_env import watch_processes
from rlxf.envs.step_checks import count_calls
from rlxf.envs.worker_vec_env import restart_counts
from rlxf.evaluation.environment import check_not_trained_in
from rlxf.training.checkpoints import flat_callbacks, load_callback_states
from rlxf.training.tensorboard import write_hyperparameters, write_layout
from rlxf.utils.allocator import keep_freed_memory
from rlxf.utils.checks import as_whole_number
from rlxf.utils.tensorboard import writes_tensorboard
from rlxf.utils.warnings import warn_user

LOSSES = ("train/policy_gradient_loss", "train/value_loss", "train/entropy_loss")
"""Tags of the losses with a chart in TensorBoard."""


class TrainingLoop(ResumableAgent):
    """Agent with a ``learn`` like SB3's; the subclass implements ``train``, the update after each rollout."""

    critic_lambda: float | None
    _episodes: EpisodeStatistics

    @torch.no_grad()
    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: SegmentBuffer, n_rollout_steps: int
    ) -> bool:
        """Take ``n_rollout_steps`` steps in every environment; return False if a callback stops training."""
        check_parameters(self.policy)
        self.policy.set_training_mode(False)
        self.collector.start_rollout()
        self._algorithm.start_rollout()
        callback.on_rollout_start()
        self.ranks.broadcast_rng_state()
        self._between_rollouts = False
        envs = rollout_envs(env, self.policy, self.collector.env_numbers)
        with restore_stats_on_error(env), self._reset_after_error(), self._check_rollout(envs):
            is_complete = self._take_steps(envs, callback, n_rollout_steps)
        self._env_calls = count_calls(env)
        if not is_complete:
            return False
        critic_lambda = self.gae_lambda if self.critic_lambda is None else self.critic_lambda
        self.collector.finish_rollout(self.gamma, self.gae_lambda, critic_lambda)
        self._episodes.exchange(self.ranks, super()._update_info_buffer)
        for name, value in restart_counts(env).items():
            counts = self.ranks.all_gather(torch.tensor([value], device=self.device))
            self.logger.record(f"env/{name}", int(counts.sum()))
        callback.on_rollout_end()
        return True

    def _take_steps(self, envs: RolloutEnvs, callback: BaseCallback, steps: int) -> bool:
        """Take steps in every environment; return False if a callback stops training."""
        for step in range(steps):
            self._reset_noise(step)
            if not self._take_step(envs, callback):
                return False
        return True

    def _reset_noise(self, step: int) -> None:
        """Draw new exploration noise if it is due at a step of a rollout, counted from 0."""
        if step == 0 or (self.sde_sample_freq > 0 and step % self.sde_sample_freq == 0):
            self.policy.reset_noise(self.n_envs_total)

    @contextmanager
    def _reset_after_error(self) -> Iterator[None]:
        """Let the next `learn` reset the environments if a step of the body raises, e.g. in a callback.

        The environments may have taken this step, which is then not stored.
        """
        try:
            yield
        except BaseException:  # also Ctrl-C
            self._last_obs = None
            raise

    @contextmanager
    def _check_rollout(self, envs: RolloutEnvs) -> Iterator[None]:
        """Check the unread steps of the body, after it or when it raises an error.

        An invalid observation of an earlier step may be the cause of the error, and is then raised.
        """
        try:
            yield
        except Exception:
            envs.check_rollout(self.rollout_buffer, self.collector.obs)
            raise
        envs.check_rollout(self.rollout_buffer, self.collector.obs)

    def _take_step(self, envs: RolloutEnvs, callback: BaseCallback) -> bool:
        """Take a step in every environment; return False if a callback stops training."""
        step = self.collector.act(self._algorithm.choose)
        new_obs, rewards, dones, infos = envs.step(step)
        self.num_timesteps += self.n_envs_total
        envs.check(new_obs, rewards, dones, self._env_steps)
        dones = dones.astype(bool, copy=False)
        env = envs.env
        rollout_buffer = self.rollout_buffer
        callback.update_locals(locals() | vars(step))  # names that SB3 also has are the same
        keep_training = callback.on_step()  # a stopped step is stored too, since `learn` may be called again
        self._update_info_buffer(*envs.finished(infos, dones))
        results = envs.results(new_obs, rewards, dones, infos, self._env_steps)
        self.collector.store(step, results, self.gamma)
        self._last_obs = self.collector.obs
        self._last_episode_starts = dones
        return keep_training

    @property
    def _env_steps(self) -> int:
        """Number of steps that each environment has taken."""
        return self.num_timesteps // self.n_envs_total

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        """Update episode statistics as in SB3; several processes exchange them after the rollout."""
        if self.ranks.world_size == 1 or dones is None:
            ends = np.zeros(len(infos), np.bool_) if dones is None else dones
            super()._update_info_buffer(episode_infos(infos, ends), dones)
        else:
            self._episodes.record(infos, dones)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """Prepare training as in SB3; also check the first observations and log hyperparameters."""
        check_gradients_enabled()
        check_no_datastore(self.datastore, TRAINING_REASON)
        check_parameters(self.policy)
        assert self.env is not None
        self._prepare_envs(self.env)
        if not reset_num_timesteps:
            self._discard_changed_episodes()
        self._agree_on_reset()
        resets = reset_num_timesteps or self._last_obs is None
        with restore_stats_on_error(self.env):
            result = super()._setup_learn(
                total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
            self._check_first_observations(self.env)
        self._env_calls = count_calls(self.env)
        self._check_evaluation_envs(result[1])
        if writes_tensorboard(self.logger):
            self._describe_run(self.env)
        if not self.num_timesteps:  # a continued training is compared with its first episodes
            self._diagnostics = TrainingDiagnostics(self.action_space)
        if resets:
            self.collector.reset(self._last_obs)
        return result

    def _prepare_envs(self, env: VecEnv) -> None:
        """Check the environments before a training, and make their statistics equal in all processes."""
        if self.persist_memory_across_episodes:
            check_filler_rows(self.core, env)
        self.check_env(env)
        warn_of_unsaved_statistics(env)
        sync_normalization_statistics(env, self.ranks)
        self.normalized_observations = normalizes_observations(env, self.normalized_observations)
        watch_processes(env)

    def _check_first_observations(self, env: VecEnv) -> None:
        """Raise FaultyEnvironmentError if an observation before the first step is invalid."""
        assert self._last_obs is not None
        rows = self.ranks.row_indices(self.n_envs)
        obs = map_obs(as_array, self._last_obs)
        check_observations("first observation", env, obs, self._env_steps, rows)

    def _describe_run(self, env: VecEnv) -> None:
        """Write the hyperparameters and the layout of charts to TensorBoard."""
        values = hyperparameters(
            self.constructor_settings(),
            algorithm=type(self).__name__,
            policy=type(self.policy).__name__,
            env=env,
        )
        write_hyperparameters(self.logger, values)
        write_layout(self.logger, LOSSES)

    def _check_evaluation_envs(self, callback: BaseCallback) -> None:
        """Raise ValueError if an ``EvalCallback`` would play episodes in the training environments."""
        for each in flat_callbacks(callback):
            if isinstance(each, EvalCallback):
                check_not_trained_in(self, each.eval_env, "EvalCallback", "make_vec_env(id, n_envs)")

    def _discard_changed_episodes(self) -> None:
        """Discard the current episodes, with a warning, if there were other steps in the environments."""
        assert self.env is not None
        if self._last_obs is None or count_calls(self.env) == self._env_calls:
            return
        warn_user(
            "the training environments were stepped or reset after the last training, e.g. by "
            "evaluate_policy(agent, agent.get_env()), so new episodes begin; pass an environment of its own, "
            "e.g. make_vec_env(id, n_envs), or use rlxf.evaluate"
        )
        self.discard_episodes()

    def _agree_on_reset(self) -> None:
        """Discard the episodes of this process if those of another one were discarded.

        A reset of a ``VecNormalize`` communicates, so it has to take place in all processes.
        """
        discarded = self.ranks.all_reduce_max(int(self._last_obs is None))
        if discarded and self._last_obs is not None:
            self.discard_episodes()

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "GTrXLPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train for ``total_timesteps`` steps, counted over all environments; as in SB3.

        Args:
            total_timesteps: steps to train for; a whole number such as 100_000 or 1e5.
            callback: callback or callbacks, as in SB3.
            log_interval: rollouts between two log lines; None for no log lines.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step counter and the schedules; False to continue them.
            progress_bar: show a progress bar.
            resume_from: a file of `rlxf.training.CheckpointWriter`, or their folder, whose newest complete
                file is used. Training resumes in the middle of the episodes up to ``total_timesteps`` in
                total. On the same machine the result is bit-identical to an uninterrupted run. The agent must
                have the same arguments and environments. Environments must be `ActionReplay` or
                `StatefulVectorEnv`, like those of `rlxf.envs.make_vec_env`; others start new episodes with a
                warning. States of callbacks in the file, such as the best return of an `EvaluationCallback`,
                are loaded. Sets the global random number generators of torch, numpy and Python.

        Raises:
            TypeError: before the first step, if ``total_timesteps`` or ``log_interval`` is not a number.
            ValueError: before the first step, if ``total_timesteps`` is negative or has a fraction,
                ``log_interval`` is less than 1, the agent was loaded without an environment, a schedule is
                lost (`UnknownSchedule`) or becomes negative, the agent has a datastore, a block of
                its `Compressive` memory would contain a reset step and never be compressed, its settings
                differ from those of the file to resume from, or an ``EvalCallback`` has the environments of
                the training.
            FileNotFoundError: if the file does not exist.
            CheckpointError: if the file is truncated, altered or of a different type, or was not written by
                `CheckpointWriter`.
            FaultyEnvironmentError: during training, if an environment returns NaN or infinity, or crashes
                too often (`BrokenEnvironmentError`).
            NumericalError: before a rollout or an update, if a parameter is not finite or would make a
                recurrent state overflow; during training, if a loss, a gradient or a recurrent state is NaN
                or infinite. The weights are those before that optimizer step.

        Warns:
            UserWarning: if training continues with ``reset_num_timesteps=False``, but the environments were
                stepped or reset in between, e.g. by SB3's ``evaluate_policy``. New episodes then begin. Steps
                in ``SubprocVecEnv`` and `Workers` are not noticed.
        """
        total_timesteps = as_whole_number("total_timesteps", total_timesteps, least=0)
        log_interval = as_log_interval(log_interval)
        check_has_env(self.env)
        check_schedules(self, progress=0.0)
        keep_freed_memory()
        run = None if resume_from is None else self._read_run(resume_from, total_timesteps)
        self.iterations = 0 if reset_num_timesteps else self.iterations
        if run is not None:
            self._resume(run)
            total_timesteps -= self.num_timesteps
            reset_num_timesteps = False
        done = {"num_timesteps": self.num_timesteps, "n_updates": self._n_updates}
        self.check_processes()
        sync_processes(self.ranks, self.policy, self.order, self.set_logger, **done, n_envs=self.n_envs)
        total_timesteps, callback = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        self._warn_of_zero_learning_rate(total_timesteps)
        callback.on_training_start(locals(), globals())
        if run is not None:
            load_callback_states(callback, run)
            resume.restore_generators(run, self.logger, self.order)
        try:
            self._iterate(total_timesteps, callback, log_interval)
            callback.on_training_end()
        finally:
            self._between_rollouts = False
        return self

    def check_processes(self) -> None:
        """Raise ValueError if the core cannot be trained by the processes of a process group."""
        self.core.kernel.check_processes(self.ranks.world_size)

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """Set the remaining progress as in SB3, but 0 where the last rollout exceeds ``total_timesteps``."""
        super()._update_current_progress_remaining(min(num_timesteps, total_timesteps), total_timesteps)

    def _warn_of_zero_learning_rate(self, total_timesteps: int) -> None:
        """Warn if the training has one rollout and its learning rate decreases to 0, as by default."""
        rollout = self.n_steps * self.n_envs_total
        is_last = self.num_timesteps < total_timesteps <= self.num_timesteps + rollout
        if is_last and self.num_timesteps == 0 and self.lr_schedule(0.0) == 0:
            warn_user(
                f"the weights will not change: {total_timesteps:,} steps are one rollout, of {rollout:,} "
                f"steps, and the learning rate of its update, the last one, is 0; increase total_timesteps, "
                f"decrease n_steps, or pass a constant learning_rate"
            )

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
