"""Files of the agent: saved and loaded agents, and trainings that are resumed without a difference."""

import os
from functools import cached_property
from typing import Any, Self

import torch
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.arguments import check_device, load_settings
from rlxf.agents.common.checkpoint import (
    CheckpointedAlgorithm,
    check_unfinished,
    newest_checkpoint_file,
    state_memory,
)
from rlxf.agents.common.episode_statistics import statistics_from_json, statistics_to_json, unused_seed
from rlxf.agents.common.weights import core_error_context
from rlxf.agents.gtrxl import checkpoint, resume
from rlxf.agents.gtrxl.agent import GTrXLAgent
from rlxf.agents.gtrxl.diagnostics import TrainingDiagnostics
from rlxf.agents.gtrxl.observations import normalized_space
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.agents.gtrxl.rollout_collector import RolloutCollector
from rlxf.agents.gtrxl.training_algorithm import TrainingAlgorithm
from rlxf.envs.step_checks import count_calls
from rlxf.training import Archive
from rlxf.training.checkpoints import clone_tensors
from rlxf.training.compat import checkpoint_errors, checkpoint_errors_unless_overridden
from rlxf.training.states import RNG_GROUP, check_buildable
from rlxf.utils.warnings import warn_user


class ResumableAgent(CheckpointedAlgorithm, GTrXLAgent):
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
    _chosen_n_steps: int | None
    """Argument ``n_steps``; the attribute of this name is the resulting number."""

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

    def constructor_settings(self) -> dict[str, Any]:
        """Return the constructor arguments by name, except policy, environment and device."""
        attributes = {"stats_window_size": "_stats_window_size", "n_envs": "n_envs_total"}
        names = checkpoint.setting_names(type(self))
        return {name: getattr(self, attributes.get(name, name)) for name in names}

    def _description(self) -> dict[str, Any]:
        settings = self.constructor_settings() | {"n_steps": self._chosen_n_steps}
        return checkpoint.describe(settings, self.policy, self._progress(), self.normalized_observations)

    def _checkpoint(self) -> Archive:
        return self._add_datastore(checkpoint.build_archive(self._description(), self.policy))

    @checkpoint_errors()
    def _restore(self, archive: Archive) -> None:
        self.set_parameters(checkpoint.read_parameters(archive, self.policy))
        self._restore_progress(archive)
        self.normalized_observations = bool(archive.documents["agent"]["normalized_observations"])
        self._restore_datastore(archive)

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

        Before any weight is allocated, the shapes required by the settings are compared with the tensors in
        the file. This check is skipped if ``policy`` or ``policy_kwargs`` are passed.

        Args:
            path: path of the file; ".zip" is added if it has no suffix.
            env: environment to train or evaluate in; None to only predict, until ``set_env`` is called. If
                ``n_steps`` is the default in the file, it becomes the default for the number of environments.
            device: "auto", "cpu" or "cuda".
            policy: policy class; required if it is user-defined.
            sha256: required SHA-256 of the file in hexadecimal digits, from a source that you trust. It is
                compared before the file is parsed. None to skip this check.
            settings: constructor arguments that replace those in the file. SB3's ``custom_objects`` may hold
                them, too; ``print_system_info`` prints the versions on this machine. ``tensorboard_log`` is
                never loaded from the file.

        Raises:
            FileNotFoundError: if the file does not exist.
            CheckpointError: if the file is truncated, altered, of a different type, or needs a user-defined
                object that is not passed.
            ValueError: if the environment's spaces differ from the checkpoint's, an argument requires other
                weights, or the device does not exist.
            TypeError: if the constructor has no argument of this name.
        """
        check_device(device)
        if isinstance(policy, dict):
            raise TypeError(
                f"policy must be a class or a name, got {policy!r}; pass these settings by name, "
                f"custom_objects={policy!r}"
            )
        overrides = load_settings(settings)
        policy = overrides.pop("policy", None) if policy is None else policy
        archive = checkpoint.read_checkpoint(path, sha256)
        stored = checkpoint.read_settings(archive, cls)
        checkpoint.check_same_network(stored, overrides)
        merged = stored | overrides
        if "policy_kwargs" not in overrides:
            merged["policy_kwargs"] = checkpoint.decode_policy_kwargs(stored["policy_kwargs"])
        named = policy or checkpoint.policy_class_name(archive)
        given = [name for name, value in {"env": env, "policy": policy}.items() if value is not None]
        with core_error_context(stored["core"], overrides.get("core")):
            if not {"policy", "policy_kwargs"} & {*given, *overrides}:
                with checkpoint_errors_unless_overridden(overrides):
                    check_buildable(
                        lambda: cls._build(archive, named, None, "meta", merged | {"verbose": 0}).policy,
                        archive.tensors["policy"],
                        {"acting with the core's memory": state_memory(merged["core"])},
                    )
            with checkpoint_errors_unless_overridden([*given, *overrides]):
                agent = cls._build(archive, named, env, device, merged)
            agent._restore(archive)
        return agent

    @classmethod
    def _build(
        cls, archive: Archive, policy: Any, env: Any, device: torch.device | str, settings: dict[str, Any]
    ) -> Self:
        """Build an agent with the spaces of a file and new weights; its settings are those passed."""
        constructor: Any = cls  # the constructor of each subclass accepts the arguments in its files
        agent: Self = constructor(policy, env, device=device, **settings, _init_setup_model=False)
        if env is None:
            agent.observation_space, agent.action_space = checkpoint.read_spaces(archive)
            agent.n_envs = agent.ranks.split_total("n_envs", settings["n_envs"])
        checkpoint.check_spaces_match(archive, agent.observation_space, agent.action_space)
        agent._setup_model()
        return agent

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
