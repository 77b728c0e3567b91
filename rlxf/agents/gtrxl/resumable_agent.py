"""Agent whose training is saved between two rollouts and resumed without a difference."""

import os
from functools import cached_property
from typing import Any, Self

import torch
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.checkpoint import check_unfinished, newest_checkpoint_file
from rlxf.agents.common.episode_statistics import statistics_from_json, statistics_to_json, unused_seed
from rlxf.agents.gtrxl import resume
from rlxf.agents.gtrxl.agent import GTrXLAgent
from rlxf.agents.gtrxl.diagnostics import TrainingDiagnostics
from rlxf.agents.gtrxl.observations import normalized_space
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.agents.gtrxl.rollout_collector import RolloutCollector
from rlxf.agents.gtrxl.training_algorithm import TrainingAlgorithm
from rlxf.envs.step_checks import count_calls
from rlxf.training import Archive
from rlxf.training.checkpoints import clone_tensors
from rlxf.training.compat import checkpoint_errors
from rlxf.training.states import RNG_GROUP
from rlxf.utils.warnings import warn_user


class ResumableAgent(GTrXLAgent):
    """Agent with the state of its training: rollouts, episodes, order of minibatches, and their files."""

    segment_length: int
    recompute_memory: bool
    order: torch.Generator
    """Generator of the order of minibatches."""
    iterations: int
    """Number of completed rollouts."""
    _algorithm: TrainingAlgorithm
    _diagnostics: TrainingDiagnostics
    _between_rollouts: bool
    _env_calls = 0
    """Result of `count_calls` after the last step or reset of the training."""

    def set_env(self, env: str | Env | VecEnv | VectorEnv, force_reset: bool = True) -> None:
        before = self._stored_space()
        super().set_env(env, force_reset)
        if self._stored_space() != before:  # e.g. with VecNormalize: the buffer is created again
            self.__dict__.pop("rollout_buffer", None)
            self.__dict__.pop("collector", None)
            self._last_obs = None

    def _stored_space(self) -> spaces.Space[Any]:
        """Return the space of the observations that the rollout buffer stores."""
        return normalized_space(self.policy.observation_space, self.get_vec_normalize_env())

    @cached_property
    def rollout_buffer(self) -> SegmentBuffer:  # type: ignore[override]
        """Rollout buffer, created on first access, since an agent that only acts needs none."""
        return SegmentBuffer(
            self.policy, self.n_envs, self.n_steps, self.segment_length, self._stored_space()
        )

    @cached_property
    def collector(self) -> RolloutCollector:
        """Collector of rollouts, with the state of the agent between two steps."""
        return RolloutCollector(self.policy, self.rollout_buffer, self.ranks, self.recompute_memory)

    @property
    def has_resumable_training(self) -> bool:
        """True if training can be resumed at some moments: for PPO, and not for distillation."""
        return self._algorithm.resumable

    @property
    def resumable(self) -> bool:
        """True if a `snapshot` allows exact resumption, which is the case between two rollouts of PPO."""
        return self._between_rollouts and self._algorithm.resumable

    def snapshot(self) -> Archive:
        """Return a copy of what `save` writes and of the state that `learn` needs to resume.

        For `rlxf.training.CheckpointWriter`.
        """
        assert self.env is not None
        state = self.collector.state_dict()
        environment, groups = resume.gather_environments(self.env, self.ranks, state)
        run = {
            "iterations": self.iterations,
            **statistics_to_json(self.ep_info_buffer, self.ep_success_buffer),
            "log": resume.pending_values(self.logger),
            "first_return": self._diagnostics.entropy.first_return,
            resume.ENVIRONMENT: environment,
        }
        groups = {RNG_GROUP: resume.generator_states(self.order)} | groups
        groups[resume.GRADIENTS] = resume.gradients(self.policy, self.logger)
        own = super().snapshot()
        groups = {name: group for name, group in groups.items() if group}
        return Archive(own.documents | {resume.RUN: run}, own.tensors | clone_tensors(groups))

    def load_training_state(self, path: str | os.PathLike[str]) -> Self:
        """Restore the state in a file of `rlxf.training.CheckpointWriter`, without further training.

        Weights, optimizer, progress, statistics of ``VecNormalize``, pending log values if the agent has a
        logger, and the global random number generators of torch, numpy and Python are restored. The
        environments are not changed: to continue their episodes, call `learn` with ``resume_from``.

        Args:
            path: path of the file, or of the folder of checkpoints.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        archive = self.check_training_state(path)
        self._restore_run(archive)
        logger = getattr(self, "_logger", Logger(None, []))  # SB3 creates the logger in `learn`
        resume.restore_generators(archive, logger, self.order)
        return self

    def check_training_state(self, path: str | os.PathLike[str]) -> Archive:
        """Return the content of a file for `load_training_state`, after a comparison with the settings.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        return resume.read_matching_run(self._description(), path)

    def _read_run(self, path: str | os.PathLike[str], total_timesteps: int) -> Archive:
        """Read the file of a run to resume, which has fewer steps than ``total_timesteps``."""
        archive = self.check_training_state(path)
        done = archive.documents["agent"]["progress"]["num_timesteps"]
        check_unfinished(done, total_timesteps, "total_timesteps", newest_checkpoint_file(path))
        return archive

    def _restore_run(self, archive: Archive) -> tuple[dict[str, Any], resume.Groups]:
        """Restore weights, progress and statistics from the file.

        Returns:
            The document of the current episodes, and the tensors of this process.

        Raises:
            CheckpointError: if the contents do not fit the agent.
            ValueError: if the environments have different wrappers.
        """
        assert self.env is not None
        self._restore(archive)
        environment, own = resume.restore_wrappers(self.env, self.ranks, archive)
        with checkpoint_errors():
            run = archive.documents[resume.RUN]
            self.iterations = run["iterations"]
            buffers = statistics_from_json(run, self._stats_window_size)
            self.ep_info_buffer, self.ep_success_buffer = buffers
            first = run.get("first_return")
            self._diagnostics.entropy.first_return = None if first is None else float(first)
            resume.restore_gradients(self.policy, archive.tensors.get(resume.GRADIENTS, {}))
        return environment, own

    def _resume(self, archive: Archive) -> None:
        """Restore progress, memory and environments from the file.

        If the current episodes cannot be restored, a warning names the reason, and the environments will be
        reset, with seeds that the run has not used.
        """
        assert self.env is not None
        environment, own = self._restore_run(archive)
        with checkpoint_errors():
            self.collector.load_state_dict(own[resume.AGENT_STATE])
        self._last_obs = self.collector.obs
        reason = resume.resume_episodes(self.env, self.ranks, environment, own[resume.EPISODES])
        self._env_calls = count_calls(self.env)
        if reason is None:
            return
        warn_user(f"the environments start new episodes, so the resumed run is not bit-identical: {reason}")
        self.discard_episodes()

    def discard_episodes(self) -> None:
        """Reset the environments at the next `learn`, with seeds that the training has not used.

        This is needed after other steps in them, for example those of `rlxf.evaluate`, which calls this
        method.
        """
        assert self.env is not None
        self._last_obs = None
        if self.seed is not None:
            self.env.seed(self._first_seed(unused_seed(self.seed, self.num_timesteps)))
