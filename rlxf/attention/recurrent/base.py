"""Interface of recurrent mixers, their states, and the episodes of the tokens that they read."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.technique import SpecView, Technique
from rlxf.attention.token_index import EMPTY, TokenIndex, is_tracing
from rlxf.utils.checks import MAX_FLOAT

MixerState = dict[str, Tensor]
"""State of a mixer by name; the first axis of each tensor is the batch B."""


@dataclass(frozen=True, eq=False)
class EpisodeRuns:
    """Episodes of T consecutive tokens: where the state is reset, and which slots hold no token.

    Args:
        reset: (B, T) bool, true where the state is reset before the token is read.
        valid: (B, T) bool, false for an empty slot, which must leave the state unchanged.
        position: (B, T) int64, steps since the start of the episode, from 0.
        last_episode: (B,) int64, episode of the last token; -1 if there was none.
    """

    reset: Tensor
    valid: Tensor
    position: Tensor
    last_episode: Tensor

    @classmethod
    def of(cls, index: TokenIndex, episode: Tensor) -> "EpisodeRuns":
        """Derive the runs of tokens at ``index`` (B, T) after a token of ``episode`` (B,), -1 for none."""
        valid = index.episode != EMPTY
        if index.shape[1] == 1:
            before = episode[:, None]
            last = torch.where(valid, index.episode, before)[:, 0]
            return cls(valid & (index.episode != before), valid, index.position, last)
        known = torch.cat([episode[:, None], index.episode], dim=1)
        slot = torch.arange(known.shape[1], device=known.device).expand_as(known)
        last = slot.masked_fill(known == EMPTY, 0).cummax(dim=1).values
        latest = known.gather(1, last)
        return cls(valid & (index.episode != latest[:, :-1]), valid, index.position, latest[:, -1])

    @cached_property
    def number(self) -> Tensor:
        """Number of resets up to each token, (B, T) int64; tokens with number 0 continue the given state."""
        return self.reset.cumsum(dim=1)

    @property
    def continues(self) -> Tensor:
        """True for tokens that depend on the state before the segment, (B, T) bool."""
        return self.number == 0

    def decays(self, decay: Tensor) -> Tensor:
        """Return factors (B, T, ...) of the state: 0 at resets, 1 at empty slots, else ``decay``."""
        decay = torch.where(unsqueeze_like(self.valid, decay), decay, torch.ones_like(decay))
        return decay.masked_fill(unsqueeze_like(self.reset, decay), 0)

    def inputs(self, x: Tensor) -> Tensor:
        """Return inputs (B, T, ...) of the state: 0 at empty slots."""
        return x.masked_fill(~unsqueeze_like(self.valid, x), 0)


def unsqueeze_like(mask: Tensor, x: Tensor) -> Tensor:
    """Add axes to a mask (B,) or (B, T) so that it broadcasts over x (B, ...) or (B, T, ...)."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))


DEFAULT_HORIZON = 1000
"""Default of the option ``horizon`` of mixers: episodes of common memory tasks have at most 1,000 steps."""


def time_constants(horizon: int, number: int) -> Tensor:
    """Return ``number`` time constants in tokens, (number,), from ``horizon`` down to 1, evenly in log.

    A mixer whose state decays by ``1 / e`` within these numbers of tokens remembers both recent and distant
    tokens before it is trained. With the usual gates, which halve the state at each token, gradients of
    distant tokens vanish.

    Source: chrono initialization of Tallec and Ollivier 2018, arXiv:1804.11188, section 2.
    """
    return torch.logspace(math.log10(horizon), 0, number)


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """Return a state of zeros in the dtype of the weight, but at least in float32.

    States sum over thousands of tokens, for which bfloat16 has too few digits.
    """
    return weight.new_zeros(shape, dtype=torch.promote_types(weight.dtype, torch.float32))


LARGEST_GAIN = MAX_FLOAT**0.5 / (10_000 * 1000)
"""Largest factor of the inputs of a state.

Inputs up to 1,000, added 10,000 times with this factor, give a state whose square is finite in float32.
"""

LARGEST_LOG_GAIN = math.log(LARGEST_GAIN)
"""Largest logarithm of a rate, an angle or a gain of a state."""


