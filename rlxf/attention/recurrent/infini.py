"""Infini-attention: softmax attention within segments, and a matrix that summarizes the segments before."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.kernels.softmax import dot_product_attention
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import (
    EpisodeRuns,
    MixerState,
    Recurrence,
    RecurrentMixer,
    unsqueeze_like,
    zeros,
)
from rlxf.attention.recurrent.heads import split_heads
from rlxf.attention.token_index import MISSING
from rlxf.utils.checks import check_choice, check_int

Update = Literal["linear", "delta"]
"""Values that a segment adds to the memory: its own, or what the memory does not predict of them."""


@dataclass(frozen=True)
class InfiniAttention(Recurrence):
    r"""``y_t = g A_mem + (1 - g) A_dot`` with ``g = sigmoid(beta)``, one learned beta for each head.

    A_dot is the softmax attention of token t to itself and the earlier tokens of its segment of S tokens, and
    A_mem reads the segments before. With ``sigma(x) = ELU(x) + 1``, their memory M and normalizer z::

        A_mem = sigma(q) M / (sigma(q) . z)
        linear:  M = M + sigma(K)^T V                                    z = z + sum_j sigma(k_j)
        delta:   M = M + sigma(K)^T (V - sigma(K) M / (sigma(K) . z))    z as above

    where K and V are keys and values of a whole segment, read with the memory before it. In the first
    segment of an episode the memory is empty, and ``y_t = A_dot``. Queries and keys have no positions, in the
    segment or in the memory: set ``position=Sinusoidal()`` to add them to the tokens.

    Segments are those of the episode: token t belongs to segment ``t // S``, and the first token of a segment
    writes the one before. They do not depend on how a rollout is cut for training, so acting step by step
    equals learning. The state has the memory, and keys and values of the current segment. Gradients flow
    through the memory inside a training segment: to train what is written, train on several segments at once.

    Source: Munkhdalai et al. 2024, arXiv:2404.07143, section 3.1.

    Args:
        segment: tokens S of a segment, at least 2. The default is less than half of a training segment of
            `GTrXLPPO`, so that gradients reach the memory.
        update: rule of the memory: "linear" or "delta".

    Raises:
        TypeError: if segment is not an int.
        ValueError: if segment is less than 2, or update is unknown.
    """

    paper: ClassVar[str] = "Munkhdalai et al. 2024, arXiv:2404.07143"
    cost: ClassVar[str] = "L segment pairs"
    segment: int = 24
    update: Update = "linear"

    def __post_init__(self) -> None:
        check_int("InfiniAttention segment", self.segment, least=2)
        check_choice("InfiniAttention update", self.update, get_args(Update))

    @property
    def segment_length(self) -> int:
        return self.segment

    def build(self, width: int, heads: int) -> "InfiniMixer":
        return InfiniMixer(self, width, heads)


class InfiniMixer(RecurrentMixer):
    """Mixer of `InfiniAttention`.

    Its state has ``memory`` (B, H, D, D + 1), M with z as its last column, and ``keys`` (B, S, H, D) and
    ``values`` (B, S, H, D + 1) of the current segment by the offset in it. The last value of a token is 1;
    keys and values of offsets without a token are 0.
    """

    def __init__(self, spec: InfiniAttention, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.size = width // heads
        self.qkv = orthogonal_linear(width, width, matrices=3)
        self.beta = nn.Parameter(torch.zeros(heads))
        self.output = orthogonal_linear(width, width)

    def initial_state(self, batch: int) -> MixerState:
        shape = batch, self.spec.segment, self.heads
        return {
            "memory": zeros(self.beta, batch, self.heads, self.size, self.size + 1),
            "keys": self.beta.new_zeros(*shape, self.size),
            "values": self.beta.new_zeros(*shape, self.size + 1),
        }

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        tokens = torch.cat([q, k, F.pad(v, (0, 1), value=1.0)], dim=-1)
        chunks = SegmentChunks.of(runs, last_offset(state["values"]), self.spec.segment)
        outputs = [q[:, :0]]
        for number, (slots, inputs) in enumerate(zip(chunks.slots, chunks.split(tokens), strict=True)):
            if slots.shape[1]:
                chunk = SegmentChunk.of(runs, number, slots, self.spec.segment)
                y, state = self._chunk_outputs(inputs, chunk, self._start_chunk(chunk, state))
                outputs.append(y)
        y = runs.inputs(chunks.in_order(torch.cat(outputs, dim=1)))
        return self.output(y.flatten(-2)), state

    def _start_chunk(self, chunk: "SegmentChunk", state: MixerState) -> MixerState:
        """Return the state before a chunk, whose first tokens may write a segment or begin an episode."""
        memory = state["memory"]
        keys = state["keys"]
        values = state["values"]
        ended = chunk.begins & ~chunk.is_new
        if bool(ended.any()):
            memory = torch.where(unsqueeze_like(ended, memory), self._write(memory, keys, values), memory)
        keys, values = (x.masked_fill(unsqueeze_like(chunk.begins, x), 0) for x in (keys, values))
        return {
            "memory": memory.masked_fill(unsqueeze_like(chunk.is_new, memory), 0),
            "keys": keys,
            "values": values,
        }

    def _chunk_outputs(
        self, tokens: Tensor, chunk: "SegmentChunk", state: MixerState
    ) -> tuple[Tensor, MixerState]:
        """Return the outputs (B, W, H, D) of the tokens of a chunk, and the state after them."""
        q, k, v = tokens.split([self.size, self.size, self.size + 1], dim=-1)
        keys, values = chunk.write(state["keys"], k), chunk.write(state["values"], v)
        y = self._mix(q, _local_attention(q, keys, values, chunk), state["memory"]).to(tokens.dtype)
        return y, state | {"keys": keys, "values": values}

    def _mix(self, q: Tensor, local: Tensor, memory: Tensor) -> Tensor:
        """Mix local attention (B, W, H, D) with what queries q (B, W, H, D) read from the memory."""
        read, known = retrieve(q.transpose(1, 2).to(memory.dtype), memory)
        gate = self.beta.sigmoid().to(memory.dtype)[:, None, None]
        local = local.transpose(1, 2).to(memory.dtype)
        return torch.where(known, gate * read + (1 - gate) * local, local).transpose(1, 2)

    def _write(self, memory: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the memory after a segment with keys (B, S, H, D) and values (B, S, H, D + 1)."""
        k, new = (x.transpose(1, 2).to(memory.dtype) for x in (keys, values))
        if self.spec.update == "delta":
            new = new - F.pad(retrieve(k, memory)[0], (0, 1)) * new[..., -1:]
        return memory + features(k).mT @ new


