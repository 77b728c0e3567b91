"""Checks of steps and memory states that are passed to a transformer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.cache import KVCache
from rlxf.attention.memory.base import State
from rlxf.attention.recurrent.base import RecurrentState, all_within
from rlxf.attention.token_index import TokenIndex

ADVICE = "begin with `initial_state`"


def check_step(x: Tensor, index: TokenIndex, cache: KVCache, width: int) -> None:
    """Raise ValueError unless x is (B, C) and the index (B, 1) for the rows B > 0 of the cache."""
    rows = cache.index.position.shape[0]
    if not rows:
        raise ValueError("a step needs at least one row, got a cache of 0 rows")
    if x.shape != (rows, width) or index.position.shape != (rows, 1):
        raise ValueError(
            f"a step with this cache needs tokens of shape ({rows}, {width}) and an index of shape ({rows}, "
            f"1); got {tuple(x.shape)} and {tuple(index.shape)}"
        )


@dataclass(frozen=True)
class StateLayout:
    """Properties that all states of a transformer share.

    Args:
        layers: number of passes, whose inputs a state contains.
        width: features of a token.
        techniques: techniques with a recurrent state, `RecurrentState.techniques`; empty without any.
        shapes: shapes of the recurrent states of one row by name; empty without any.
        dtypes: dtype of each tensor by name.
    """

    layers: int
    width: int
    techniques: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, state: State) -> "StateLayout":
        """Return the layout of a state."""
        layers = state.hidden.shape[0]
        width = state.hidden.shape[-1]
        recurrent = state.recurrent
        dtypes = {"inputs of layers": state.hidden.dtype}
        if recurrent is None:
            return cls(layers, width, (), {}, dtypes)
        dtypes |= {name: x.dtype for name, x in recurrent.named_tensors().items()}
        return cls(layers, width, recurrent.techniques, recurrent.layout, dtypes)

    def check(self, state: State, batch: int, device: torch.device) -> None:
        """Raise ValueError unless a state has this layout, for ``batch`` rows on a device."""
        layout = StateLayout.of(state)
        given, own = (layout.layers, state.hidden.shape[1], layout.width), (self.layers, batch, self.width)
        if given != own:
            raise ValueError(
                f"the state has {given[0]} layers, {given[1]} rows and width {given[2]}, but this core and "
                f"segment have {own[0]} layers, {own[1]} rows and width {own[2]}; {ADVICE}"
            )
        if state.hidden.device != device:
            raise ValueError(
                f"the state is on {state.hidden.device}, but this core is on {device}; move the core back, "
                f"or {ADVICE}"
            )
        _check_rows(state)
        self._check_recurrent(layout)
        for name, dtype in self.dtypes.items():
            if layout.dtypes[name] != dtype and not torch.is_autocast_enabled(device.type):
                raise ValueError(
                    f"the state has {name} in {layout.dtypes[name]}, but those of this core are in {dtype}; "
                    f"{ADVICE}"
                )

    def _check_recurrent(self, given: "StateLayout") -> None:
        """Raise ValueError unless another layout has the same recurrent states."""
        if given.techniques != self.techniques:
            raise ValueError(
                f"the state is of another core: its recurrent states are those of "
                f"{' and '.join(given.techniques) or 'no technique'}, those of this core of "
                f"{' and '.join(self.techniques) or 'no technique'}; {ADVICE}"
            )
        if given.shapes != self.shapes:
            raise ValueError(
                f"the state is of another core: its recurrent states are {given.shapes}, those of this core "
                f"{self.shapes}; {ADVICE}"
            )


def _check_rows(state: State) -> None:
    """Raise ValueError unless all parts of a state have the same rows and tokens."""
    if state.index.shape != state.hidden.shape[1:3]:
        raise ValueError(
            f"the index of the state has shape {tuple(state.index.shape)}, but its inputs of layers "
            f"are those of {tuple(state.hidden.shape[1:3])} rows and tokens; {ADVICE}"
        )
    if state.recurrent is not None and len(state.recurrent.episode) != state.hidden.shape[1]:
        raise ValueError(
            f"the recurrent state has {len(state.recurrent.episode)} rows, but the inputs of layers have "
            f"{state.hidden.shape[1]}; {ADVICE}"
        )


def check_finite(state: State, fault: Callable[[RecurrentState | None], str | None]) -> None:
    """Raise ValueError if a state contains NaN or an infinity; the message names the layer.

    Args:
        state: memory state.
        fault: `TransformerLayers.recurrent_fault`.
    """
    if not all_within(state.hidden, math.inf):
        layer, row, *_ = (~state.hidden.isfinite()).nonzero()[0].tolist()
        value = state.hidden[layer, row][~state.hidden[layer, row].isfinite()][0].item()
        raise ValueError(
            f"the input of layer {layer + 1} in the memory state contains {value} in row {row} of the batch; "
            f"{ADVICE}"
        )
    if (message := fault(state.recurrent)) is not None:
        raise ValueError(f"{message}; {ADVICE}")
