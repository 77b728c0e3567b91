"""Rollout buffer of segments with their memory; hidden states are stored once, windows are views."""

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
from rlxf.agents.gtrxl.policy import GTrXLPolicy
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


Place = tuple[Tensor, Tensor]
"""Number of the environment (B,), and number of the segment among those of the environment (B,)."""


@dataclass(frozen=True, eq=False)
class SegmentPlaces:
    """Places of B segments of a rollout.

    Args:
        on_cpu: the places on the CPU, where minibatches are drawn.
        on_device: the places on the device of the buffer.
    """

    on_cpu: Place
    on_device: Place

    @classmethod
    def of(cls, chosen: Tensor, per_environment: int, device: torch.device) -> "SegmentPlaces":
        """Return the places of segments ``chosen`` (B,), counted environment by environment."""
        place = chosen // per_environment, chosen % per_environment
        environment, segment = (x.to(device, non_blocking=True) for x in place)
        return cls(place, (environment, segment))


class StateBuffer:
    """Inputs of layers at the steps of a rollout and at the N steps before it, (L, E, N + steps, C).

    Every step is stored once. The N steps before step s of the rollout are the slice [s, s + N), a view.
    With N = 0 only positions and episodes are stored.

    Args:
        layers: layers L whose inputs are stored.
        length: steps N of the memory.
        width: features C.
        n_envs: environments E.
        n_steps: steps of a rollout.
        device: device of the buffer.
    """

    def __init__(self, layers: int, length: int, width: int, n_envs: int, n_steps: int, device: torch.device):
        self.length = length
        stored = length + n_steps if length else 0
        self.hidden = torch.zeros(layers, n_envs, stored, width, device=device)
        self.index = TokenIndex.empty(n_envs, length + n_steps, device)
        self._index_on_cpu: TokenIndex | None = None

    def clear(self) -> None:
        """Clear all steps."""
        self._index_on_cpu = None
        self.index.position.zero_()
        self.index.episode.fill_(EMPTY)

    def before(self, step: int) -> State:
        """Return the N steps before a step of the rollout, as views."""
        memory = slice(step, step + self.length)
        return State(self.hidden[:, :, memory], self.index.at(memory))

    def start_rollout(self, steps: int) -> State:
        """Start a rollout after one of ``steps`` steps, and return the memory at its start."""
        last = self.before(steps)
        self.replace_memory(State(last.hidden.clone(), last.index))  # the two may overlap
        return self.before(0)

    def replace_memory(self, state: State) -> None:
        """Replace the N steps before the rollout."""
        self._index_on_cpu = None
        memory = slice(self.length)
        self.hidden[:, :, memory] = state.hidden
        self.index.position[:, memory] = state.index.position.clone()
        self.index.episode[:, memory] = state.index.episode.clone()

    def add(self, step: int, hidden: Tensor, index: TokenIndex) -> None:
        """Store a step of the rollout: hidden (L, E, C), index (E, 1)."""
        self._index_on_cpu = None
        if self.length:
            self.hidden[:, :, self.length + step] = hidden
        self.index.write(slice(None), self.length + step, index)

    def select(self, places: "SegmentPlaces", windows: Callable[[Tensor], Tensor]) -> TokenIndex:
        """Return the index of slots of B segments, and with it `TokenIndex.on_cpu`.

        An accelerator is read once after each rollout, not for each minibatch.

        Args:
            places: the segments.
            windows: arranges positions or episodes (E, N + steps) as slots (E, segments, ...).
        """
        chosen = TokenIndex(
            *(windows(x)[places.on_device] for x in (self.index.position, self.index.episode))
        )
        if self.hidden.device.type == "cpu":
            return chosen
        if self._index_on_cpu is None:
            self._index_on_cpu = replace(self.index).on_cpu
        values = self._index_on_cpu.position, self._index_on_cpu.episode
        return chosen.with_values(TokenIndex(*(windows(x)[places.on_cpu] for x in values)))

    def before_segments(self, places: "SegmentPlaces", segment_length: int) -> State:
        """Return the N steps before each of B segments, in order of time."""
        environment, segment = places.on_device
        if not self.length:
            return State(self.hidden[:, environment], TokenIndex.empty(len(segment), 0, self.hidden.device))
        window = self.length, segment_length
        hidden = _windows(self.hidden, 2, *window)[:, environment, segment]
        return State(hidden, self.select(places, lambda x: _windows(x, 1, *window)))


