"""Base class of agents with a multilayer perceptron: predictions with or without a history."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.common.actions import check_discrete, to_environment
from rlxf.agents.mlp.model import MLPModel, ObservationHistory
from rlxf.agents.offline.agent import OfflineAgent
from rlxf.agents.offline.objectives import Objective
from rlxf.agents.offline.observations import EncodedObservation


class MLPAgent(OfflineAgent):
    """`OfflineAgent` whose action depends on the last K observations."""

    policy: MLPModel  # type: ignore[assignment]
    hidden_sizes: tuple[int, ...]
    dropout: float
    objective: Objective

    @abstractmethod
    def _encode(self, observation: Any) -> tuple[EncodedObservation, Tensor | None]:
        """Return the encoded observation, and the return-to-go (E,); None if the agent has none."""

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions, as in SB3.

        Args:
            observation: observation of a single environment, or of E environments; of
                `rlxf.envs.ReturnToGo` if the agent is conditioned on a return.
            state: state returned by the previous call; None at the beginning. With ``context_length=1`` it
                is always None.
            episode_start: (E,) bool, True for the first observation of an episode. Of agents conditioned on a
                return, observations with time step 0 always start an episode.
            deterministic: return the most likely action instead of a sample. With `Imitation`, Box actions
                are always deterministic.

        Returns:
            The actions, (E, ...), within the bounds of the space, and the state for the next call: the
            features of the last K observations, or None. The given state is not modified.

        Raises:
            TypeError: if the observation has another structure than those of the dataset, or the state is
                not one that `predict` returned.
            ValueError: if the observation's shape differs from the dataset's, the batch size of ``state`` or
                ``episode_start`` differs from the observation's, ``state`` is of another agent or device, or
                a number is NaN or infinite.
            NumericalError: if an output of the network is not finite; the message names the cause.

        Warns:
            UserWarning: once, if ``context_length`` is more than 1 and ``state`` is None in ten consecutive
                calls without ``episode_start``, or in a call whose ``episode_start`` is False for an
                observation.
        """
        encoded, return_to_go, history = self._append_observation(observation, state, episode_start)
        chosen = self.policy.act(history, return_to_go, deterministic)
        actions = to_environment(chosen, self.action_space)
        return (actions if encoded.batched else actions[0]), self._state(history)

    @torch.no_grad()
    def action_logits(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the logits (E, A) that `predict` samples from, and the state; arguments as in `predict`.

        Raises the errors of `predict`.

        Raises:
            TypeError: also if the action space is not Discrete.
        """
        check_discrete(self.action_space)
        _, return_to_go, history = self._append_observation(observation, state, episode_start)
        head: Any = self.policy.loss.head  # of Discrete actions, so it has logits
        (logits,) = head.logits(self.policy.checked_outputs(history, return_to_go))
        return logits, self._state(history)

    def _append_observation(
        self, observation: Any, state: Any, episode_start: Any
    ) -> tuple[EncodedObservation, Tensor | None, ObservationHistory]:
        """Encode the observation and append it to the history; also return the return-to-go."""
        encoded, return_to_go = self._encode(observation)
        start = encoded.episode_starts(episode_start)
        if self.policy.training:
            self.policy.eval()
        if self.context_length > 1:
            self._missing_state_warning.record_start(state, start, given=episode_start is not None)
        return encoded, return_to_go, self.policy.append_step(state, encoded.observations, start)

    def _state(self, history: ObservationHistory) -> ObservationHistory | None:
        """Return the state after a step; None if actions depend on the newest observation only."""
        return history if self.context_length > 1 else None
