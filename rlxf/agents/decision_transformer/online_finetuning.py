"""Online fine-tuning of a Decision Transformer in environments."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import gymnasium
from gymnasium.vector import VectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.arguments import as_log_interval, reject_unknown_arguments
from rlxf.agents.common.environment_checks import check_raw
from rlxf.agents.common.episode_statistics import (
    episode_infos,
    statistics_from_json,
    statistics_to_json,
    unused_seed,
)
from rlxf.agents.common.training_env import warn_of_ignored_n_envs
from rlxf.agents.decision_transformer.acting import DecisionTransformerActing
from rlxf.agents.decision_transformer.online_rounds import (
    ONLINE,
    EpisodeCollector,
    OnlineRounds,
    read_online_run,
)
from rlxf.agents.decision_transformer.replay_buffer import ReplayBuffer
from rlxf.agents.offline.agent import TargetReturnAgent
from rlxf.agents.offline.checkpoint import restore_training_state
from rlxf.agents.offline.sb3_arguments import SB3_ONLINE_ARGUMENTS
from rlxf.envs.action_replay import ActionReplay
from rlxf.envs.make import check_is_env, make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.sb3_vec_env import make_sync_vec_env, watch_processes
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.training import Archive
from rlxf.training.checkpoints import clone_tensors, load_callback_states
from rlxf.training.compat import checkpoint_errors
from rlxf.utils.checks import as_whole_number, check_not_negative

ONLINE_ENVS = 8
"""Default number of environments of `learn_online`."""
DEFAULT_NOISE = 0.1
"""Standard deviation of the exploration noise, as in TD3."""


class OnlineFinetuning(DecisionTransformerActing, TargetReturnAgent):
    """Part of `DecisionTransformer` that continues the training in environments."""

    _rounds: OnlineRounds | None = None
    """State of the current `learn_online`; None outside of it."""

    @reject_unknown_arguments(SB3_ONLINE_ARGUMENTS)
    def learn_online(
        self,
        steps: int,
        target_return: float | None = None,
        env: str | gymnasium.Env | VectorEnv | VecEnv | None = None,
        n_envs: int = ONLINE_ENVS,
        round_steps: int = 1_000,
        round_updates: int = 300,
        replay_episodes: int = 1_000,
        replay_remove: str = "worst",
        exploration_noise: float | None = None,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DecisionTransformer_online",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fine-tune the agent online (Online Decision Transformer), with a critic if it has one.

        The replay buffer initially holds the best episodes of the dataset. The agent collects episodes with
        exploration, conditioned on ``target_return`` or on the return that it predicts. A stochastic policy
        samples its actions, a deterministic one adds Gaussian noise to them. Each episode is relabeled with
        its achieved returns-to-go (hindsight) and added to the buffer. After each round of environment steps
        the agent is updated on windows of the buffer, with the loss of its objective. All steps of the buffer
        are equally likely, and it may hold any episode of the dataset: ``sampling`` and
        ``validation_fraction`` are those of `learn` only. ``num_timesteps`` counts environment steps, as in
        SB3; there is no warm-up.

        With `MaximumEntropy`, the policy imitates the best of its own episodes. With `QRegularized`, it also
        follows the gradient of a critic, which learns from the episodes of the buffer. The critic has no
        value after a terminal state, and bootstraps from the last state of an episode that the time limit
        truncates. The last agent is not always the best one: on Hopper, returns rise and fall by a thousand
        during the fine-tuning. Keep the best one with `rlxf.evaluation.EvaluationCallback` (``best_path``).

        Source: Zheng et al. 2022, arXiv:2202.05607, section 4 and algorithm 1. In the paper, a round is one
        episode of up to 1000 steps and 300 updates. Gradients of a critic: Yan et al. 2024, arXiv:2410.24108.

        Args:
            steps: total number of environment steps, over all environments.
            target_return: target return while collecting. In the paper it is twice that of the evaluation.
                None if the agent predicts the return (``conditioning``).
            env: environments, not wrapped in `ReturnToGo`, or a Gymnasium id; None for `make_env`.
                Environments that are passed stay open and remain the agent's environments. Those made here
                are closed at the end.
            n_envs: number of environments to make.
            round_steps: environment steps, over all environments, between rounds of updates.
            round_updates: number of updates in a round.
            replay_episodes: capacity of the replay buffer in episodes. The buffer is kept in memory.
            replay_remove: episodes that a full replay buffer removes: "worst", those with the lowest return;
                "oldest", as in the paper; "oldest-of-worse", the oldest of those below the better half, so
                that a critic also learns from the failures of the current policy.
            exploration_noise: standard deviation of the noise on Box actions of `QRegularized`, in units of
                half their range, or of the action if it is unbounded; None for 0.1 (TD3: Fujimoto et al.
                2018, arXiv:1802.09477). Other policies sample their actions and refuse it.
            callback: SB3 callback, called after each step of the environments.
            log_interval: number of rounds between log outputs; None for no log.
            tb_log_name: name of the run in TensorBoard.
            reset_num_timesteps: restart the step count and schedules; False to continue them.
            progress_bar: show a progress bar.
            resume_from: a file that `rlxf.training.CheckpointWriter` wrote during `learn_online`, or a folder
                of them, whose newest intact file is used. Training continues from there, within the current
                episodes, to ``steps`` steps in total. On one machine the result is bitwise equal to that of
                an uninterrupted run. Agent, dataset and arguments must be the same. Environments made here
                are `ActionReplay`. Environments that are neither `ActionReplay` nor `StatefulVectorEnv` are
                reset, with a warning. Sets the global generators of torch, numpy and Python.

        Raises:
            TypeError: if ``env`` is not an environment or an id, or a number has another type.
            ValueError: if a number is out of range, ``exploration_noise`` has no effect, the agent was loaded
                without a dataset, its policy is deterministic and has no critic (train it with
                ``objective=MaximumEntropy()`` or ``QRegularized()``), target_return is missing or the agent
                predicts the return instead, its settings or data differ from those in ``resume_from``, or
                ``env`` is a ``VecNormalize`` that normalizes observations or rewards.
            DatasetError: if the environment's spaces differ from those of the dataset.
            FileNotFoundError: if ``resume_from`` does not exist.
            CheckpointError: if the file is truncated, altered or of a different format, or was not written
                during `learn_online`.

        Warns:
            UserWarning: if ``n_envs`` is chosen and ``env`` is an object with another number of environments.
        """
        self._check_online(env, callback)
        n_envs = as_whole_number("n_envs", n_envs, least=1)
        warn_of_ignored_n_envs(n_envs, ONLINE_ENVS, env)
        steps, log_interval = as_whole_number("steps", steps, least=1), as_log_interval(log_interval)
        options: dict[str, Any] = {
            "target_return": self._checked_target(target_return),
            "round_steps": as_whole_number("round_steps", round_steps),
            "round_updates": as_whole_number("round_updates", round_updates),
            "replay_episodes": as_whole_number("replay_episodes", replay_episodes),
            "exploration_noise": self._checked_noise(exploration_noise),
            "replay_remove": replay_remove,
        }
        replay = ReplayBuffer(self._data(), options["replay_episodes"], replay_remove)
        read_run = partial(read_online_run, options=options)
        steps, run = self._restore_start(steps, resume_from, read_run)
        with self._collecting_in(env, n_envs, options["target_return"]):
            total_timesteps, callback = self._setup_learn(
                steps, callback, reset_num_timesteps and run is None, tb_log_name, progress_bar
            )
            self._update = self._new_update()
            assert self.env is not None
            collector = EpisodeCollector(self, self.env, options["exploration_noise"])
            rounds = OnlineRounds(collector, replay, options)
            callback.on_training_start(locals(), globals())
            if run is not None:
                self._load_rounds(rounds, run)
                load_callback_states(callback, run)
                restore_training_state(self._update, run)
            self._run_rounds(rounds, total_timesteps, callback, log_interval)
        return self

    def _run_rounds(
        self, rounds: OnlineRounds, total_timesteps: int, callback: BaseCallback, log_interval: int
    ) -> None:
        """Run rounds until the requested number of steps is reached or a callback stops the training."""
        self._rounds = rounds
        self.resumable = True
        try:
            while self.num_timesteps < total_timesteps:
                self._update_policy(rounds, rounds.pop_due_updates, log_interval)
                dones, infos = rounds.collect()
                self._update_info_buffer(episode_infos(infos, dones), dones)
                self.num_timesteps += len(dones)
                callback.update_locals(locals())
                if not callback.on_step():
                    break
            else:
                self._update_policy(rounds, rounds.pop_due_updates, log_interval)
                self._update_policy(rounds, rounds.finish, log_interval)
            callback.on_training_end()
        finally:
            self._rounds = None
            self.resumable = False

    def _update_policy(self, rounds: OnlineRounds, end_rounds: Callable[[], int], log_interval: int) -> None:
        """Run the updates of the rounds that end, if there are any, and log every ``log_interval`` rounds."""
        before = rounds.completed
        if not (updates := end_rounds()):
            return
        windows = self.windows(rounds.replay.trajectories())
        rate = self.lr_schedule(self.progress_remaining)
        for _ in range(updates):
            self.train(windows, rate)
        if rounds.completed // log_interval > before // log_interval:
            self._log_episodes()
            self.dump_logs()

    def _log_episodes(self) -> None:
        """Record the mean return and length of the last episodes, as SB3 does."""
        if self.ep_info_buffer:
            for tag, key in (("rollout/ep_rew_mean", "r"), ("rollout/ep_len_mean", "l")):
                self.logger.record(tag, safe_mean([info[key] for info in self.ep_info_buffer]))

    def snapshot(self) -> Archive:
        """Return a copy of the content of `save` and of the state of a current `learn_online`.

        For `rlxf.training.CheckpointWriter`.
        """
        archive = super().snapshot()
        if self._rounds is None:
            return archive
        online = self._rounds.to_archive(statistics_to_json(self.ep_info_buffer, self.ep_success_buffer))
        return Archive(archive.documents | online.documents, archive.tensors | clone_tensors(online.tensors))

    def _load_rounds(self, rounds: OnlineRounds, archive: Archive) -> None:
        """Restore the rounds; environments that are reset get a seed that no earlier episode had."""
        with checkpoint_errors():
            stored = archive.documents[ONLINE]["rounds"]
            buffers = statistics_from_json(stored, self._stats_window_size)
            self.ep_info_buffer, self.ep_success_buffer = buffers
        seed = None if self.seed is None else unused_seed(self.seed, self.num_timesteps)
        rounds.load_archive(archive, self.device, seed)

    def _check_online(
        self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, callback: MaybeCallback
    ) -> None:
        """Raise an error unless the agent can be fine-tuned in these environments with these callbacks."""
        self.ranks.check_single_process("learn_online")
        if env is not None:
            check_is_env(env)
        self.policy.check_window("learn_online")
        self.policy.loss.check_online()
        self._check_eval_callbacks(callback)

    def _checked_target(self, target_return: float | None) -> float | None:
        """Return the target return as a float; raise ValueError unless the agent is conditioned on one."""
        if self.return_conditioned and target_return is None:
            raise ValueError(
                "learn_online collects episodes for a target return, got target_return=None: pass a return "
                "above the current ones of the agent"
            )
        if not self.return_conditioned and target_return is not None:
            raise ValueError(
                f"with conditioning={self.conditioning} the agent predicts the return on which it acts, got "
                f"target_return={target_return}: leave it out"
            )
        if target_return is None:
            return None
        if not math.isfinite(target_return):
            raise ValueError(f"target_return must be a finite number, got {target_return}")
        return float(target_return)

    def _checked_noise(self, noise: float | None) -> float:
        """Return the standard deviation of the exploration noise, by default `DEFAULT_NOISE`."""
        if noise is None:
            return DEFAULT_NOISE
        check_not_negative("exploration_noise", noise)
        if not self.policy.loss.head.explores_with_noise:
            raise ValueError(
                f"exploration_noise={noise} has no effect, because this policy samples its actions; leave it "
                f"out"
            )
        return float(noise)

    @contextmanager
    def _collecting_in(
        self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int, target_return: float | None
    ) -> Iterator[None]:
        """Set the agent's environments for the duration of the context; close those made here at its end."""
        before = self.env
        vec_env = self._environments(env, n_envs)
        try:
            self.check_env(vec_env)
            check_raw(vec_env, "norm_reward")
            self.set_env(vec_env if target_return is None else ReturnToGo(vec_env, target_return))
            self.trains_in_env = True
            yield
        finally:
            self.trains_in_env = False
            if env is None or isinstance(env, str):
                vec_env.close()
                self.env, self.n_envs = before, before.num_envs if before else 0

    def _environments(self, env: str | gymnasium.Env | VectorEnv | VecEnv | None, n_envs: int) -> VecEnv:
        """Return the environments of `learn_online` as a VecEnv."""
        if env is None:
            if self._env_spec(()) is None:
                raise self._missing_environment("learn_online(..., env='CartPole-v1')")
            return self.make_env(n_envs, self.seed, view=ActionReplay)
        if isinstance(env, str):
            return make_vec_env(env, n_envs, self.seed)
        if isinstance(env, VectorEnv):
            return as_vec_env(env)
        if isinstance(env, gymnasium.Env):
            return make_sync_vec_env([lambda: ActionReplay(Monitor(env))])
        watch_processes(env)
        return env