class RecurrentStateBuffer:
    """States of the recurrent layers at the starts of the segments of a rollout.

    Args:
        segments: segments of a rollout.
    """

    def __init__(self, segments: int):
        self._segments = segments
        self._states: RecurrentState | None = None

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._states is None else sum(x.nbytes for x in self._states.named_tensors().values())

    def add(self, segment: int, state: RecurrentState | None) -> None:
        """Store the state of E environments before segment ``segment``; None without recurrent layers."""
        if state is None:
            return
        if self._states is None:
            self._states = state.map(lambda x: x.new_zeros(self._segments, *x.shape))
        for stored, x in zip(
            self._states.named_tensors().values(), state.named_tensors().values(), strict=True
        ):
            stored[segment] = x

    def before_segments(self, places: "SegmentPlaces") -> RecurrentState | None:
        """Return the states before each of B segments."""
        environment, segment = places.on_device
        return None if self._states is None else self._states.map(lambda x: x[segment, environment])


class SegmentBuffer:
    """Rollout buffer for E environments, which includes the memory of M steps before the rollout.

    The inputs of each layer are stored once for every step: (L, E, M + steps, C). The memory of a segment
    that begins at step s is the slice [s, s + M) of it, a view. Older steps that one layer reads, as
    with `KNN` memory, are stored separately, once. The states of recurrent layers are stored at the starts of
    segments only.

    Args:
        policy: policy that acts; it determines spaces, sizes of the transformer and device.
        n_envs: environments E.
        n_steps: steps of a rollout; a multiple of ``segment_length``.
        segment_length: steps T through which gradients flow.
    """

    hidden: Tensor
    """Inputs of each layer at the last M steps and at the steps of the rollout, (L, E, M + steps, C)."""
    index: TokenIndex
    """Positions and episodes of the last M steps and of the steps of the rollout, (E, M + steps)."""

    def __init__(self, policy: GTrXLPolicy, n_envs: int, n_steps: int, segment_length: int):
        core, device = policy.core, policy.device
        memory = core.memory or NoMemory()
        self.n_envs, self.n_steps, self.segment_length = n_envs, n_steps, segment_length
        self.memory_length = memory.length
        self.obs = map_obs(
            lambda x: torch.from_numpy(x).to(device, copy=True).unflatten(0, (n_envs, n_steps)),
            create_empty_array(policy.observation_space, n_envs * n_steps),
        )
        self.previous = torch.zeros(n_envs, n_steps, policy.encoded_action_width, device=device)
        self.actions = _empty_actions(policy.action_space, (n_envs, n_steps), device)
        self.rewards, self.values, self.log_probs, self.advantages, self.returns = (
            torch.zeros(n_envs, n_steps, device=device) for _ in range(5)
        )
        self.dones = torch.zeros(n_envs, n_steps, dtype=torch.bool, device=device)
        sizes = core.width, n_envs, n_steps, device
        self.recent = StateBuffer(core.layers, self.memory_length, *sizes)
        self.hidden, self.index = self.recent.hidden, self.recent.index
        self.recurrent = RecurrentStateBuffer(n_steps // segment_length)
        self._older_layer = memory.older_layer(core.layers)
        older_length = memory.capacity - self.memory_length
        self.older = None if self._older_layer is None else StateBuffer(1, older_length, *sizes)
        self.step, self._per_environment = 0, n_steps // segment_length
        self._n_segments = n_envs * self._per_environment

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
        self.recent.clear()
        if self.older is not None:
            self.older.clear()
        self.step = 0

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
            index: (E, 1), position and episode; episode -1 for filler rows and crashed environments.
        """
        for stored, new in zip(_parts(self.obs), _parts(step.obs), strict=True):
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
        """Return the segments with numbers ``chosen`` (B,), counted environment by environment."""
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


def _windows(x: Tensor, axis: int, length: int, stride: int) -> Tensor:
    """Return windows of ``length`` along ``axis``, ``stride`` apart, in a new axis before it, as a view."""
    return x.unfold(axis, length, stride).movedim(-1, axis + 1)


def map_obs(function: Callable[..., Any], obs: Any, *others: Any) -> Any:
    """Apply a function to observations, or to each entry of Dict observations."""
    if isinstance(obs, dict):
        return {key: function(x, *(other[key] for other in others)) for key, x in obs.items()}
    return function(obs, *others)


def _parts(obs: PyTorchObs) -> list[Tensor]:
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def _empty_actions(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros in the format of SB3's distributions: Box actions flattened, discrete ones as int64."""
    whole = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    dtype = torch.long if whole else torch.float32
    shape = (spaces.utils.flatdim(space),) if isinstance(space, spaces.Box) else space.shape
    return torch.zeros(*batch, *shape, dtype=dtype, device=device)  # type: ignore[misc]