def features(x: Tensor) -> Tensor:
    """Return ``sigma(x) = ELU(x) + 1``, which is above 0."""
    return x.relu() + x.clamp(max=0).exp()


def retrieve(q: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Read a memory (B, H, D, D + 1) with q (B, H, N, D).

    Queries without features above 0 are shifted to a largest feature of 0, since all ``sigma(q)`` may be too
    small for the dtype. This factor cancels.

    Returns:
        ``sigma(q) M / (sigma(q) . z)``, (B, H, N, D), and whether the memory is not empty, (B, H, 1, 1) bool.
    """
    shift = q.detach().amax(dim=-1, keepdim=True).clamp(max=0)
    value, total = (features(q - shift) @ memory).split([memory.shape[-1] - 1, 1], dim=-1)
    known = (memory[..., -1:] > 0).any(dim=-2, keepdim=True)
    return value / torch.where(total > 0, total, 1.0), known


def _local_attention(q: Tensor, keys: Tensor, values: Tensor, chunk: "SegmentChunk") -> Tensor:
    """Attend from q (B, W, H, D) to keys and values (B, S, H, ...) of the segment -> (B, W, H, D)."""
    offset = torch.arange(keys.shape[1], device=q.device)
    visible = (offset <= chunk.offset[..., None]) & (values[:, None, :, 0, -1] > 0)
    visible = visible | ~chunk.filled[..., None]  # a softmax over no keys is NaN
    q, k, v = (x.transpose(1, 2) for x in (q, keys, values[..., :-1]))
    return dot_product_attention(q, k, v, visible[:, None]).transpose(1, 2)


def last_offset(values: Tensor) -> Tensor:
    """Return the offset of the last token of a segment with values (B, S, H, D + 1): (B,); -1 for none."""
    offset = torch.arange(values.shape[1], device=values.device)
    return torch.where(values[:, :, 0, -1] > 0, offset, -1).amax(1)


@dataclass(frozen=True, eq=False)
class SegmentChunks:
    """Tokens of T slots, divided into chunks: tokens of a row that are in one segment of an episode.

    Args:
        slots: for each chunk, (B, W) int64, slots of its tokens in order; `MISSING` after the last one of a
            row.
        column: (B, T) int64, place of each token among those of all chunks.
    """

    slots: tuple[Tensor, ...]
    column: Tensor

    @classmethod
    def of(cls, runs: EpisodeRuns, last: Tensor, size: int) -> "SegmentChunks":
        """Divide tokens into chunks of segments of ``size`` tokens; the first chunk continues a segment.

        A segment begins where the offset does not increase, since positions may be missing.

        Args:
            runs: episodes of the tokens.
            last: offset of the last token before them, (B,); -1 for none.
            size: tokens of a segment.
        """
        first = runs.reset | runs.valid & (runs.position % size <= _previous(runs, last, size))
        number, count = first.cumsum(1), runs.valid.cumsum(1) - 1
        rank = count - torch.where(first, count, 0).cummax(1).values
        widths = _tokens_of_chunks(number, runs.valid).amax(0)
        column = (widths.cumsum(0) - widths)[number] + rank
        total = int(widths.sum())
        token = torch.arange(rank.shape[1], device=rank.device).expand_as(rank)
        place = torch.where(runs.valid, column, total)
        order = token.new_full((len(token), total + 1), MISSING).scatter(1, place, token)[:, :total]
        return cls(order.split(widths.tolist(), dim=1), column.clamp(0, max(0, total - 1)))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens x (B, T, H, D) of each chunk, (B, W, H, D)."""
        rows = torch.cat(self.slots, dim=1).clamp(min=0)[..., None, None]
        tokens = x.gather(1, rows.expand(-1, -1, *x.shape[2:]))
        return tokens.split([slots.shape[1] for slots in self.slots], dim=1)

    def in_order(self, y: Tensor) -> Tensor:
        """Return outputs (B, T, H, D) of all tokens, given those of the chunks (B, N, H, D), joined."""
        y = y if y.shape[1] else F.pad(y, (0, 0, 0, 0, 0, 1))  # no tokens
        return y.gather(1, self.column[..., None, None].expand(-1, -1, *y.shape[2:]))


def _tokens_of_chunks(number: Tensor, valid: Tensor) -> Tensor:
    """Return the number of tokens of each row in each of N chunks, (B, N).

    Args:
        number: the chunk of each token, (B, T).
        valid: False for tokens to leave out, (B, T).
    """
    counts = number.new_zeros(len(number), int(number.max()) + 1)
    return counts.scatter_add(1, number, valid.long())


def _previous(runs: EpisodeRuns, last: Tensor, size: int) -> Tensor:
    """Return the offset of the token before each one, (B, T), given that of the last one before all, (B,)."""
    offset = torch.cat([last[:, None], runs.position % size], dim=1)
    slot = torch.arange(offset.shape[1] - 1, device=last.device)
    before = torch.cat([torch.zeros_like(last[:, None]), torch.where(runs.valid, slot + 1, 0)], dim=1)
    return offset.gather(1, before.cummax(1).values[:, :-1])


@dataclass(frozen=True, eq=False)
class SegmentChunk:
    """Chunk of W tokens in each row, each within one segment.

    Args:
        offset: (B, W) int64, offset of the token in its segment; the segment's length S where there is none.
        filled: (B, W) bool, whether there is a token.
        begins: (B,) bool, rows in which the chunk begins a segment.
        is_new: (B,) bool, rows in which the chunk begins an episode.
        size: length S of a segment.
    """

    offset: Tensor
    filled: Tensor
    begins: Tensor
    is_new: Tensor
    size: int

    @classmethod
    def of(cls, runs: EpisodeRuns, number: int, slots: Tensor, size: int) -> "SegmentChunk":
        """Return chunk ``number`` with tokens in ``slots`` (B, W)."""
        filled, token = slots != MISSING, slots.clamp(min=0)
        offset = torch.where(filled, runs.position.gather(1, token) % size, size)
        is_new = (filled & runs.reset.gather(1, token)).any(1)
        return cls(offset, filled, filled.any(1) & (number > 0), is_new, size)

    def write(self, buffer: Tensor, x: Tensor) -> Tensor:
        """Write x (B, W, H, D) to a buffer (B, S, H, D) of the segment by offset."""
        place = self.offset[..., None, None].expand_as(x)
        return F.pad(buffer, (0, 0, 0, 0, 0, 1)).scatter(1, place, x.to(buffer.dtype))[:, : self.size]
