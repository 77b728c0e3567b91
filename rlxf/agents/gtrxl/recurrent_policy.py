"""Policy with a recurrent state: interface of SB3 for acting step by step, and state per environment."""

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.actions import check_discrete, to_environment
from rlxf.agents.common.cores import check_state_core
from rlxf.agents.common.numerics import check_recurrent_state
from rlxf.agents.common.predict_state import (
    MissingStateWarning,
    check_state_layout,
    check_state_rows,
    check_state_type,
)
from rlxf.agents.common.retrieval import DiscreteRetrievalPolicy, RetrievalPolicy
from rlxf.agents.gtrxl.action_heads import ActionHead
from rlxf.agents.gtrxl.observations import (
    check_whole_numbers,
    named_faults,
    whole_number_parts,
)
from rlxf.attention import TransformerSpec
from rlxf.attention.cache import KVCache
from rlxf.attention.token_index import EMPTY, TokenIndex, is_tracing
from rlxf.data.spaces import count_values
from rlxf.utils.distributions import unvalidated_distributions


@dataclass(eq=False)
class RecurrentPolicyState:
    """Recurrent state of the policy for E environments.

    `predict` returns it as ``state`` and accepts it in the next call. Its contents are internal.

    Args:
        cache: KV cache of the last tokens.
        position: (E,) int64, steps since the start of the episode.
        episode: (E,) int64, number of the episode.
        action: (E, A), the encoded previous action; 0 at the start of an episode.
        core: specification of the transformer.
    """

    cache: KVCache
    position: Tensor
    episode: Tensor
    action: Tensor
    core: TransformerSpec

    def __repr__(self) -> str:
        """Return a summary, because the tensors of the cache have thousands of numbers."""
        return f"{type(self).__name__}(environments={len(self.position)}, layers={self.core.layers})"

    @property
    def layout(self) -> dict[str, object]:
        """Kind and size of each part by name, equal for all states of one policy."""
        return self.cache.layout | {"previous action": self.action.shape[1]}

    def advance(self, episode_start: Tensor | None) -> TokenIndex:
        """Advance to the next token and return its index (E, 1).

        Args:
            episode_start: (E,) bool, environments in which an episode starts; None if it is known on the host
                that there are none, which saves operations.
        """
        self.position = self.position + 1
        if episode_start is not None:
            self.position = self.position.masked_fill(episode_start, 0)
            self.episode = self.episode + episode_start.long()
            self.action = self.action.masked_fill(episode_start[:, None], 0.0)
        return TokenIndex(self.position[:, None], self.episode[:, None])

    def store_encoded_action(self, action: Tensor, index: TokenIndex) -> None:
        """Store encoded actions (E, A), except for environments with an empty slot in ``index`` (E, 1)."""
        self.action = torch.where(index.episode == EMPTY, self.action, action)

    def reset(self, rows: Tensor) -> None:
        """Clear the memory of the environments ``rows`` (E,) bool, even if it persists across episodes."""
        self.position = self.position.masked_fill(rows, -1)
        self.episode = self.episode + rows.long()
        self.action = self.action.masked_fill(rows[:, None], 0.0)

    def rows(self, rows: Tensor) -> Self:
        """Return a copy of the chosen environments; ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        position = self.position[rows]
        episode = self.episode[rows]
        action = self.action[rows]
        return replace(self, cache=self.cache.rows(rows), position=position, episode=episode, action=action)

    def copy(self) -> Self:
        """Return a copy of the state."""
        return replace(self, cache=self.cache.copy())


@dataclass(eq=False)
class PersistentPolicyState(RecurrentPolicyState):
    """Recurrent state that persists across episodes: positions count from the first step of all episodes."""

    def advance(self, episode_start: Tensor | None) -> TokenIndex:
        """Advance like `RecurrentPolicyState`, but reset only environments without any previous step."""
        return super().advance(self.episode == EMPTY)


def mark_filler_rows(index: TokenIndex, filler: Tensor) -> TokenIndex:
    """Return ``index`` (E, 1) with the environments ``filler`` (E,) bool marked as empty slots."""
    return TokenIndex(index.position, index.episode.masked_fill(filler[:, None], EMPTY))


class RecurrentPolicy(BasePolicy):
    """Policy that acts step by step with a recurrent state; its subclass defines the network."""

    core: TransformerSpec
    action_head: ActionHead[Any]
    retrieval: RetrievalPolicy | None = None
    """Retrieval policy used by `predict` after `GTrXLPPO.attach_datastore`; None to use `heads`."""
    _missing_state_warning: MissingStateWarning

    @abstractmethod
    def initial_state(self, batch: int) -> RecurrentPolicyState:
        """Return the initial state for ``batch`` environments before their first episode."""

    @abstractmethod
    def act(self, obs: PyTorchObs, state: RecurrentPolicyState, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Run the network for one step of E environments; the cache of ``state`` is updated in place.

        Args:
            obs: a batch of E observations.
            state: recurrent state, advanced to this step.
            index: (E, 1), position and episode of the step.

        Returns:
            The outputs (E, C) for `heads`, and the inputs of all layers, (L, E, C), for the memory.
        """

    @abstractmethod
    def act_early(self, obs: PyTorchObs, state: RecurrentPolicyState, index: TokenIndex) -> Tensor:
        """Run the network like `act`, but with early exits; return only the outputs (E, C)."""

    @abstractmethod
    def action_distribution(self, latent: Tensor) -> Distribution:
        """Return the action distribution for outputs (N, C)."""

    @abstractmethod
    def most_likely_actions(self, latent: Tensor) -> Tensor:
        """Return the mode (N, ...) of the action distribution for outputs (N, C)."""

    @abstractmethod
    def heads(self, latent: Tensor) -> tuple[Distribution, Tensor]:
        """Return the action distribution and the values (N,) for outputs (N, C)."""

    @abstractmethod
    def encode_actions(self, actions: Tensor) -> Tensor:
        """Encode actions (N, ...) -> (N, A): discrete ones as one-hot vectors, Box actions flattened."""

    def predict(  # type: ignore[override]
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: RecurrentPolicyState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, RecurrentPolicyState]:
        """Choose actions, as in SB3; ``state`` holds the memory.

        Args:
            observation: an observation or a batch of observations.
            state: state returned by the previous call; None to start.
            episode_start: (E,) bool, which observations are the first of an episode. Memory is cleared there,
                unless it persists across episodes: then this has no effect. None: no observation is the
                first, unless state is None. With NEXT_STEP, a Gymnasium ``VectorEnv`` returns the first
                observation one step after the done flag.
            deterministic: take the most likely action instead of a sample.

        Returns:
            The actions, and the state for the next call. The state passed in is not modified.

        Raises:
            TypeError: if the state is not one that `predict` returned.
            ValueError: if the observation does not fit the space (the message names the part and the fault),
                discrete values, bits or pixels are fractions or out of range, the batch sizes of the parts of
                the observation, state and episode_start differ, or the state is of another core or device.
            NumericalError: if an observation or a recurrent layer's state is NaN or infinite.

        Warns:
            UserWarning: once, if ten consecutive calls have neither state nor episode_start, or state is None
                although episode_start marks an observation as not the first of its episode.
        """
        latent, state, batched = self._early_output(observation, state, episode_start)
        with torch.no_grad():
            actions = self._choose_actions(latent, deterministic)
            state.action = self.encode_actions(actions)
        chosen = self.to_environment(actions)
        return (chosen if batched else chosen.squeeze(axis=0)), state

    @torch.no_grad()
    def action_logits(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: RecurrentPolicyState | None = None,
        episode_start: np.ndarray | None = None,
    ) -> tuple[Tensor, RecurrentPolicyState]:
        """Return the logits (E, A) from which `predict` chooses, and the state; arguments as in `predict`.

        To continue from the state, pass it to `observe_action` with the actions that were taken.

        Raises:
            TypeError: if the action space is not Discrete.
        """
        check_discrete(self.action_space)
        latent, state, _ = self._early_output(observation, state, episode_start)
        if self.retrieval is None:
            return self.action_head.choice_logits(self.action_distribution(latent))[0], state
        assert isinstance(self.retrieval, DiscreteRetrievalPolicy)
        return self.retrieval.logits(latent)[0], state

    @torch.no_grad()
    def forward(
        self,
        obs: PyTorchObs,
        state: RecurrentPolicyState | None = None,
        episode_starts: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentPolicyState]:
        """Choose actions and estimate values for one step, like SB3's ``RecurrentPPO``, without gradient.

        Unlike `predict`, this method takes tensors, does not clip Box actions, and uses all layers. It does
        not use a datastore.

        Args:
            obs: a batch of E observations, as ``obs_to_tensor`` returns them.
            state: state returned by the previous call; None to start E episodes. It is not modified.
            episode_starts: (E,), nonzero where an observation is the first of an episode. None: no
                observation is the first, unless state is None.
            deterministic: take the most likely action instead of a sample.

        Returns:
            Actions (E, ...), values (E,), log probabilities of the actions (E,), and the next state. Discrete
            actions count from 0; `to_environment` converts them to values of their space.

        Raises:
            ValueError: if the batch sizes of obs, state and episode_starts differ.
        """
        validation = unvalidated_distributions() if is_tracing() else nullcontext()
        with validation:
            distribution, values, state = self._evaluate_step(obs, state, episode_starts)
            actions = distribution.get_actions(deterministic=deterministic)
            log_probs = distribution.log_prob(actions)
        state.action = self.encode_actions(actions)
        return actions.reshape(-1, *self.action_space.shape), values, log_probs, state  # type: ignore[misc]

    @torch.no_grad()
    def get_distribution(
        self, obs: PyTorchObs, state: RecurrentPolicyState | None = None, episode_starts: Tensor | None = None
    ) -> tuple[Distribution, RecurrentPolicyState]:
        """Return the action distribution of one step, and the next state; arguments as in `forward`.

        To continue from the state, pass it to `observe_action` with the actions that were taken.
        """
        distribution, _, state = self._evaluate_step(obs, state, episode_starts)
        return distribution, state

    @torch.no_grad()
    def predict_values(
        self, obs: PyTorchObs, state: RecurrentPolicyState | None = None, episode_starts: Tensor | None = None
    ) -> Tensor:
        """Return the values (E,) of one step; arguments as in `forward`."""
        return self._evaluate_step(obs, state, episode_starts)[1]

    def _evaluate_step(
        self, obs: PyTorchObs, state: RecurrentPolicyState | None, episode_starts: Tensor | None
    ) -> tuple[Distribution, Tensor, RecurrentPolicyState]:
        """Evaluate a step with all layers; return distribution, values (E,) and the next state."""
        state, start = self._continue(state, episode_starts, count_values(obs))
        latent, _ = self.act(obs, state, state.advance(start))
        return *self.heads(latent), state

    def observe_action(self, state: RecurrentPolicyState, actions: Tensor) -> RecurrentPolicyState:
        """Return the state after a step in which actions (E, ...) were taken."""
        return replace(state, action=self.encode_actions(actions))

    @torch.no_grad()
    def _early_output(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: RecurrentPolicyState | None,
        episode_start: np.ndarray | None,
    ) -> tuple[Tensor, RecurrentPolicyState, bool]:
        """Return early-exit outputs (E, C), the state, and whether the observation had a batch axis."""
        if self.training:  # set_training_mode visits every module, which takes time in every step
            self.set_training_mode(False)
        if self._whole_number_parts:
            check_whole_numbers(self._whole_number_parts, observation)
        with named_faults(self.observation_space, observation):
            obs, batched = self.obs_to_tensor(observation)
        every = torch.all if isinstance(episode_start, Tensor) else np.all
        starts_all = None if episode_start is None else bool(every(episode_start))
        self._missing_state_warning.record(state, starts_all)
        state, start = self._continue(state, episode_start, count_values(obs))
        with named_faults(self.observation_space, observation):
            latent = self.act_early(obs, state, state.advance(start))
        return latent, state, batched

    def _choose_actions(self, latent: Tensor, deterministic: bool) -> Tensor:
        """Choose actions (E, ...) for outputs (E, C)."""
        if self.retrieval is not None:
            return self.retrieval.choose(latent, deterministic)
        with unvalidated_distributions():
            if deterministic:
                return self.most_likely_actions(latent)
            return self.action_distribution(latent).sample()

    def _continue(
        self, state: RecurrentPolicyState | None, episode_start: np.ndarray | Tensor | None, batch: int
    ) -> tuple[RecurrentPolicyState, Tensor | None]:
        """Return a copy of the state, and which environments start an episode, as in `advance`."""
        if state is None:
            return self.initial_state(batch), torch.ones(batch, dtype=torch.bool, device=self.device)
        self._check_state(state, batch)
        if episode_start is None:
            return state.copy(), None
        if (shape := tuple(np.shape(episode_start)) or (1,)) != (batch,):
            raise ValueError(f"episode_start must have shape ({batch},), got {shape}")
        if not isinstance(episode_start, Tensor) and not np.any(episode_start):
            return state.copy(), None
        start = torch.as_tensor(episode_start, dtype=torch.bool, device=self.device)
        return state.copy(), torch.atleast_1d(start)

    def _check_state(self, state: RecurrentPolicyState, batch: int) -> None:
        """Raise an error unless a state is one of this policy, on its device, for ``batch`` environments."""
        new_episodes = "pass state=None to start new episodes"
        check_state_type(state, RecurrentPolicyState, new_episodes)
        check_state_rows(state.position, batch, self.device, new_episodes)
        if state.core is not self.core or state.action.shape[1] != self.encoded_action_width:
            check_state_core(state.core, self.core, new_episodes)
            check_state_layout(state.layout, self._state_layout, new_episodes)
        check_recurrent_state(self.transformer, state.cache.recurrent)

    @property
    def device(self) -> torch.device:
        """Device of the parameters; SB3 searches the modules for one, which takes time in every step."""
        value_net: Any = self.value_net
        device: torch.device = value_net.weight.device
        return device

    @cached_property
    def _whole_number_parts(self) -> dict[str | None, spaces.Space[Any]]:
        """Parts of the observation space that `check_whole_numbers` checks."""
        return whole_number_parts(self.observation_space)

    @cached_property
    def _state_layout(self) -> dict[str, object]:
        """Layout of the states of this policy."""
        return self.initial_state(1).layout

    def to_environment(self, actions: Tensor) -> np.ndarray:
        """Convert actions (E, ...) to the action space; see `rlxf.agents.common.actions.to_environment`."""
        return to_environment(actions, self.action_space)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        """Return actions for first steps of episodes, without memory."""
        state, start = self._continue(None, None, count_values(observation))
        latent, _ = self.act(observation, state, state.advance(start))
        return self._choose_actions(latent, deterministic)
