"""Linformer: keys and values are projected along the sequence to few summaries of many tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.kernels.base import AttentionKernel, Kernel, one_hot
from rlxf.attention.kernels.linformer_projection import PROJECTIONS, Method, Projection
from rlxf.attention.kernels.softmax import dot_product_attention
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, PositionBlocks, TokenIndex
from rlxf.utils.checks import check_bool, check_choice, check_int

Sharing = Literal["none", "head", "key-value", "layer"]
Summarize = Callable[[Tensor, Tensor], Tensor]
"""Function of values by position and a mask of filled positions that returns summaries; see `Projection`."""


@dataclass(frozen=True)
class Linformer(Kernel):
    r"""``o_i = sum_r softmax_r(q_i . k'_r / sqrt(D)) v'_r`` with ``k' = E k``, ``v' = F v``, E and F (k, n).

    Column j of E belongs to position j of an episode. In a bidirectional transformer this is the paper's
    form: n is the length of the longest sequence, each episode is projected separately, and positions without
    a token add nothing. A summary without any token is masked.

    If keys were projected along the whole sequence, a token would attend to later tokens. The causal form is
    rlxf's variant: an episode is cut into blocks of n positions, [0, n), [n, 2 n) ... A query attends to the
    k summaries ``E k`` and ``F v`` of an earlier block in place of its tokens, if it may attend to all of
    them. All other visible tokens are attended to individually, in the same softmax. A block may therefore be
    cut by a window or by the end of memory. L tokens cost L (L k / n + n) / 2 pairs: n / k times fewer than
    all pairs, but not linear, since the number of summaries grows with L. Blocks of ``n = sqrt(L k)`` cost
    least, L^1.5 sqrt(k) pairs.

    Source: Wang et al. 2020, arXiv:2006.04768, section 4. The paper has no bias;
    public implementations have one.

    Args:
        length: n, in tokens: the longest sequence; in a causal transformer the length of a block. Episodes,
            windows and memories should hold several blocks: tokens of shorter ones are all attended to
            individually.
        k: number of summaries of n tokens; a tuple for a separate number in each layer.
        method: projection. "learned": by E and F. The others summarize n / k adjacent positions:
            "convolution", whose kernel and stride are n / k, "mean", or "max" of each feature.
        sharing: scope of a projection. "none": separate for each head and layer, and for keys and values, as
            in equation 7. "head": the heads of a layer share one E and one F; the paper reports no loss from
            it. "key-value": a layer has one projection for keys and values, F = E. "layer": one E = F for all
            layers with an equal `Linformer`. Means and maxima have no parameters to share.
        bias: add a learned number to each summary ("learned") or to each feature ("convolution").

    Raises:
        TypeError: if length or k is not an integer, or bias is neither True nor False.
        ValueError: if length or k is less than 1, or k is empty; if k exceeds length or, unless learned, does
            not divide it; if method or sharing is unknown; if layers share E and differ in k; if a mean or
            max has a bias. In a bidirectional pass, if a position is not below length.
    """

    paper: ClassVar[str] = "Wang et al. 2020, arXiv:2006.04768"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L k pairs; causal: L (L k / length + length) pairs"
    length: int = 32
    k: int | tuple[int, ...] = 8
    method: Method = "learned"
    sharing: Sharing = "head"
    bias: bool = False

    def __post_init__(self) -> None:
        check_int("Linformer length", self.length)
        check_choice("Linformer method", self.method, get_args(Method))
        check_choice("Linformer sharing", self.sharing, get_args(Sharing))
        check_bool("Linformer bias", self.bias)
        if isinstance(self.k, list):  # from JSON
            object.__setattr__(self, "k", tuple(self.k))
        if self.k == ():
            raise ValueError("Linformer k must be a number or a tuple with a number for each layer, got ()")
        for k in self.k if isinstance(self.k, tuple) else (self.k,):
            self._check_summaries(k)
        if isinstance(self.k, tuple) and self.sharing == "layer":
            raise ValueError(f"sharing='layer' requires the same k in all layers, got k={self.k}")
        if self.bias and self.method in ("mean", "max"):
            raise ValueError(
                f"Linformer bias=True requires method='learned' or 'convolution', got {self.method!r}"
            )

    def _check_summaries(self, k: int) -> None:
        check_int("Linformer k", k)
        if k > self.length:
            raise ValueError(f"Linformer k must be at most length={self.length}, got {k}")
        if self.method != "learned" and self.length % k:
            raise ValueError(
                f"Linformer k must divide length={self.length} with method={self.method!r}, got {k}"
            )

    def for_layers(self, layers: int) -> "tuple[Linformer, ...]":
        if not isinstance(self.k, tuple):
            return (self,) * layers
        if len(self.k) != layers:
            raise ValueError(
                f"{self} has {len(self.k)} values of k for {layers} layers; give one value for each layer"
            )
        return tuple(replace(self, k=k) for k in self.k)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError for cross-attention, or if a query may not attend to all projected tokens."""
        if choices.cross_attention:
            raise ValueError(
                f"{self} projects the keys of self-attention and does not support cross_attention=True; "
                f"choose another kernel"
            )
        if not choices.causal and not choices.pattern.allows_all_keys:
            raise ValueError(
                f"with causal=False, {self} projects the whole sequence, and {choices.pattern} hides a "
                f"part of it; choose Full() or another kernel"
            )

    def build(self, width: int, heads: int) -> "LinformerAttention":
        return LinformerAttention(self, width // heads, heads)


class LinformerAttention(AttentionKernel):
    """Module of `Linformer` in one layer: ``key_projection`` is E, and ``value_projection`` is F."""

    def __init__(self, spec: Linformer, size: int, heads: int):
        super().__init__()
        assert isinstance(spec.k, int)
        self.spec = spec
        self.weight_group = spec if spec.sharing == "layer" else None
        weights = heads if spec.sharing == "none" else 1
        build = partial(PROJECTIONS[spec.method], spec.length, spec.k, weights, size, spec.bias)
        self.key_projection: Projection = build()
        tied = spec.sharing in ("key-value", "layer")
        self.value_projection: Projection = self.key_projection if tied else build()

    def tie_weights(self, first: AttentionKernel) -> None:
        assert isinstance(first, LinformerAttention)
        self.key_projection = self.value_projection = first.key_projection

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return False where queries share projections: in bidirectional passes, and in those by blocks."""
        return mask.causal and not self._starts_at_block_boundary(mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        return self._average(q, k, v, mask, self.value_projection)

    def inspect_weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        """Return the weights of tokens: the weight of a summary is distributed over its tokens.

        Learned projections distribute it by F, which may be negative; the others distribute it evenly.
        """
        return self._average(q, k, one_hot(q, k), mask, self.value_projection.linear_summaries)

    def _average(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, summarize: Summarize) -> Tensor:
        if not mask.causal:
            return self._bidirectional(q, k, v, mask, summarize)
        if self._starts_at_block_boundary(mask):
            return self._causal_blockwise(q, k, v, summarize)
        return self._causal(q, k, v, mask, summarize)

    def _starts_at_block_boundary(self, mask: AttentionMask) -> bool:
        return mask.once(StartsAtBlockBoundary(self.spec.length))

    def _bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, summarize: Summarize
    ) -> Tensor:
        """Attend from each query to the summaries of its episode."""
        blocks = PositionBlocks.of_episodes(mask.key, self._positions(mask.key))
        nonempty = self.key_projection.nonempty(blocks.filled)
        episodes, query_episode = mask.key.episodes[:, None], mask.query.episode[..., None]
        own = (query_episode == episodes) | (query_episode == EMPTY)
        keys, values = self._summaries(k, v, blocks, summarize)
        allowed = (own[..., None] & nonempty[:, None]).flatten(2)[:, None]
        return self._attend(q, keys, values, None if bool(allowed.all()) else allowed)

    def _positions(self, index: TokenIndex) -> int:
        """Return the number of positions of the longest episode, rounded up to whole groups."""
        longest = int(index.position.masked_fill(index.episode == EMPTY, 0).max()) + 1
        if longest > self.spec.length:
            raise ValueError(
                f"{self.spec} supports sequences of at most {self.spec.length} tokens, got position "
                f"{longest - 1}; choose a larger length"
            )
        return -(-longest // self.key_projection.group_size) * self.key_projection.group_size

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, summarize: Summarize) -> Tensor:
        """Attend from each query to summaries of fully visible blocks, and to all other tokens."""
        blocks = PositionBlocks.of_complete_blocks(mask.key, self.spec.length)
        allowed = mask.allowed_by_head
        tokens = k.shape[2]
        if not blocks.slots.numel():
            return self._attend(q, k, v, allowed)
        summarized = blocks.fully_visible(allowed) & self._ends_before(blocks, mask)
        alone = allowed & ~blocks.spread(summarized, tokens)
        keys, values = self._summaries(k, v, blocks, summarize)
        keys, values = torch.cat([k, keys], dim=2), torch.cat([v, values], dim=2)
        count = (keys.shape[2] - tokens) // summarized.shape[-1]
        allowed = torch.cat([alone, summarized.repeat_interleave(count, dim=-1)], dim=-1)
        return self._attend(q, keys, values, allowed)

    @staticmethod
    def _ends_before(blocks: PositionBlocks, mask: AttentionMask) -> Tensor:
        """Return whether each block ends before the position of the query, (B, 1, Tq, N) bool."""
        last = mask.key.position.gather(1, blocks.slots[..., -1].clamp(min=0))
        return (last[:, None] < mask.query.position[..., None])[:, None]

    def _causal_blockwise(self, q: Tensor, k: Tensor, v: Tensor, summarize: Summarize) -> Tensor:
        """Compute `_causal` if each row contains tokens of one episode, from the start of a block."""
        size = self.spec.length
        whole = torch.arange(k.shape[2] // size * size, device=k.device)
        blocks = PositionBlocks(whole.view(1, -1, size).expand(len(k), -1, -1))
        keys, values = self._summaries(k, v, blocks, summarize)
        count = keys.shape[2] // blocks.slots.shape[1]
        outputs = []
        for number, queries in enumerate(q.split(size, dim=2)):
            own, before = slice(number * size, (number + 1) * size), slice(0, number * count)
            visible_keys = torch.cat([keys[:, :, before], k[:, :, own]], dim=2)
            visible_values = torch.cat([values[:, :, before], v[:, :, own]], dim=2)
            allowed = torch.ones(queries.shape[2], visible_keys.shape[2], dtype=torch.bool, device=k.device)
            outputs.append(self._attend(queries, visible_keys, visible_values, allowed.tril(number * count)))
        return torch.cat(outputs, dim=2)

    def _summaries(
        self, k: Tensor, v: Tensor, blocks: PositionBlocks, summarize: Summarize
    ) -> tuple[Tensor, Tensor]:
        """Return the summaries of keys and of values, (B, H, N k, D)."""
        filled = blocks.filled
        return self.key_projection(blocks.gather(k), filled), summarize(blocks.gather(v), filled)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        """Compute softmax attention with dropout to the keys that are ``allowed``; None for all keys.

        ``allowed`` is (B, H, Tq, Tk) bool or broadcastable to it. A query without visible keys attends to all
        keys, as softmax would be nan; its output is undefined.
        """
        mask = None
        if allowed is not None:
            allowed = allowed | ~allowed.any(-1, keepdim=True)
            mask = torch.where(allowed, 0.0, -torch.inf).to(q.dtype)
        if not self.active_dropout:
            return dot_product_attention(q, k, v, mask)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores + mask
        return drop_some(scores.softmax(dim=-1), self.active_dropout) @ v


@dataclass(frozen=True)
class StartsAtBlockBoundary:
    """Function of a mask: whether each row of a long pass is one episode from the start of a block.

    All rows must have the same positions.

    Args:
        size: tokens of a block n.
    """

    size: int

    def __call__(self, mask: AttentionMask) -> bool:
        """Return whether the pass has this layout."""
        query, key = mask.query, mask.key
        long = mask.tables is None and query.shape == key.shape and key.shape[1] > 2 * self.size
        if not long or not mask.pattern.allows_all_keys:
            return False
        first = int(key.position[0, 0])
        ascending = torch.arange(first, first + key.shape[1], device=key.position.device)
        consecutive = (key.position == ascending) & (key.episode == key.episode[:, :1])
        return first % self.size == 0 and bool((consecutive & (key.episode != EMPTY)).all())
