"""Rollout buffer of segments with their memory, and its minibatches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.numerics import ADVICE, OutputCheck
from rlxf.agents.gtrxl.observations import map_obs, obs_tensors
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.state_buffer import RecurrentStateBuffer, SegmentPlaces, StateBuffer
from rlxf.attention import State, TokenIndex
from rlxf.attention.memory.base import NoMemory
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.token_index import EMPTY
from rlxf.training import NumericalError
from rlxf.training.process_group import ProcessGroup


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
        weight: (N,), 1 for a step to train on, 0 for a reset step.
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

    def split(self, parts: int) -> "Sequence[SegmentBatch]":
        """Split the segments into at most ``parts`` minibatches of nearly equal size, as views."""
        bounds = torch.arange(len(self.index.position)).tensor_split(parts)
        return [self._between(int(own[0]), int(own[-1]) + 1) for own in bounds if len(own)]

    def _between(self, first: int, end: int) -> "SegmentBatch":
        """Return the segments from ``first`` to ``end`` (exclusive)."""
        length = self.index.shape[1]
        segments, steps = slice(first, end), slice(first * length, end * length)
        by_step = {name: x for name, x in vars(self).items() if name not in ("index", "state")}
        own: Any = {name: map_obs(lambda x: x[steps], x) for name, x in by_step.items()}
        return type(self)(**own, index=self.index.rows(segments), state=self.state.rows(segments))


@dataclass(frozen=True, eq=False)
class RolloutStep:
    """Step of the policy in E environments, without its results.

    Args:
        obs: E observations.
        previous: (E, A), the encoded previous actions.
        index: (E, 1), positions and episodes of the step.
        hidden: (L, E, C), the inputs of each layer.
        recurrent: states of the recurrent layers before the step; None without recurrent layers.
        actions: (E, ...), as sampled.
        values: (E,), value estimates.
        log_probs: (E,), log probabilities of the actions.
        check: check of the transformer's outputs, to be called when the actions are on the CPU.
    """

    obs: PyTorchObs
    previous: Tensor
    index: TokenIndex
    hidden: Tensor
    recurrent: RecurrentState | None
    actions: Tensor
    values: Tensor
    log_probs: Tensor
    check: OutputCheck


STORED = ("previous", "actions", "log_probs", "values", "returns", "weight")
"""Fields of a `SegmentBatch` that `SegmentBuffer` holds under the same names."""


class SegmentBuffer:
    """Rollout buffer for E environments, which includes the memory of M steps before the rollout.

    The inputs of each layer are stored once for every step: (L, E, M + steps, C). The memory of a segment
    that begins at step s is the slice [s, s + M) of it, a view. Older steps that one layer reads, as
    with `KNN` memory, are stored separately, once. The states of recurrent layers are stored at the starts of
    segments only.

    Unlike in the buffers of Stable-Baselines3, all fields are tensors whose first axes are (E, steps).

    Args:
        policy: policy that acts; it determines spaces, sizes of the transformer and device.
        n_envs: environments E.
        n_steps: steps of a rollout; a multiple of ``segment_length``.
        segment_length: steps T through which gradients flow.
        observation_space: space of the observations to store; None for that of the policy.
    """

    hidden: Tensor
    """Inputs of each layer at the last M steps and at the steps of the rollout, (L, E, M + steps, C)."""
    index: TokenIndex
    """Positions and episodes of the last M steps and of the steps of the rollout, (E, M + steps)."""

    def __init__(
        self,
        policy: GTrXLPolicy,
        n_envs: int,
        n_steps: int,
        segment_length: int,
        observation_space: spaces.Space[Any] | None = None,
    ):
        core, device = policy.core, policy.device
        memory = core.memory or NoMemory()
        self.n_envs = n_envs
        self.n_steps = n_steps
        self.segment_length = segment_length
        self.memory_length = memory.length
        self.obs = map_obs(
            lambda x: torch.from_numpy(x).to(device, copy=True).unflatten(0, (n_envs, n_steps)),
            create_empty_array(observation_space or policy.observation_space, n_envs * n_steps),
        )
        self.previous = torch.zeros(n_envs, n_steps, policy.encoded_action_width, device=device)
        self.actions = _empty_actions(policy.action_space, (n_envs, n_steps), device)
        self.rewards, self.values, self.log_probs, self.advantages, self.returns = (
            torch.zeros(n_envs, n_steps, device=device) for _ in range(5)
        )
        self.dones = torch.zeros(n_envs, n_steps, dtype=torch.bool, device=device)
        state_buffer = partial(StateBuffer, width=core.width, n_envs=n_envs, n_steps=n_steps, device=device)
        self.recent = state_buffer(core.layers, self.memory_length)
        self.hidden, self.index = self.recent.hidden, self.recent.index
        self.recurrent = RecurrentStateBuffer(n_steps // segment_length)
        self._older_layer = memory.older_layer(core.layers)
        older_length = memory.capacity - self.memory_length
        self.older = None if self._older_layer is None else state_buffer(1, older_length)
        self.step = 0
        self._weight: Tensor | None = None
        self._per_environment = n_steps // segment_length
        self._n_segments = n_envs * self._per_environment

    @property
    def weight(self) -> Tensor:
        """Weights (E, steps): 1 for a step to train on, 0 for a reset step."""
        if self._weight is None:
            self._weight = (self.index.episode[:, self.memory_length :] != EMPTY).to(self.rewards.dtype)
        return self._weight

    @property
    def steps_index(self) -> TokenIndex:
        """Positions and episodes of the steps of the rollout, (E, steps)."""
        return self.index.at(slice(self.memory_length, None))

    @property
    def filled(self) -> float:
        """Fraction of the memory at the end of the rollout that belongs to the current episode."""
        episode = self.index.episode[:, self.step :]
        return ((episode == episode[:, -1:]) & (episode != EMPTY)).float().mean().item()

    def clear_memory(self) -> None:
        """Clear the memory before the next rollout."""
        self.recent.clear()
        if self.older is not None:
            self.older.clear()
        self.step = 0
        self._weight = None

    def _state(self, select: Callable[[StateBuffer], State]) -> State:
        """Return the selected states of the last M steps, with those of older steps, if they are stored."""
        older = None if self.older is None else select(self.older)
        return replace(select(self.recent), older=older)

    @property
    def memory(self) -> State:
        """Memory at the start of the next rollout: the last M steps, as views, without recurrent states."""
        return self._state(lambda states: states.before(self.step))

    def start_rollout(self) -> State:
        """Start a new rollout, and return its memory as `memory` did."""
        steps, self.step = self.step, 0
        return self._state(lambda states: states.start_rollout(steps))

    def replace_memory(self, state: State) -> None:
        """Replace the memory before the rollout, M steps."""
        self.recent.replace_memory(state)
        if self.older is not None and state.older is not None:
            self.older.replace_memory(state.older)

    def add(self, step: RolloutStep, rewards: Tensor, dones: Tensor, index: TokenIndex) -> None:
        """Store one step of all environments.

        Args:
            step: the step of the policy.
            rewards: (E,).
            dones: (E,) bool, whether the step ended its episode.
            index: (E, 1), position and episode; episode -1 for reset steps and crashed environments.
        """
        for stored, new in zip(obs_tensors(self.obs), obs_tensors(step.obs), strict=True):
            stored[:, self.step] = new
        for name in ("previous", "actions", "values", "log_probs"):
            getattr(self, name)[:, self.step] = getattr(step, name)
        self.rewards[:, self.step], self.dones[:, self.step] = rewards, dones
        if self.older is not None and self._older_layer is not None:
            leaving = self.recent.before(self.step).at(slice(1))
            self.older.add(self.step, leaving.hidden[self._older_layer, None, :, 0], leaving.index)
        if self.step % self.segment_length == 0:
            self.recurrent.add(self.step // self.segment_length, step.recurrent)
        self.recent.add(self.step, step.hidden, index)
        self._weight = None
        self.step += 1

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
        for chosen in self.shuffled(segments, generator, ranks.world_size):
            own = ranks.local_indices(chosen, self._n_segments)
            batch = self.segments(own if len(own) else own.new_zeros(1), advantages)
            yield batch if len(own) else replace(batch, weight=torch.zeros_like(batch.weight))

    def shuffled(self, segments: int, generator: torch.Generator, processes: int = 1) -> Sequence[Tensor]:
        """Return the numbers of all segments in random order, on the CPU, in minibatches of ``segments``."""
        return torch.randperm(self._n_segments * processes, generator=generator).split(segments)

    def segments(self, chosen: Tensor, advantages: Tensor) -> SegmentBatch:
        """Return the segments with numbers ``chosen`` (B,), on the CPU, which are counted by environment."""
        places = SegmentPlaces.of(chosen, self._per_environment, self.hidden.device)
        rows = partial(self._rows, places=places)
        state = self._state(lambda x: x.before_segments(places, self.segment_length))
        return SegmentBatch(
            obs=map_obs(rows, self.obs),
            advantages=rows(advantages),
            index=self.recent.select(places, lambda x: self._by_segment(x[:, self.memory_length :])),
            state=replace(state, recurrent=self.recurrent.before_segments(places)),
            **{name: rows(getattr(self, name)) for name in STORED},
        )

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the steps of the chosen segments (B,) of x (E, steps, ...), flattened: (B T, ...)."""
        return self._rows(x, SegmentPlaces.of(chosen, self._per_environment, x.device))

    def _rows(self, x: Tensor, places: SegmentPlaces) -> Tensor:
        return self._by_segment(x)[places.on_device].flatten(0, 1)

    def _by_segment(self, x: Tensor) -> Tensor:
        """View x (E, steps, ...) as (E, segments, T, ...)."""
        return x.unflatten(1, (-1, self.segment_length))


def _empty_actions(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros in the format of SB3's distributions: Box actions flattened, discrete ones as int64."""
    whole = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    dtype = torch.long if whole else torch.float32
    shape = (spaces.utils.flatdim(space),) if isinstance(space, spaces.Box) else space.shape
    return torch.zeros(*batch, *shape, dtype=dtype, device=device)  # type: ignore[misc]
