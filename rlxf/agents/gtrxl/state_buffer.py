"""Buffers of the memory states of a rollout: hidden states are stored once, windows of them are views."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rlxf.attention import State, TokenIndex
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.token_index import EMPTY

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
        windows = partial(_windows, length=self.length, stride=segment_length)
        hidden = windows(self.hidden, axis=2)[:, environment, segment]
        return State(hidden, self.select(places, partial(windows, axis=1)))


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


def _windows(x: Tensor, axis: int, length: int, stride: int) -> Tensor:
    """Return windows of ``length`` along ``axis``, ``stride`` apart, in a new axis before it, as a view."""
    return x.unfold(axis, length, stride).movedim(-1, axis + 1)
