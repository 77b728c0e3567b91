"""Acting with a Decision Transformer: predictions and datastores."""

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from rlxf.agents.common.actions import check_discrete, to_environment
from rlxf.agents.common.calibration import CalibrationMixin, reset_calibration
from rlxf.agents.common.datastore import EXPORT_REASON, TRAINING_REASON, DatastoreMixin, check_no_datastore
from rlxf.agents.common.predict_state import MissingStateWarning
from rlxf.agents.common.retrieval import RetrievalPolicy
from rlxf.agents.decision_transformer.conditioning import Conditioning
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.retrieval import encode_dataset
from rlxf.agents.offline.heads import Head
from rlxf.agents.offline.observations import ConditionedObservation
from rlxf.agents.offline.trajectory_algorithm import TrajectoryAlgorithm
from rlxf.attention.heads.base import Datastore, OutputHead
from rlxf.data import Trajectories, Windows, action_encoder
from rlxf.export.files import check_target, export_step
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors
from rlxf.utils.checks import check_int


class DecisionTransformerActing(DatastoreMixin, CalibrationMixin, TrajectoryAlgorithm):
    """Part of `DecisionTransformer` that acts: predictions, exploration, export and the datastore."""

    policy: DecisionTransformerModel
    conditioning: Conditioning
    _missing_state_warning: MissingStateWarning

    @property
    def head(self) -> Head | RetrievalPolicy:
        """Action head of the policy; with a datastore, the head that also retrieves from it."""
        return self._action_head() if self.datastore is None else self._retrieval_policy(self.datastore)

    def _setup_learn(self, *args: Any, **options: Any) -> tuple[int, BaseCallback]:
        check_no_datastore(self.datastore, TRAINING_REASON)
        return super()._setup_learn(*args, **options)

    def train(self, windows: Windows, learning_rate: float) -> None:
        """Run one update; a calibrated exit threshold is reset first, with a warning."""
        reset_calibration(self.policy.transformer)
        super().train(windows, learning_rate)

    def encode(
        self, observation: NDArray[Any] | dict[str, NDArray[Any]], actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Encode observations of the agent's environments and actions, (E, ...), as in `Trajectories`."""
        return self.encode_observation(observation), action_encoder(self.dataset_info.action_space)(actions)

    def encode_observation(self, observation: Any) -> NDArray[Any]:
        """Encode observations (E, ...) of the agent's environments as in `Trajectories`.

        Raises:
            TypeError, ValueError, FaultyEnvironmentError: as `predict`.
        """
        return self.policy.encode_rows(observation, self.dataset_info)

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions, as in SB3; ``state`` holds the last K steps, or what the core keeps of the episode.

        Args:
            observation: observation of a single environment, or of E environments; of
                `rlxf.envs.ReturnToGo` if the agent acts for a target return.
            state: state returned by the previous call, a `ContextWindow`, an `EpisodeContext` or, with
                `ElasticHistory`, an `ElasticContext`; None at the beginning.
            episode_start: (E,) bool, True for the first observation of an episode. Observations with time
                step 0 always start an episode.
            deterministic: return the most likely action instead of a sample. With `Imitation`, Box actions
                are always deterministic.

        Returns:
            The actions, (E, ...), within the bounds of the space, and the state for the next call. The given
            state is not modified.

        Raises:
            TypeError: if the observation has another structure, or the state is not one that `predict`
                returned.
            ValueError: if the observation's shape differs from the dataset's, the batch size of ``state`` or
                ``episode_start`` differs from the observation's, ``state`` is of another agent or device, or
                a number is NaN or infinite.
            NumericalError: if an output of the transformer is not finite; the message names the cause.

        Warns:
            UserWarning: once, if ``state`` is None in ten consecutive calls without ``episode_start`` at time
                steps other than 0, or in a call whose ``episode_start`` is False for an observation.
        """
        encoded, state = self._append_observation(observation, state, episode_start, deterministic)
        with torch.no_grad():
            chosen = self.head.choose(self.policy.newest_output(state), deterministic)
        actions, state = self._act(chosen, state)
        return (actions if encoded.batched else actions[0]), state

    @torch.no_grad()
    def explore(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any,
        episode_start: NDArray[np.bool_],
        noise: float,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions of E environments for the collection of episodes; errors as in `predict`.

        Stochastic policies sample. Deterministic ones add Gaussian noise to their actions, which are then
        clipped to the bounds of the space.

        Args:
            observation: as in `predict`, with a batch axis.
            state: as in `predict`.
            episode_start: (E,) bool, True for the first observation of an episode.
            noise: standard deviation of the noise of a deterministic policy, in units of half the range of
                an action, or of the action if it is unbounded.

        Returns:
            The actions, (E, ...), and the state for the next call.
        """
        _, state = self._append_observation(observation, state, episode_start, deterministic=False)
        head: Head = self.policy.loss.head
        return self._act(head.explore(self.policy.newest_output(state), noise), state)

    def _act(self, chosen: Tensor, state: Any) -> tuple[NDArray[Any], Any]:
        """Return chosen actions (E, ...) in the format of the environment, and the state with them."""
        actions = to_environment(chosen, self.action_space)
        return actions, self.policy.record_actions(state, actions, self.dataset_info, self.device)

    @torch.no_grad()
    def action_logits(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the logits (E, A) that `predict` samples from, and the state; arguments as in `predict`.

        With `SampledReturn`, the return is a sample, as in `predict` with ``deterministic=False``. Raises the
        errors of `predict`.

        Raises:
            TypeError: also if the action space is not Discrete.
        """
        check_discrete(self.action_space)
        _, state = self._append_observation(observation, state, episode_start, deterministic=False)
        head: Any = self.head  # of Discrete actions, so it has logits
        (logits,) = head.logits(self.policy.newest_output(state))
        return logits, state

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        """Return the state after a step with actions (E, ...) in the encoding of the dataset.

        If the agent acts for a target return, it is unchanged: the next observation contains the actions.
        """
        return self.policy.observe_action(state, actions)

    def _append_observation(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any,
        episode_start: Any,
        deterministic: bool,
    ) -> tuple[ConditionedObservation, Any]:
        """Encode the observation and append it to the context; return both."""
        encoded, start = self.policy.encode_step(
            observation, state, episode_start, self.dataset_info, self.device
        )
        if self.policy.training:  # eval() visits each module, which takes a tenth of the time of a step
            self.policy.eval()
        self._missing_state_warning.record_start(state, start, given=episode_start is not None)
        return encoded, self.policy.append_step(state, encoded, start, deterministic)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        n_envs: int = 1,
        opset: int | None = None,
    ) -> None:
        """Write the acting step as a file that runs without rlxf; see `rlxf.export.files.export_step`.

        The step maps observations, the state and ``episode_start`` to the most likely actions and the next
        state. If the agent acts for a target return, its observations are those of `rlxf.envs.ReturnToGo`.

        Args:
            path: see `GTrXLPPO.export`.
            format: see `GTrXLPPO.export`.
            n_envs: see `GTrXLPPO.export`.
            opset: see `GTrXLPPO.export`.

        Raises:
            ValueError: if a part of the agent cannot be exported, the message names it; or if format or opset
                are invalid, or the agent has a datastore.
            ImportError: if a package of the extra "export" is missing.
            OSError: if a file cannot be written.
        """
        target = check_target(path, format, opset)
        check_int("n_envs", n_envs)
        check_no_datastore(self.datastore, EXPORT_REASON)
        step = self.policy.acting_step(self.dataset_info, n_envs)
        export_step(step, vars(self.policy.transformer.spec), target, opset)

    def _check_datastore(self, data: Trajectories, head: OutputHead) -> None:
        """Raise an error as `DatastoreMixin._check_datastore`, also if the agent predicts the return."""
        if not self.conditioning.needs_target:
            raise ValueError(
                f"a datastore needs an agent that acts for a target return, because its keys contain the "
                f"returns of the data, got conditioning={self.conditioning}; train the agent with "
                f"conditioning=TargetReturn()"
            )
        super()._check_datastore(data, head)

    def _encode_dataset(self, data: Trajectories, progress_bar: bool) -> Datastore:
        return encode_dataset(self.policy.eval(), self.windows(data), self.device, progress_bar)

    def _action_head(self) -> Any:
        return self.policy.loss.head

    def _checkpoint(self) -> Archive:
        return self._add_datastore(super()._checkpoint())

    @checkpoint_errors()
    def _restore(self, archive: Archive) -> None:
        super()._restore(archive)
        self._restore_datastore(archive)
