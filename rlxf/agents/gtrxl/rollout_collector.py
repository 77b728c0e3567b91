"""Collection of rollouts: the state of the agent between steps, and the steps that fill the buffer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor
from torch.nn.functional import pad

from rlxf.agents.gtrxl.environments import StepResults
from rlxf.agents.gtrxl.losses import generalized_advantage_estimate
from rlxf.agents.gtrxl.observations import map_obs, named_obs, obs_from_named
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.recurrent_policy import RecurrentPolicyState, mark_filler_rows
from rlxf.agents.gtrxl.rollout_buffer import RolloutStep, SegmentBuffer
from rlxf.attention import State, TokenIndex, TransformerSpec
from rlxf.attention.memory.base import NoMemory
from rlxf.attention.token_index import EMPTY
from rlxf.training.process_group import ProcessGroup
from rlxf.utils.distributions import unvalidated_distributions


@dataclass(frozen=True, eq=False)
class RecentSteps:
    """Inputs of the last P steps of E environments, from which memory can be recomputed with new weights.

    The hidden states of a rollout depend on the weights that acted in it. With P = `memory_receptive_field`,
    `recompute_memory` returns the same memory as a forward pass over the whole episode.

    Args:
        obs: observations (E, P, ...).
        previous: (E, P, A), the encoded previous actions.
        index: (E, P), positions and episodes of the steps; only reset steps are empty slots.
    """

    obs: PyTorchObs
    previous: Tensor
    index: TokenIndex

    @classmethod
    def from_buffer(cls, buffer: SegmentBuffer, steps: slice) -> "RecentSteps":
        """Return the inputs of some steps of a rollout, as views."""
        obs = map_obs(lambda x: x[:, steps], buffer.obs)
        return cls(obs, buffer.previous[:, steps], buffer.steps_index.at(steps))

    def followed_by(self, later: "RecentSteps", max_steps: int) -> "RecentSteps":
        """Append later steps, and return the last ``max_steps`` steps."""
        last = slice(-max_steps, None)
        obs = map_obs(lambda x, y: torch.cat([x, y], dim=1)[:, last], self.obs, later.obs)
        previous = torch.cat([self.previous, later.previous], dim=1)
        return RecentSteps(obs, previous[:, last], self.index.concatenate(later.index).at(last))

    @torch.no_grad()
    def recompute_memory(self, policy: GTrXLPolicy, segment_length: int) -> State:
        """Recompute the memory with the current weights; that of past episodes may be incomplete.

        Args:
            policy: the policy with the current weights.
            segment_length: steps that are read at a time.
        """
        state = policy.transformer.initial_state(len(self.previous))
        for start in range(self._first, self.index.shape[1], segment_length):
            part = slice(start, start + segment_length)
            index = self.index.at(part)
            previous = self.previous[:, part].flatten(0, 1)
            obs = map_obs(lambda x, part=part: x[:, part].flatten(0, 1), self.obs)
            tokens = policy.tokens(obs, previous).unflatten(0, tuple(index.shape))
            state = policy.transformer.next_state(tokens, index, state)
        return state

    @property
    def _first(self) -> int:
        """Number of steps before the first one that belongs to the current episode of any environment."""
        episode = self.index.episode
        last = pad(episode, (1, 0), value=EMPTY).amax(dim=1, keepdim=True)
        current = ((episode == last) & (episode != EMPTY)).any(dim=0)
        return int((current.cumsum(dim=0) == 0).sum())


def memory_receptive_field(core: TransformerSpec) -> int:
    """Return ``L M``, the receptive field of the memory: each of L passes attends M steps back.

    A memory that reaches further back in one pass adds the additional steps.
    """
    memory = core.memory or NoMemory()
    return (core.layers - 1) * memory.length + memory.capacity


ActionSampler = Callable[[PyTorchObs, TokenIndex, Distribution], Tensor]
"""Samples the actions of a step from observations, index (E, 1) and the agent's action distribution."""
POLICY_STATE = ("position", "episode", "action")
"""Tensors of `RecurrentPolicyState` that are stored between two rollouts; the cache is computed again."""
RECURRENT = "recurrent."
"""Prefix of the stored tensors of recurrent layers."""