class RecurrentMixer(nn.Module, ABC):
    """Token mixer of one layer: maps inputs and a state to outputs and the next state.

    One call over T tokens gives the same outputs and the same state as T calls over one token each.
    """

    limits: ClassVar[Mapping[str, float]] = {}
    """Largest value of each parameter that is a rate, angle or gain of the state or its logarithm, by name.

    Other finite parameters cannot make a state grow, because gates and norms bound the factors of the state
    by 1. The exception is `SHM`, whose factors depend on the tokens.
    """

    @abstractmethod
    def initial_state(self, batch: int) -> MixerState:
        """Return the state before the first token of an episode, for ``batch`` rows."""

    @abstractmethod
    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        """Compute the outputs of T tokens and the state after the last of them.

        Args:
            x: inputs, (B, T, C).
            runs: episodes of the tokens.
            state: state before the first token.

        Returns:
            The outputs (B, T, C), undefined at empty slots, and the state after the last token.
        """


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """States of the recurrent layers of a transformer, of a size that does not depend on the episode.

    Args:
        passes: state of each pass; empty for a pass with attention.
        episode: (B,) int64, episode of the last token; -1 before the first one.
        memory: part of the memory that lasts from segment to segment; empty for most memories.
        techniques: names of the recurrence and of the memory to which the states belong.
    """

    passes: tuple[MixerState, ...]
    episode: Tensor
    memory: MixerState = field(default_factory=dict)
    techniques: tuple[str, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> "RecurrentState":
        """Apply a function to each tensor."""
        passes = tuple({name: function(x) for name, x in state.items()} for state in self.passes)
        memory = {name: function(x) for name, x in self.memory.items()}
        return replace(self, passes=passes, episode=function(self.episode), memory=memory)

    def rows(self, rows: Tensor | slice) -> "RecurrentState":
        """Return the selected rows of the batch: a bool (B,) mask, int64 (N,) row numbers, or a slice."""
        return self.map(lambda x: x[rows])

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, ``PASS.NAME`` or ``memory.NAME``, with passes counted from 0."""
        names = {f"{n}.{name}": x for n, state in enumerate(self.passes) for name, x in state.items()}
        names |= {f"memory.{name}": x for name, x in self.memory.items()}
        return names | {"episode": self.episode}

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor without the batch axis, by the names of `named_tensors`."""
        return {name: tuple(x.shape[1:]) for name, x in self.named_tensors().items()}

    def first_fault(self, most: float = math.inf) -> tuple[int | None, str, float, int] | None:
        """Return pass, name, value and row of the first value that is not finite or larger than ``most``.

        The pass is None for the part of the memory. None if there is no such value.
        """
        for number, state in [*enumerate(self.passes), (None, self.memory)]:
            for name, x in state.items():
                if not all_within(x, most):
                    faulty = ~(x.isfinite() & (x.abs() <= most))
                    return number, name, x[faulty][0].item(), int(faulty.nonzero()[0, 0])
        return None

    def from_named(self, tensors: Mapping[str, Tensor]) -> "RecurrentState":
        """Return the state with the tensors of `named_tensors` in place of those of this state.

        Raises:
            KeyError: if a tensor is missing.
            ValueError: if shape or dtype of a tensor is not that of this state.
        """
        for name, x in self.named_tensors().items():
            stored = tensors[name]
            if stored.shape != x.shape or stored.dtype != x.dtype:
                raise ValueError(
                    f"the recurrent state {name} has shape {tuple(stored.shape)} and dtype {stored.dtype}, "
                    f"but this core and these environments need {tuple(x.shape)} and {x.dtype}"
                )
        passes = ({name: tensors[f"{n}.{name}"] for name in state} for n, state in enumerate(self.passes))
        memory = {name: tensors[f"memory.{name}"] for name in self.memory}
        return replace(self, passes=tuple(passes), episode=tensors["episode"], memory=memory)


class RecurrentPasses:
    """Recurrent layers in one call of a transformer: they share the episodes, and each replaces its state.

    Args:
        state: states before the tokens.
        index: positions and episodes of the tokens, (B, T).
    """

    def __init__(self, state: RecurrentState, index: TokenIndex):
        self.runs = EpisodeRuns.of(index, state.episode)
        self._before, self._states = state, list(state.passes)

    def mix(self, number: int, mixer: RecurrentMixer, x: Tensor) -> Tensor:
        """Return the outputs (B, T, C) of pass ``number`` for inputs x (B, T, C), and keep its new state."""
        y: Tensor
        y, self._states[number] = mixer(x, self.runs, self._states[number])
        return y

    @property
    def state(self) -> RecurrentState:
        """States after the tokens, for the passes that have run, with the memory before the tokens."""
        return replace(self._before, passes=tuple(self._states), episode=self.runs.last_episode)


class Recurrence(Technique, ABC):
    """Base of the recurrent techniques: frozen dataclasses that build a `RecurrentMixer` for each layer."""

    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L"

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless tokens are read in order, without a context."""
        if not choices.causal:
            raise ValueError(f"{self} reads tokens in order and needs causal=True; use recurrence=None")
        if choices.cross_attention:
            raise ValueError(
                f"{self} cannot be combined with cross_attention=True; use recurrence=None in a decoder"
            )

    @property
    def segment_length(self) -> int | None:
        """Tokens of an episode after which the memory is written; None if each token writes it."""
        return None

    def for_layer(self, number: int) -> "Recurrence":
        """Return the recurrence of a layer, counted from 0; by default this one."""
        return self

    @abstractmethod
    def build(self, width: int, heads: int) -> RecurrentMixer:
        """Build the mixer of one layer for tokens of ``width`` features, with random weights."""


def all_within(x: Tensor, most: float) -> bool:
    """Return True if all values are finite and their absolute values are not larger than ``most``.

    Integers and booleans, e.g. masks of memory states, always are. While `is_tracing`, the result is True.
    """
    if is_tracing() or not x.is_floating_point():
        return True
    peak = x.abs().amax().item() if x.numel() else 0.0  # vector_norm(x, inf) takes 20 times as long on a CPU
    return peak <= most and peak < math.inf
