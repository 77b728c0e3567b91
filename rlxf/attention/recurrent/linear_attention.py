"""Linear attention with random features as a recurrence: `RFA` and `Performer` with unlimited memory."""

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from rlxf.attention.kernels.kv_state import (
    KeyFeatures,
    KVState,
    append_ones,
    chunk_sums,
)
from rlxf.attention.kernels.linear_attention import CAUSAL_CHUNK, RandomFeatures
from rlxf.attention.kernels.performer import Performer
from rlxf.attention.kernels.rfa import RFA
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer
from rlxf.attention.technique import layer_seed
from rlxf.attention.token_index import EMPTY, TokenIndex


class RandomFeatureRecurrence(Recurrence):
    """Base of the recurrences that are linear attention with random features."""

    seed: int

    @property
    @abstractmethod
    def kernel(self) -> RandomFeatures:
        """The kernel with the same options."""

    def for_layer(self, number: int) -> Self:
        """Return the recurrence of a layer, counted from 0; its seed is larger by this number."""
        options: Any = self
        seeded: Self = replace(options, seed=layer_seed(self.seed, number))
        return seeded

    def build(self, width: int, heads: int) -> "LinearAttentionMixer":
        return LinearAttentionMixer(self.kernel, width, heads)


@dataclass(frozen=True)
class RecurrentRFA(RandomFeatureRecurrence):
    r"""``S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) [v_t, 1]^T``, ``[o_t, d_t] = phi(q_t) S_t``, ``y = o / d``.

    This is `RFA` with a memory of the whole episode, at constant cost per step. Without the gate, both g_t
    and 1 - g_t are replaced by 1. Features phi, the divisor near 0 and the options are those of `RFA`.

    Source: Peng et al. 2021, arXiv:2103.02143, sections 3.1 and 3.2.

    Args:
        features: see `RFA`.
        sigma: see `RFA`.
        fixed: see `RFA`.
        gate: see `RFA`.
        gate_bias: see `RFA`.
        seed: see `RFA`; each layer adds its number.

    Raises:
        TypeError: like `RFA`.
        ValueError: like `RFA`.
    """

    paper: ClassVar[str] = RFA.paper
    cost: ClassVar[str] = RFA.cost
    features: int | None = None
    sigma: float = 1.0
    fixed: bool = False
    gate: bool = False
    gate_bias: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.kernel

    @property
    def kernel(self) -> RFA:
        return RFA(**asdict(self))


@dataclass(frozen=True)
class RecurrentPerformer(RandomFeatureRecurrence):
    r"""``S_t = S_(t-1) + phi(k_t) [v_t, 1]^T``, ``[o_t, d_t] = phi(q_t) S_t``, ``y = o / d``.

    This is `Performer` with a memory of the whole episode, at constant cost per step. The features phi are
    those of `Performer`. They are drawn once, because a state is a sum over features of one draw.

    Source: Choromanski et al. 2021, arXiv:2009.14794, sections 2.2 to 2.4 and 4.

    Args:
        features: see `Performer`.
        kind: see `Performer`.
        seed: see `Performer`; each layer adds its number.

    Raises:
        TypeError: like `Performer`.
        ValueError: like `Performer`.
    """

    paper: ClassVar[str] = Performer.paper
    cost: ClassVar[str] = Performer.cost
    features: int | None = None
    kind: Literal["exp", "relu"] = "exp"
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.kernel

    @property
    def kernel(self) -> Performer:
        return Performer(**asdict(self))


class LinearAttentionMixer(RecurrentMixer):
    """Mixer of a `RandomFeatureRecurrence`; weights are those of an attention layer with the kernel.

    Its state is a `KVState`. Tokens are read in chunks: pairs are computed within a chunk only.
    """

    def __init__(self, kernel: RandomFeatures, width: int, heads: int):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = orthogonal_linear(width, width, matrices=3)
        self.output = orthogonal_linear(width, width)
        self.kernel = kernel.build(width, heads)

    def initial_state(self, batch: int) -> MixerState:
        weight = self.output.weight
        values = self.kernel.promote(weight.new_empty(batch, self.heads, 0, self.size + 1))
        return KVState.empty(self.kernel.features, values)._asdict()

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        q, k, v = (self._split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        extras = self.kernel.key_extras(x)
        k = k if extras is None else torch.cat([k, extras], dim=-1)
        index = TokenIndex(runs.position, runs.number.masked_fill(~runs.valid, EMPTY))
        sums = KVState(**state)
        number = runs.number.new_zeros(len(x))
        outputs = []
        for start in range(0, x.shape[1], CAUSAL_CHUNK):
            part = slice(start, start + CAUSAL_CHUNK)
            chunk = Chunk(runs.number[:, part], runs.valid[:, part], number, index.at(part))
            y, sums = self._read(q[:, :, part], k[:, :, part], v[:, :, part], chunk, sums)
            number = chunk.number[:, -1]
            outputs.append(y)
        y = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2).to(x.dtype)
        return self.output(y), sums._asdict()

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: "Chunk", before: KVState
    ) -> tuple[Tensor, KVState]:
        """Return the averages (B, H, T, V) of the tokens of a chunk, and the state after it."""
        values = append_ones(self.kernel.promote(v)).masked_fill(~chunk.valid[:, None, :, None], 0.0)
        keys = self.kernel.key_features(self.kernel.contextualize_keys(k, chunk.index))
        queries = self.kernel.query_features(q)
        y = self.kernel.quotient(chunk_sums(queries, keys, values, before, chunk.allowed, chunk.continues))
        kept = chunk.in_last_episode
        log_decay = self.kernel.log_decay(k).masked_fill(~kept[:, None], 0.0).sum(-1)
        scale = (keys.scale + log_decay[..., None]).to(values.dtype)
        last = KeyFeatures(keys.features, scale).exclude(~kept)
        values = values.masked_fill(~kept[:, None, :, None], 0.0)
        return y, before.decayed(log_decay, ~chunk.continues[:, -1]).add(last, values)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Episodes of T consecutive tokens.

    Args:
        number: (B, T), number of resets up to each token.
        valid: (B, T) bool, false for empty slots.
        before: (B,), number of resets before the first token.
        index: position and episode of each token, (B, T).
    """

    number: Tensor
    valid: Tensor
    before: Tensor
    index: TokenIndex

    @property
    def allowed(self) -> Tensor:
        """Pairs of a query and an earlier key of its episode, (B, 1, T, T) bool."""
        same = self.number[:, :, None] == self.number[:, None, :]
        return (same & self.valid[:, None, :]).tril()[:, None]

    @property
    def continues(self) -> Tensor:
        """True for tokens that attend to the state before the chunk, (B, T) bool."""
        return self.number == self.before[:, None]

    @property
    def in_last_episode(self) -> Tensor:
        """True for the tokens of the last episode, (B, T) bool."""
        return self.valid & (self.number == self.number[:, -1:])