class RolloutCollector:
    """Collector of rollouts in E environments, and owner of the agent's state between two steps.

    The state consists of the last observations, the recurrent state of the policy, the memory in the rollout
    buffer and, with ``recompute_memory``, the inputs of the last steps. `reset` must be called before the
    first step. All methods must be called without gradient.

    Args:
        policy: the policy that acts.
        buffer: buffer that receives the steps.
        ranks: the process group.
        recompute_memory: recompute the memory with the current weights at the start of each rollout.
    """

    obs: Any
    """Observations (E, ...) before the next step, as the environments returned them."""
    episode_start: Tensor
    """(E,) bool: True where the last step ended an episode, was a reset step or crashed, or after `reset`."""
    filler: Tensor
    """True where the next step is a reset step, (E,) bool."""
    state: RecurrentPolicyState
    """Recurrent state of the policy."""

    def __init__(
        self, policy: GTrXLPolicy, buffer: SegmentBuffer, ranks: ProcessGroup, recompute_memory: bool
    ):
        self.policy = policy
        self.buffer = buffer
        self.ranks = ranks
        self.recompute_memory = recompute_memory
        self.device = buffer.hidden.device

    def reset(self, obs: Any) -> None:
        """Clear the memory after a reset of the environments, which returned ``obs``."""
        self.buffer.clear_memory()
        self._past = RecentSteps.from_buffer(self.buffer, slice(0))
        self.state = self.policy.initial_state(self.buffer.n_envs)
        self.filler = torch.zeros(self.buffer.n_envs, dtype=torch.bool, device=self.device)
        self.episode_start = torch.ones_like(self.filler)
        self.obs = obs

    def start_rollout(self) -> None:
        """Start a rollout, and project its memory with the current weights."""
        self._past = self.recent_steps
        memory = self.buffer.start_rollout()
        if self.recompute_memory:
            memory = self._past.recompute_memory(self.policy, self.buffer.segment_length)
            self.buffer.replace_memory(memory)
        self.state.cache = self.policy.build_cache(replace(memory, recurrent=self.state.cache.recurrent))

    @property
    def recent_steps(self) -> RecentSteps:
        """Inputs of the last steps, including the current rollout; empty without ``recompute_memory``."""
        if not self.recompute_memory:
            return self._past
        rollout = RecentSteps.from_buffer(self.buffer, slice(self.buffer.step))
        return self._past.followed_by(rollout, memory_receptive_field(self.policy.core))

    def act(self, sample: ActionSampler) -> RolloutStep:
        """Advance the policy by one step, with actions from ``sample``."""
        obs = self._as_tensor(self.obs)
        start = self.episode_start & ~self.filler
        index = mark_filler_rows(self.state.advance(start), self.filler)  # before the next episode
        previous = self.state.action
        recurrent = self.state.cache.recurrent
        with torch.inference_mode(), unvalidated_distributions():
            latent, hidden, check = self.policy.act_unchecked(obs, self.state, index)
            distribution, values = self.policy.heads(self.ranks.embed_rows(latent))
            actions = sample(obs, index, distribution)
            log_probs = distribution.log_prob(actions)
            actions, values, log_probs = map(self.ranks.local_rows, (actions, values, log_probs))
            self.state.store_encoded_action(self.policy.encode_actions(actions), index)
        return RolloutStep(obs, previous, index, hidden, recurrent, actions, values, log_probs, check.fetch())

    def store(self, step: RolloutStep, results: StepResults, gamma: float) -> None:
        """Store a step with its results in the buffer.

        Args:
            step: result of `act`.
            results: results of the environments.
            gamma: discount factor of the value after a truncation.
        """
        bootstrapped = results.rewards
        index = step.index
        if len(results.truncated):
            with self.policy.uncompiled():
                values = self._next_values(self.state.rows(results.truncated), results.last_obs)
            bootstrapped = bootstrapped.index_add(0, results.truncated, gamma * values)
        ends = results.ends | self.filler
        if results.lost is not None:
            bootstrapped, ends, index = self._handle_crashes(results.lost, step, bootstrapped, ends)
        self.buffer.add(step, bootstrapped, ends, index)
        self.obs = results.obs
        self.episode_start = ends
        self.filler = results.filler_next

    def _handle_crashes(
        self, lost: Tensor, step: RolloutStep, rewards: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, TokenIndex]:
        """Return rewards, episode ends and index corrected for crashed environments, and reset their memory.

        The result of the first lost step is unknown. V(s) replaces its reward, so its advantage is 0, and the
        step before is bootstrapped with V(s), as at a truncation.

        Args:
            lost: (E,) bool, the crashed environments.
            step: the step.
            rewards: (E,), bootstrapped rewards of the step.
            ends: (E,) bool, whether the episode ended with the step.
        """
        crashed = lost & ~self.filler
        self.state.reset(lost)
        index = mark_filler_rows(step.index, crashed)
        return torch.where(crashed, step.values, rewards), ends | crashed, index

    @property
    def env_numbers(self) -> range:
        """Numbers of this process's environments among those of all processes."""
        return self.ranks.row_indices(self.buffer.n_envs)

    def finish_rollout(self, gamma: float, gae_lambda: float, critic_lambda: float) -> None:
        """Compute the advantages and returns of the rollout.

        Args:
            gamma: discount factor.
            gae_lambda: lambda of the advantages.
            critic_lambda: lambda of the returns, ``G_t = A_t(critic_lambda) + V(s_t)``.
        """
        buffer = self.buffer
        state = self.state.copy()
        state.reset(self.episode_start)  # the values of other episodes have no effect, but need a position
        next_values = self._next_values(state, self.obs)
        estimate = partial(
            generalized_advantage_estimate,
            rewards=buffer.rewards.T,
            values=buffer.values.T,
            next_values=next_values,
            dones=buffer.dones.T,
            gamma=gamma,
        )
        buffer.advantages.copy_(estimate(gae_lambda=gae_lambda).T)
        buffer.returns.copy_(estimate(gae_lambda=critic_lambda).T + buffer.values)

    @unvalidated_distributions()
    def _next_values(self, state: RecurrentPolicyState, obs: Any) -> Tensor:
        """Return V(obs), (E,), for obs as the next step of ``state``, which is modified."""
        index = state.advance(torch.zeros_like(state.episode, dtype=torch.bool))
        latent, _ = self.policy.act(self._as_tensor(obs), state, index)
        return self.policy.heads(latent)[1]

    def _as_tensor(self, obs: Any) -> PyTorchObs:
        """Return observations on the device in the buffer's memory layout, on which rounding depends.

        They are copied to row-major order: ``contiguous()`` keeps the strides of one-channel images. The
        environment may overwrite its own tensors in the next step.
        """
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return map_obs(lambda x: copy(torch.as_tensor(x).to(self.device, non_blocking=True)), obs)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state between two rollouts by name; each tensor has an axis of environments."""
        past = self.recent_steps
        recurrent = self.state.cache.recurrent
        state = {name: getattr(self.state, name) for name in POLICY_STATE}
        state |= {"filler": self.filler, "episode_start": self.episode_start}
        state |= _memory_tensors("memory", self.buffer.memory)
        if recurrent is not None:
            state |= {RECURRENT + name: x for name, x in recurrent.named_tensors().items()}
        state |= {"past.previous": past.previous} | _index_tensors("past", past.index)
        return state | named_obs("past.obs", past.obs) | named_obs("obs", self.obs)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            KeyError: if a tensor is missing.
            ValueError: if a tensor has a different dtype or shape, or the state of a recurrent layer is not
                finite.
        """
        self.reset(obs_from_named("obs", {name: tensor.numpy() for name, tensor in state.items()}))
        _check_form(state, self.state_dict())
        on_device = {name: tensor.to(self.device) for name, tensor in state.items()}
        for name in POLICY_STATE:
            setattr(self.state, name, on_device[name])
        self.filler, self.episode_start = on_device["filler"], on_device["episode_start"]
        self.buffer.replace_memory(_memory("memory", on_device))
        if self.state.cache.recurrent is not None:
            names = [name for name in on_device if name.startswith(RECURRENT)]
            recurrent = {name.removeprefix(RECURRENT): on_device[name] for name in names}
            restored = self.state.cache.recurrent.from_named(recurrent)
            if (fault := self.policy.transformer.recurrent_fault(restored)) is not None:
                raise ValueError(fault)
            self.state.cache.recurrent = restored
        self._past = RecentSteps(
            obs=obs_from_named("past.obs", on_device),
            previous=on_device["past.previous"],
            index=_index("past", on_device),
        )


