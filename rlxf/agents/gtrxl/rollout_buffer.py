"""Rollout buffer of segments with their memory; hidden states are stored once, windows are views."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.numerics import ADVICE
from rlxf.agents.gtrxl.gae import generalized_advantage_estimate
from rlxf.agents.gtrxl.memory_recompute import LongRangeBuffer
from rlxf.attention import KNN, State, TokenIndex, TransformerSpec
from rlxf.attention.token_index import EMPTY
from rlxf.training import NumericalError
from rlxf.training.distributed.group import ProcessGroup


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Minibatch of B segments of T steps, with their N = B T steps flattened.

    Args:
        obs: N observations.
        previous: (N, A), the encoded previous actions.
        actions: (N, ...), actions taken in the rollout.
        log_probs: (N,), log probabilities of the actions in the rollout.
        values: (N,), value estimates in the rollout.
        advantages: (N,), advantage estimates.
        returns: (N,), targets of the values.
        weight: (N,), 1 for a step to train on, 0 for a filler row.
        index: (B, T), positions and episodes of the steps.
        state: memory before each segment.
    """

    obs: PyTorchObs
    previous: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weight: Tensor
    index: TokenIndex
    state: State


class SegmentBuffer:
    """Rollout buffer for E environments, which includes the memory of M steps before the rollout.

    The inputs of each layer are stored once for every step: (L, E, M + steps, C). The memory of a segment
    that begins at step s is the slice [s, s + M) of it, a view. The long-range memory of a `KNN` layer is
    stored separately in `LongRangeBuffer`.

    Args:
        observation_space: observation space of an environment.
        action_space: action space of an environment.
        core: specification of the transformer.
        encoded_action_width: size A of an encoded action.
        n_envs: environments E.
        n_steps: steps of a rollout; a multiple of ``segment_length``.
        segment_length: steps T through which gradients flow.
        device: device of the buffer.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        core: TransformerSpec,
        encoded_action_width: int,
        n_envs: int,
        n_steps: int,
        segment_length: int,
        device: torch.device,
    ):
        assert core.memory is not None
        self.n_envs, self.n_steps, self.segment_length = n_envs, n_steps, segment_length
        self.memory_length = core.memory.length
        self.obs = _empty_observations(observation_space, (n_envs, n_steps), device)
        self.previous = torch.zeros(n_envs, n_steps, encoded_action_width, device=device)
        self.actions = _empty_actions(action_space, (n_envs, n_steps), device)
        self.rewards, self.values, self.log_probs, self.advantages, self.returns = (
            torch.zeros(n_envs, n_steps, device=device) for _ in range(5)
        )
        self.dones = torch.zeros(n_envs, n_steps, dtype=torch.bool, device=device)
        length = self.memory_length + n_steps
        self.hidden = torch.zeros(core.layers, n_envs, length, core.width, device=device)
        self.index = TokenIndex.empty(n_envs, length, device)
        self.older = LongRangeBuffer(core, n_envs, n_steps, device) if isinstance(core.memory, KNN) else None
        self.step = 0

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        observations = self.obs.values() if isinstance(self.obs, dict) else [self.obs]
        steps = [self.previous, self.actions, self.rewards, self.values, self.log_probs]
        steps += [self.advantages, self.returns]
        memory = [self.hidden, self.index.position, self.index.episode, self.dones]
        memory += [] if self.older is None else self.older.tensors
        return sum(tensor.nbytes for tensor in [*observations, *steps, *memory])

    @property
    def weight(self) -> Tensor:
        """Weights (E, steps): 1 for a step to train on, 0 for a filler row."""
        return (self.index.episode[:, self.memory_length :] != EMPTY).to(self.rewards.dtype)

    @property
    def steps_index(self) -> TokenIndex:
        """Positions and episodes of the steps of the rollout, (E, steps)."""
        return self.index.at(slice(self.memory_length, None))

    @property
    def filled(self) -> float:
        """Share of the memory at the end of the rollout that belongs to the current episode."""
        episode = self.index.episode[:, self.step :]
        return ((episode == episode[:, -1:]) & (episode != EMPTY)).float().mean().item()

    def clear_memory(self) -> None:
        """Clear the memory before the next rollout."""
        self.index.position.zero_()
        self.index.episode.fill_(EMPTY)
        if self.older is not None:
            self.older.clear()
        self.step = 0

    @property
    def memory(self) -> State:
        """Memory at the start of the next rollout: the last M steps, as views."""
        last = slice(self.step, self.step + self.memory_length)
        older = None if self.older is None else self.older.at(self.step)
        return State(self.hidden[:, :, last], self.index.at(last), older)

    def start_rollout(self) -> State:
        """Start a new rollout, and return its memory: the last M steps of the previous rollout."""
        memory, last = slice(0, self.memory_length), slice(self.step, self.step + self.memory_length)
        self.hidden[:, :, memory] = self.hidden[:, :, last].clone()
        for numbers in (self.index.position, self.index.episode):
            numbers[:, memory] = numbers[:, last].clone()
        older = None if self.older is None else self.older.start_rollout(self.step)
        self.step = 0
        return State(self.hidden[:, :, memory], self.index.at(memory), older)

    def replace_memory(self, state: State) -> None:
        """Replace the memory before the rollout, M steps."""
        memory = slice(self.memory_length)
        self.hidden[:, :, memory] = state.hidden
        self.index.position[:, memory], self.index.episode[:, memory] = (
            state.index.position,
            state.index.episode,
        )
        if self.older is not None and state.older is not None:
            self.older.replace(state.older)

    def add(
        self,
        obs: PyTorchObs,
        previous: Tensor,
        actions: Tensor,
        rewards: Tensor,
        dones: Tensor,
        values: Tensor,
        log_probs: Tensor,
        hidden: Tensor,
        index: TokenIndex,
    ) -> None:
        """Store one step of all environments.

        Args:
            obs: E observations before the step.
            previous: (E, A), the encoded previous actions.
            actions: (E, ...), as sampled.
            rewards: (E,).
            dones: (E,) bool, whether the step ended its episode.
            values: (E,).
            log_probs: (E,).
            hidden: (L, E, C), the inputs of each layer.
            index: (E, 1), position and episode; episode -1 for a filler row.
        """
        for stored, new in zip(_parts(self.obs), _parts(obs), strict=True):
            stored[:, self.step] = new
        self.previous[:, self.step], self.actions[:, self.step] = previous, actions
        self.rewards[:, self.step], self.dones[:, self.step] = rewards, dones
        self.values[:, self.step], self.log_probs[:, self.step] = values, log_probs
        if self.older is not None:
            dropped = slice(self.step, self.step + 1)
            self.older.add(self.step, self.hidden[:, :, self.step], self.index.at(dropped))
        place = self.memory_length + self.step
        self.hidden[:, :, place] = hidden
        self.index.position[:, place], self.index.episode[:, place] = (
            index.position[:, 0],
            index.episode[:, 0],
        )
        self.step += 1

    def finish(self, next_values: Tensor, gamma: float, gae_lambda: float, critic_lambda: float) -> None:
        """Compute advantages and returns.

        Args:
            next_values: (E,), values of the observations after the last step.
            gamma: discount factor.
            gae_lambda: lambda of the advantages.
            critic_lambda: lambda of the returns, ``G_t = A_t(critic_lambda) + V(s_t)``.
        """
        rewards, values, dones = self.rewards.T, self.values.T, self.dones.T
        steps = rewards, values, next_values, dones, gamma
        self.advantages.copy_(generalized_advantage_estimate(*steps, gae_lambda).T)
        self.returns.copy_(generalized_advantage_estimate(*steps, critic_lambda).T + self.values)

    def check_finite(self, environments: Sequence[int]) -> None:
        """Raise NumericalError unless all advantages and returns are finite.

        Args:
            environments: numbers of the E environments, for the message.
        """
        for name, numbers in {"advantage": self.advantages, "return": self.returns}.items():
            if not numbers.isfinite().all():
                row, step = (~numbers.isfinite()).nonzero()[0].tolist()
                value = numbers[row, step].item()
                raise NumericalError(
                    f"the {name} of environment {environments[row]} is {value} at step {step} of the "
                    f"rollout: its values or rewards are too large; {ADVICE}"
                )

    def minibatches(
        self, segments: int, advantages: Tensor, generator: torch.Generator, ranks: ProcessGroup
    ) -> Iterator[SegmentBatch]:
        """Yield all segments once in random order, in minibatches of ``segments``.

        The segments of all processes are shuffled together. Each process yields its own segments of a
        minibatch, so their number varies. A process without a segment in a minibatch yields one of weight 0.

        Args:
            segments: segments in a minibatch of all processes; the last minibatch may have fewer.
            advantages: (E, steps), normalized if required.
            generator: generator of the order, with the same state in all processes.
            ranks: the process group; all processes have the same number of environments.
        """
        number = self.n_envs * self._per_environment
        for chosen in _shuffled(number * ranks.count, segments, generator):
            own = ranks.local_indices(chosen, number).to(self.hidden.device)
            yield self.segments(own, advantages) if len(own) else self._of_no_weight(advantages)

    def _of_no_weight(self, advantages: Tensor) -> SegmentBatch:
        first = self.segments(torch.zeros(1, dtype=torch.long, device=self.hidden.device), advantages)
        return replace(first, weight=torch.zeros_like(first.weight))

    def shuffled(self, segments: int, generator: torch.Generator) -> Sequence[Tensor]:
        """Return the numbers of all segments in random order, in minibatches of ``segments``."""
        number = self.n_envs * self._per_environment
        return [chosen.to(self.hidden.device) for chosen in _shuffled(number, segments, generator)]

    def segments(self, chosen: Tensor, advantages: Tensor) -> SegmentBatch:
        """Return the segments with numbers ``chosen`` (B,), counted environment by environment."""
        rows = partial(self.rows, chosen=chosen)
        obs = {key: rows(x) for key, x in self.obs.items()} if isinstance(self.obs, dict) else rows(self.obs)
        environment, number = chosen // self._per_environment, chosen % self._per_environment
        position, episode = (self._after_memory(x)[environment, number] for x in self._index_parts)
        return SegmentBatch(
            obs=obs,
            previous=rows(self.previous),
            actions=rows(self.actions),
            log_probs=rows(self.log_probs),
            values=rows(self.values),
            advantages=rows(advantages),
            returns=rows(self.returns),
            weight=rows(self.weight),
            index=TokenIndex(position, episode),
            state=self._memory_before(environment, number),
        )

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the steps of the chosen segments (B,) of x (E, steps, ...), flattened: (B T, ...)."""
        return x.unflatten(1, (-1, self.segment_length)).flatten(0, 1)[chosen].flatten(0, 1)

    @property
    def _per_environment(self) -> int:
        return self.n_steps // self.segment_length

    @property
    def _index_parts(self) -> tuple[Tensor, Tensor]:
        return self.index.position, self.index.episode

    def _after_memory(self, x: Tensor) -> Tensor:
        """Return the steps of the rollout in x (E, M + steps) by segment, (E, S, T)."""
        return x[:, self.memory_length :].unflatten(1, (-1, self.segment_length))

    def _memory_before(self, environment: Tensor, number: Tensor) -> State:
        """Return the memory before segment ``number`` (B,) of ``environment`` (B,)."""
        hidden = _windows(self.hidden, 2, self.memory_length, self.segment_length)[:, environment, number]
        position, episode = (
            _windows(x, 1, self.memory_length, self.segment_length)[environment, number]
            for x in self._index_parts
        )
        older = None if self.older is None else self.older.before(environment, number * self.segment_length)
        return State(hidden, TokenIndex(position, episode), older)


def _shuffled(number: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Return the integers below ``number`` in random order, in batches of ``size``."""
    return torch.randperm(number, generator=generator).split(size)


def _windows(x: Tensor, axis: int, length: int, stride: int) -> Tensor:
    """Return windows of ``length`` along ``axis``, ``stride`` apart, in a new axis before it, as a view."""
    return x.unfold(axis, length, stride).movedim(-1, axis + 1)


def _parts(obs: PyTorchObs) -> list[Tensor]:
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def _empty_observations(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> PyTorchObs:
    if isinstance(space, spaces.Dict):
        return {key: _empty_like(part, batch, device) for key, part in space.spaces.items()}
    return _empty_like(space, batch, device)


def _empty_actions(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros in the format of SB3's distributions: Box actions flattened, discrete ones as int64."""
    whole = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    dtype = torch.long if whole else torch.float32
    shape = (spaces.utils.flatdim(space),) if isinstance(space, spaces.Box) else space.shape
    return torch.zeros(*batch, *shape, dtype=dtype, device=device)  # type: ignore[misc]


def _empty_like(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(*batch, *(space.shape or ()), dtype=dtype, device=device)
