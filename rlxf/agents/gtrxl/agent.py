"""Base class of `GTrXLPPO` without training and files: acting, export, datastore and calibration."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from operator import index
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import Env, spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from rlxf.agents.common.calibration import THRESHOLDS, Calibration, CalibrationMixin, reset_calibration
from rlxf.agents.common.datastore import EXPORT_REASON, TRAINING_REASON, DatastoreMixin, check_no_datastore
from rlxf.agents.common.environment_checks import check_not_reset_result
from rlxf.agents.common.retrieval import ActionDatastore
from rlxf.agents.common.training_env import as_training_env
from rlxf.agents.common.weights import transfer_weights
from rlxf.agents.gtrxl import checkpoint
from rlxf.agents.gtrxl.acting_step import GTrXLActingStep, exportable_normalizer, raw_observation_space
from rlxf.agents.gtrxl.calibration import check_independent_episodes, measure_exits
from rlxf.agents.gtrxl.core import check_episode_length, warned_of_filler_rows
from rlxf.agents.gtrxl.observations import as_array, map_obs
from rlxf.agents.gtrxl.policies import POLICIES, SB3_POLICIES
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.retrieval import PolicyBoxHead, PolicyDiscreteHead, action_head, encode_dataset
from rlxf.attention import TransformerSpec
from rlxf.attention.heads.base import Datastore
from rlxf.data import Trajectories
from rlxf.data.space_comparison import space_mismatches
from rlxf.data.spaces import with_channels_first
from rlxf.envs.make import check_is_env
from rlxf.evaluation.agents import lacks_statistics
from rlxf.evaluation.environment import prepared_env
from rlxf.export.files import check_target, export_step
from rlxf.training.process_group import ProcessGroup
from rlxf.utils.checks import check_int
from rlxf.utils.names import did_you_mean


class GTrXLAgent(DatastoreMixin, CalibrationMixin, OnPolicyAlgorithm):
    """Agent with a `GTrXLPolicy` on SB3's interface that acts, without its training."""

    policy: GTrXLPolicy  # type: ignore[assignment]
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES | SB3_POLICIES
    core: TransformerSpec
    ranks: ProcessGroup
    persist_memory_across_episodes: bool
    normalized_observations: bool
    """True if training observations came from a ``VecNormalize``; saved with the agent."""
    _warned_of_filler = False

    def check_env(self, env: VecEnv) -> None:
        """Check that the agent can act in environments; ``VecNormalize`` and the axes of images may differ.

        Raises:
            ValueError: if their spaces differ from those of the training, except for dtypes and for bounds of
                observations that are not images; or if an episode may have more observations than the core
                has positions.
        """
        space = env.observation_space if self.env is None else raw_observation_space(env)
        for kind, mismatch in self.space_mismatches(space, env.action_space):
            raise ValueError(
                f"the environments do not fit the agent: {kind} space: {mismatch}. Use environments with the "
                f"spaces of the training"
            )
        check_episode_length(self.core, env)

    def space_mismatches(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of these spaces from those of the training, without the axes of images."""
        own = self.observation_space if self.env is None else raw_observation_space(self.env)
        given = with_channels_first(observation_space), action_space
        return space_mismatches((with_channels_first(own), self.action_space), given)

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        known = self.policy_aliases
        if policy_name not in known:
            question = did_you_mean(policy_name, known)
            raise ValueError(f"unknown policy {policy_name!r}; use one of {', '.join(POLICIES)}{question}")
        return known[policy_name]

    def set_env(self, env: str | Env | VecEnv | VectorEnv, force_reset: bool = True) -> None:
        """Replace the training environment; spaces and number of environments must be the same.

        Args:
            env: any type that the constructor accepts.
            force_reset: reset the environment at the next `learn`, as in SB3.

        Raises:
            ValueError: if the spaces or the number of environments differ.
            TypeError: if ``env`` is not an environment, or a space is not supported.
        """
        if env is None:
            raise TypeError(
                "set_env needs an environment, got None: pass an id, an Env, a VecEnv or a VectorEnv"
            )
        training_env = as_training_env(env, self.n_envs_total, self._first_seed(self.seed))
        n_envs = training_env.num_envs if isinstance(training_env, VecEnv) else 1
        if n_envs != self.n_envs:
            raise ValueError(
                f"the agent trains in {self.n_envs} environments, got {n_envs}; load it from a file with "
                f"load(path, env=...) to change their number"
            )
        super().set_env(training_env, force_reset)

    def _first_seed(self, seed: int | None) -> int | None:
        """Return the seed of the first environment of this process."""
        return None if seed is None else seed + self.ranks.row_indices(self.n_envs).start

    def set_random_seed(self, seed: int | None = None) -> None:
        """Set seeds as in SB3; the environments of all processes get consecutive seeds."""
        super().set_random_seed(seed)
        if seed is not None and self.env is not None:
            self.env.seed(self._first_seed(seed))

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """Choose actions; see `GTrXLPolicy.predict`. Tensors of any device are accepted as observations.

        Warns:
            UserWarning: additionally once, if memory persists across episodes and an observation of the
                agent's environments is from reset steps (NEXT_STEP), which then count as steps.
        """
        check_not_reset_result(observation)
        if self.persist_memory_across_episodes and not self._warned_of_filler and self.env is not None:
            self._warned_of_filler = warned_of_filler_rows(self.env, observation)
        return self.policy.predict(map_obs(as_array, observation), state, episode_start, deterministic)

    def action_logits(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the logits (E, A) of Discrete actions and the state; see `RecurrentPolicy.action_logits`.

        Tensors of any device are accepted as observations.
        """
        return self.policy.action_logits(map_obs(as_array, observation), state, episode_start)

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        """Return the state after a step in which actions (E, ...), counted from 0, were taken."""
        return self.policy.observe_action(state, actions)

    @property
    def n_envs_total(self) -> int:
        """Number of environments of all processes; ``n_envs`` is that of this process."""
        return self.n_envs * self.ranks.world_size

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
        check_no_datastore(self.datastore, TRAINING_REASON)
        if not isinstance(load_path_or_dict, dict):
            archive = checkpoint.read_checkpoint(load_path_or_dict)
            load_path_or_dict = checkpoint.read_parameters(archive, self.policy)
        super().set_parameters(load_path_or_dict, exact_match, device)

    def load_pretrained(self, source: BaseAlgorithm) -> Self:
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
        check_no_datastore(self.datastore, TRAINING_REASON)
        transfer_weights(source, self.policy)
        reset_calibration(self.policy.transformer)
        return self

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

        The risk is the expected fraction of an episode's steps whose most likely early-exit action differs
        from the full-depth action. It is at most ``alpha``, with probability at least ``1 - delta`` over the
        sampled episodes. The expectation is over episodes that the agent plays at full depth, with equal
        weight for short and long episodes. Box actions count as the same if they differ by at most half a
        standard deviation of the policy. The threshold is saved with the agent. It is valid only for the
        current weights: training resets it, with a warning.

        Source: Schuster et al. 2022, arXiv:2207.07061, section 3.2 ("textual consistency"); Learn then Test:
        Angelopoulos et al. 2021, arXiv:2110.01052.

        Args:
            env: environment to act in, or an id, whose environment is closed at the end. Observations are
                normalized as in training, whose statistics are not updated. In the training environment,
                its episodes end, and a later `learn` begins new ones.
            alpha: bound on the risk, the expected fraction of steps with different actions.
            delta: maximum probability that the guarantee fails.
            thresholds: confidence thresholds in descending order within [0, 1], the safest first.
            episodes: minimum number of episodes, in equal shares of the environments.
            seed: seed of the environments and of torch's global generator, which samples the actions; None
                to leave them unchanged.

        Returns:
            The results of each threshold.

        Raises:
            ValueError: before the first step, if the depth of the core is not `CALM`, memory persists across
                episodes, the environment has different spaces, the statistics of ``VecNormalize`` are
                missing, thresholds do not decrease, or thresholds, alpha, delta or episodes are out of range.
            TypeError: if one of them is not a number, or ``env`` is neither an environment nor an id.
        """
        self.ranks.check_single_process("calibrate")
        check_independent_episodes(self.policy)
        return self._calibrate(partial(self._measure_exits, env, episodes, seed), thresholds, alpha, delta)

    def _measure_exits(
        self, env: Any, episodes: int, seed: int | None, thresholds: tuple[float, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        check_is_env(env)
        check_int("episodes", episodes)
        seed = None if seed is None else index(seed)
        with prepared_env(self, env, self.n_envs, seed) as vec_env:
            if unwrap_vec_normalize(vec_env) is None:
                self._check_statistics("calibrate")
            if seed is not None:
                set_random_seed(seed)
            return measure_exits(self.policy, vec_env, thresholds, episodes)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        n_envs: int = 1,
        opset: int | None = None,
    ) -> None:
        """Write the acting step as a file that runs without rlxf; see `rlxf.export.files.export_step`.

        The step maps raw observations, the state and ``episode_start`` to the most likely actions and the
        next state. It contains the normalization of a ``VecNormalize`` around the agent's environments, and
        the transposition of images whose channels are in the last axis. An agent without environments cannot
        know their order of axes: images then have channels first, as in the agent's ``observation_space``.

        Args:
            path: file to write; missing folders are created.
            format: "onnx", or "torch" for a program of torch.export; None for that of the suffix, .onnx or
                .pt2.
            n_envs: number of environments in each step.
            opset: ONNX opset, at least 18; None for 20.

        Raises:
            ValueError: if a part of the agent cannot be exported, the message names it; or if format or opset
                are invalid, or the statistics of the observations are missing.
            ImportError: if a package of the extra "export" is missing.
            OSError: if a file cannot be written.
        """
        target = check_target(path, format, opset)
        check_int("n_envs", n_envs)
        check_no_datastore(self.datastore, EXPORT_REASON)
        space = None if self.env is None else raw_observation_space(self.env)
        step = GTrXLActingStep(self.policy, self._observation_normalizer(), n_envs, space)
        export_step(step, vars(self.core), target, opset)

    def _observation_normalizer(self) -> VecNormalize | None:
        """Return the ``VecNormalize`` that normalizes observations; None if they are raw."""
        normalizer = exportable_normalizer(self.env)
        if normalizer is None and self.normalized_observations:
            raise ValueError(
                "the agent was trained on observations normalized by VecNormalize, whose statistics it "
                "lacks: first call agent.set_env(rlxf.training.load_normalizer(path, env))"
            )
        return normalizer

    @property
    def datastore(self) -> ActionDatastore | None:
        """Datastore of `attach_datastore`; None if there is none."""
        return None if self.policy.retrieval is None else self.policy.retrieval.datastore

    @datastore.setter
    def datastore(self, datastore: ActionDatastore | None) -> None:
        self.policy.retrieval = None if datastore is None else self._retrieval_policy(datastore)

    def _encode_dataset(self, data: Trajectories, progress_bar: bool) -> Datastore:
        if self.persist_memory_across_episodes:
            raise ValueError(
                "attach_datastore encodes each episode with an empty memory, but the memory of this agent "
                "persists across episodes; train with persist_memory_across_episodes=False"
            )
        self._check_statistics("attach_datastore")
        self.policy.set_training_mode(False)
        return encode_dataset(self.policy, data, self.get_vec_normalize_env(), progress_bar)

    def _check_statistics(self, method: str) -> None:
        """Raise ValueError if observations were normalized in training, and the statistics are missing."""
        if lacks_statistics(self):
            raise ValueError(
                f"{method} needs the statistics of VecNormalize with which the agent was trained: load the "
                f"agent with rlxf.training.load_normalizer(path, env) as env"
            )

    def _action_head(self) -> PolicyBoxHead | PolicyDiscreteHead:
        return action_head(self.policy)