def _check_form(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a stored tensor cannot take the place of the collector's own one.

    The steps before the rollout, ``past``, may be more or fewer. States of recurrent layers are checked by
    `Transformer.recurrent_fault`.
    """
    steps = stored["past.previous"].shape[1:2]
    for name, place in own.items():
        if name.startswith(RECURRENT):
            continue
        tensor, shape = stored[name], tuple(place.shape)
        if name.startswith("past."):
            shape = (shape[0], *steps, *shape[2:])
        if tensor.dtype != place.dtype or tensor.shape != shape:
            raise ValueError(
                f"the state {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {place.dtype} of "
                f"shape {shape}"
            )


def _index_tensors(name: str, index: TokenIndex) -> dict[str, Tensor]:
    """Return the tensors of an index by name, with the prefix ``name``."""
    return {f"{name}.position": index.position, f"{name}.episode": index.episode}


def _index(name: str, tensors: Mapping[str, Tensor]) -> TokenIndex:
    """Return the index of `_index_tensors`."""
    return TokenIndex(tensors[f"{name}.position"], tensors[f"{name}.episode"])


def _memory_tensors(name: str, state: State) -> dict[str, Tensor]:
    """Return the tensors of a memory by name, with the prefix ``name``."""
    own = {f"{name}.hidden": state.hidden} | _index_tensors(name, state.index)
    return own if state.older is None else own | _memory_tensors(f"{name}.older", state.older)


def _memory(name: str, tensors: Mapping[str, Tensor]) -> State:
    """Return the memory of `_memory_tensors`."""
    older = _memory(f"{name}.older", tensors) if f"{name}.older.hidden" in tensors else None
    return State(tensors[f"{name}.hidden"], _index(name, tensors), older)
