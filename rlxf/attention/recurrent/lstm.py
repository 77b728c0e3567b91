"""LSTM as a token mixer, and torch's recurrent modules computed on episodes of different lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import (
    DEFAULT_HORIZON,
    EpisodeRuns,
    MixerState,
    Recurrence,
    RecurrentMixer,
    time_constants,
)
from rlxf.attention.token_index import is_tracing
from rlxf.utils.checks import check_int

BLOCK = 256
"""Time steps that torch's module processes in one call; the backward pass of a call is quadratic in them."""


@dataclass(frozen=True)
class LSTM(Recurrence):
    r"""``c_t = f_t c_(t-1) + i_t g_t``, ``h_t = o_t tanh(c_t)``, with gates computed from x_t and h_(t-1).

    This is torch's ``nn.LSTM`` with one layer, followed by a projection. Its steps are computed in
    sequence, because the gates depend on the state.

    Source: Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735, with the forget gate of Gers et
    al. 2000.

    Args:
        horizon: approximate largest time constant of a cell, in tokens, set by the initial biases of the
            forget gates; each input gate gets the negative bias.

    Raises:
        TypeError: if horizon is not an int.
        ValueError: if horizon is less than 1.
    """

    paper: ClassVar[str] = "Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735"
    horizon: int = DEFAULT_HORIZON

    def __post_init__(self) -> None:
        check_int("LSTM horizon", self.horizon)

    def build(self, width: int, heads: int) -> "GatedRNN":
        rnn = nn.LSTM(width, width)
        bias = time_constants(self.horizon, width).log()
        rnn.get_parameter("bias_ih_l0").data[: 2 * width] = torch.cat([-bias, bias])
        return GatedRNN(rnn, ("hidden", "cell"))


class GatedRNN(RecurrentMixer):
    """Mixer with one of torch's recurrent modules, followed by a linear projection.

    Args:
        rnn: an ``nn.LSTM`` or ``nn.GRU`` with one layer, whose hidden size is its input size.
        names: names of its states.
    """

    def __init__(self, rnn: nn.LSTM | nn.GRU, names: tuple[str, ...]):
        super().__init__()
        self.rnn, self.names = rnn, names
        self.output = orthogonal_linear(rnn.hidden_size, rnn.hidden_size, bias=False)

    def initial_state(self, batch: int) -> MixerState:
        return {name: self.output.weight.new_zeros(batch, self.rnn.hidden_size) for name in self.names}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        if is_tracing() and x.shape[1] == 1:
            return self._step(x, runs, state)
        if not runs.valid.any():
            return torch.zeros_like(x), state
        pieces = EpisodePieces(runs)
        initial = [pieces.initial(state[name])[None] for name in self.names]
        outputs, last = self._run(pieces.pack(x), initial)
        new = {name: pieces.final(h[0], state[name]) for name, h in zip(self.names, last, strict=True)}
        return self.output(pieces.unpack(outputs)), new

    def _step(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        """Process one token per row without packing, whose sizes depend on values of the index."""
        before = tuple((state[name] * ~runs.reset)[None] for name in self.names)
        y, after = self.rnn(x.transpose(0, 1), before if len(before) > 1 else before[0])
        last = [after] if isinstance(after, Tensor) else after
        new = {
            name: torch.where(runs.valid, h[0], state[name]) for name, h in zip(self.names, last, strict=True)
        }
        return self.output(y.transpose(0, 1)), new

    def _run(self, packed: PackedSequence, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the packed outputs (N, C) and the states (1, P, C) after each piece, in blocks of time."""
        blocks = packed.batch_sizes.split(BLOCK)
        dtype = self.rnn.all_weights[0][0].dtype
        outputs, ended = [], []
        for sizes, data in zip(blocks, packed.data.split([int(n.sum()) for n in blocks]), strict=True):
            pieces = int(sizes[0])  # the longest ones; the others ended in an earlier block
            ended.append([h[:, pieces:] for h in states])
            initial = tuple(h[:, :pieces].to(dtype) for h in states)
            with _full_precision(data.device.type):
                block = PackedSequence(data.to(dtype), sizes)
                y, final = self.rnn(block, initial if len(initial) > 1 else initial[0])
            states = [final] if isinstance(final, Tensor) else list(final)
            outputs.append(y.data)
        ended.append(states)
        return torch.cat(outputs), [torch.cat(parts[::-1], dim=1) for parts in zip(*ended, strict=True)]


@contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """Turn off ``torch.autocast``: torch has no LSTM in bfloat16 for some processors."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


class EpisodePieces:
    """Tokens of a batch as pieces: the tokens of a row between two resets, without empty slots.

    Pieces are sorted by length, longest first, as a `PackedSequence` needs them.

    Args:
        runs: episodes of the tokens; at least one is valid.
    """

    def __init__(self, runs: EpisodeRuns):
        self.valid, self.number = runs.valid, runs.number
        rows = torch.arange(len(self.valid), device=self.valid.device)[:, None]
        keys = (rows * (self.number.shape[1] + 1) + self.number)[self.valid]
        pieces, piece, length = keys.unique(return_inverse=True, return_counts=True)
        by_length = length.argsort(descending=True, stable=True)
        self.rank = by_length.argsort()
        self.row = pieces[by_length] // (self.number.shape[1] + 1)
        self.continued = pieces[by_length] % (self.number.shape[1] + 1) == 0
        first = length.cumsum(0) - length
        time = torch.arange(len(piece), device=piece.device) - first[piece]
        self.order = (time * len(pieces) + self.rank[piece]).argsort()
        self.batch_sizes = time.bincount()

    def pack(self, x: Tensor) -> PackedSequence:
        """Return the valid tokens of x (B, T, C), ordered by time within pieces."""
        return PackedSequence(x[self.valid][self.order], self.batch_sizes.cpu())

    def unpack(self, data: Tensor) -> Tensor:
        """Return packed data (N, C) as (B, T, C), 0 at empty slots."""
        y = data.new_zeros(*self.valid.shape, data.shape[-1])
        y[self.valid] = torch.empty_like(data).index_copy(0, self.order, data)
        return y

    def initial(self, state: Tensor) -> Tensor:
        """Return the initial states of the pieces, (P, C): those of ``state`` (B, C) or 0 after a reset."""
        return state[self.row] * self.continued[:, None]

    def final(self, last: Tensor, state: Tensor) -> Tensor:
        """Return the states (B, C) after the last piece of each row; ``state`` for rows without tokens.

        Args:
            last: states after each piece, (P, C).
            state: states before the segment, (B, C).
        """
        is_last = self.continued.new_zeros(len(self.row))
        in_order = self.rank  # pieces by row and time
        row = self.row[in_order]
        is_last[in_order] = torch.cat([row[1:] != row[:-1], row.new_ones(1, dtype=torch.bool)])
        return state.index_copy(0, self.row[is_last], last[is_last])
