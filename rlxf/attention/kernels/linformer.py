"""Linformer: keys and values are projected along the sequence, and few are left of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.checks import check_flag, check_whole, check_word
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.base import Kernel, LayerKernel, one_hot
from rlxf.attention.kernels.projections import PROJECTIONS, Projection
from rlxf.attention.kernels.stretches import Stretches
from rlxf.attention.patterns.full import Full
from rlxf.attention.relation import Relation, Share
from rlxf.attention.technique import Choices

Method = Literal["learned", "convolution", "mean", "max"]
Sharing = Literal["none", "head", "key-value", "layer"]
Summarize = Callable[[Tensor, Tensor], Tensor]
"""Values by position and which positions are filled -> summaries of them; see `Projection`."""


@dataclass(frozen=True)
class Linformer(Kernel):
    r"""``o_i = sum_r softmax_r(q_i . k'_r / sqrt(D)) v'_r`` with ``k' = E k``, ``v' = F v``, E and F (k, n).

    Column j of E belongs to position j of an episode. Without ``causal`` this is the paper's: n is the length
    of the longest sequence, each episode is projected by itself, and positions without a token add nothing. A
    summary of no token at all is not seen.

    Projected along the sequence, a token would see what is ahead. The causal form is ours: an episode is cut
    into blocks of n positions, [0, n), [n, 2 n) ... Of a block before its own, a query sees the k summaries
    ``E k`` and ``F v`` in place of the tokens, if it may see all of these. Every other token that it may see
    it sees by itself, in the same softmax. So a window, or the end of memory, may cut a block. L tokens cost
    L (L k / n + n) pairs: n / k times fewer than all, but not linear.

    Source: Wang et al. 2020, arXiv:2006.04768, section 4. The paper has no bias; public code has one.

    Args:
        length: n, in tokens: the longest sequence; in a causal transformer a block. Episodes, windows and
            memories should hold several: what is no longer than a block is seen token by token.
        k: summaries of n tokens; a tuple for a number of its own in each layer.
        method: how they are made. "learned": by E and F. Else each is of n / k positions side by side: by
            "convolution", whose kernel and stride are n / k, their "mean" or, for each feature, their "max".
        sharing: who has the same projection. "none": each head, keys, values and layer have their own, as in
            equation 7. "head": the heads of a layer share E, and F; nothing was lost by that in the paper.
            "key-value": E is F, too. "layer": one E for all. Means and maxima have nothing to share.
        bias: add a learned number to each summary ("learned") or to each feature ("convolution").

    Raises:
        TypeError: if length or k is no whole number, or bias neither True nor False.
        ValueError: if one is less than 1, k exceeds length or, unless learned, does not divide it, a word is
            unknown, layers share E and differ in k, or a mean or max has a bias; in a pass that is not
            causal, if a position is not below length.
    """

    paper: ClassVar[str] = "Wang et al. 2020, arXiv:2006.04768"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L k pairs; causal L (L k / length + length)"
    length: int = 32
    k: int | tuple[int, ...] = 8
    method: Method = "learned"
    sharing: Sharing = "head"
    bias: bool = False

    def __post_init__(self) -> None:
        check_whole("Linformer length", self.length)
        check_word("Linformer method", self.method, get_args(Method))
        check_word("Linformer sharing", self.sharing, get_args(Sharing))
        check_flag("Linformer bias", self.bias)
        if isinstance(self.k, list):  # as JSON has it
            object.__setattr__(self, "k", tuple(self.k))
        for k in self.k if isinstance(self.k, tuple) else (self.k,):
            self._check_summaries(k)
        if isinstance(self.k, tuple) and self.sharing == "layer":
            raise ValueError(f"layers that share E have one k for all, got k={self.k} and sharing='layer'")
        if self.bias and self.method in ("mean", "max"):
            raise ValueError(
                f"a Linformer has a bias if learned or a convolution, got method={self.method!r}"
            )

    def _check_summaries(self, k: int) -> None:
        check_whole("Linformer k", k)
        if k > self.length:
            raise ValueError(f"Linformer k must be at most length={self.length}, got {k}")
        if self.method != "learned" and self.length % k:
            raise ValueError(
                f"Linformer k must divide length={self.length} where method={self.method!r}, got {k}"
            )

    def for_layers(self, layers: int) -> "tuple[Linformer, ...]":
        """See `Kernel`."""
        if not isinstance(self.k, tuple):
            return (self,) * layers
        if len(self.k) != layers:
            raise ValueError(
                f"{self} has {len(self.k)} numbers k for {layers} layers; give one for each layer"
            )
        return tuple(replace(self, k=k) for k in self.k)

    def check(self, choices: Choices) -> None:
        """See `Kernel`: all that is projected may be seen, and stands in one sequence."""
        if choices.cross_attention:
            raise ValueError(
                f"{self} projects one sequence, and cross_attention=True brings another one; "
                f"choose another kernel"
            )
        if not choices.causal and not isinstance(choices.pattern, Full):
            raise ValueError(
                f"where causal=False, {self} projects a sequence as a whole, and {choices.pattern} hides a "
                f"part of it; choose Full() or another kernel"
            )

    def build(self, width: int, heads: int) -> "LinformerAverage":
        """See `Kernel`."""
        return LinformerAverage(self, width // heads, heads)


class LinformerAverage(LayerKernel):
    """A `Linformer` in one layer: ``of_keys`` is E, ``of_values`` F."""

    def __init__(self, spec: Linformer, size: int, heads: int):
        super().__init__()
        assert isinstance(spec.k, int)
        self.spec = spec
        own = heads if spec.sharing == "none" else 1
        given = (spec.length, spec.k, own, size, spec.bias)
        self.of_keys: Projection = PROJECTIONS[spec.method](*given)
        one = spec.sharing in ("key-value", "layer")
        self.of_values: Projection = self.of_keys if one else PROJECTIONS[spec.method](*given)

    def share(self, first: LayerKernel) -> None:
        """See `LayerKernel`."""
        if self.spec.sharing == "layer":
            assert isinstance(first, LinformerAverage)
            self.of_keys = self.of_values = first.of_keys

    def shares(self, relation: Relation) -> tuple[Share, ...] | None:
        """See `LayerKernel`. A whole sequence is projected once for all queries."""
        return super().shares(relation) if relation.causal else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`."""
        return self._average(q, k, v, relation, dropout, self.of_values)

    def look(self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float) -> Tensor:
        """See `LayerKernel`. The weight of a summary is shared by the tokens that it is made of.

        Learned ones have the share that F gives them, which may be negative; otherwise it is even.
        """
        return self._average(q, k, one_hot(q, k), relation, dropout, self.of_values.look)

    def _average(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, dropout: float, summarize: Summarize
    ) -> Tensor:
        if not relation.causal:
            return self._whole(q, k, v, relation, dropout, summarize)
        if in_blocks_from_the_start(relation, self.spec.length):
            return self._block_by_block(q, k, v, dropout, summarize)
        return self._one_by_one(q, k, v, relation, dropout, summarize)

    def _whole(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, dropout: float, summarize: Summarize
    ) -> Tensor:
        """Each query sees the summaries of its episode."""
        stretches = Stretches.of_episodes(relation.key, self._positions(relation.key))
        there = self.of_keys.something(stretches.filled)
        names, asking = relation.key.episodes[:, None], relation.query.episode[..., None]
        own = (asking == names) | (asking == EMPTY)
        keys, values = self._summaries(k, v, stretches, summarize)
        if bool(own.all()) and bool(there.all()):
            return softmax_average(q, keys, values, None, dropout)
        allowed = (own[..., None] & there[:, None]).flatten(2)[:, None]
        return attend(q, keys, values, allowed, dropout)

    def _positions(self, index: Index) -> int:
        """How many positions are projected: as many as the longest episode has, in whole pieces."""
        longest = int(index.position.masked_fill(index.episode == EMPTY, 0).max()) + 1
        if longest > self.spec.length:
            raise ValueError(
                f"{self.spec} projects sequences of at most {self.spec.length} tokens, got position "
                f"{longest - 1}; choose a larger length"
            )
        return -(-longest // self.of_keys.piece) * self.of_keys.piece

    def _one_by_one(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, dropout: float, summarize: Summarize
    ) -> Tensor:
        """Each query sees tokens, and summaries in place of those of blocks that it sees whole."""
        blocks = Stretches.of_whole_blocks(relation.key, self.spec.length)
        allowed, tokens = relation.allowed_by_head, k.shape[2]
        if not blocks.slots.numel():
            return attend(q, k, v, allowed, dropout)
        seen = blocks.seen_by(allowed) & self._before(blocks, relation)
        alone = allowed & ~blocks.spread(seen, tokens)
        keys, values = self._summaries(k, v, blocks, summarize)
        keys, values = torch.cat([k, keys], dim=2), torch.cat([v, values], dim=2)
        count = (keys.shape[2] - tokens) // seen.shape[-1]
        allowed = torch.cat([alone, seen.repeat_interleave(count, dim=-1)], dim=-1)
        return attend(q, keys, values, allowed, dropout)

    @staticmethod
    def _before(blocks: Stretches, relation: Relation) -> Tensor:
        """(B, 1, Tq, N) bool: whether a block ends before the query stands."""
        last = relation.key.position.gather(1, blocks.slots[..., -1].clamp(min=0))
        return (last[:, None] < relation.query.position[..., None])[:, None]

    def _block_by_block(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, summarize: Summarize
    ) -> Tensor:
        """`_one_by_one` where row upon row is one episode from the start of a block on."""
        size = self.spec.length
        whole = torch.arange(k.shape[2] // size * size, device=k.device)
        blocks = Stretches(whole.view(1, -1, size).expand(len(k), -1, -1))
        keys, values = self._summaries(k, v, blocks, summarize)
        count, found = keys.shape[2] // blocks.slots.shape[1], []
        for number, asking in enumerate(q.split(size, dim=2)):
            own, before = slice(number * size, (number + 1) * size), slice(0, number * count)
            seen = torch.cat([keys[:, :, before], k[:, :, own]], dim=2)
            mixed = torch.cat([values[:, :, before], v[:, :, own]], dim=2)
            allowed = torch.ones(asking.shape[2], seen.shape[2], dtype=torch.bool, device=k.device)
            found.append(attend(asking, seen, mixed, allowed.tril(number * count), dropout))
        return torch.cat(found, dim=2)

    def _summaries(
        self, k: Tensor, v: Tensor, stretches: Stretches, summarize: Summarize
    ) -> tuple[Tensor, Tensor]:
        """Those of keys and of values, (B, H, N k, D)."""
        filled = stretches.filled
        return self.of_keys(stretches.lay_out(k), filled), summarize(stretches.lay_out(v), filled)


def in_blocks_from_the_start(relation: Relation, size: int) -> bool:
    """Whether rows of a long pass are one episode each, at the same positions, from the start of a block."""
    query, key = relation.query, relation.key
    long = relation.tables is None and query.shape == key.shape and key.shape[1] > 2 * size
    if not long or not isinstance(relation.pattern, Full):
        return False
    first = int(key.position[0, 0])
    ascending = torch.arange(first, first + key.shape[1], device=key.position.device)
    one = (key.position == ascending) & (key.episode == key.episode[:, :1]) & (key.episode != EMPTY)
    return first % size == 0 and bool(one.all())


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout: float) -> Tensor:
    """Softmax attention to the keys that are ``allowed``, (B, H, Tq, Tk) or what broadcasts to it.

    Who sees nothing sees all instead, lest softmax be nan: what it gets means nothing.
    """
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    return softmax_average(q, k, v, torch.where(allowed, 0.0, -torch.inf).to(q.dtype), dropout)


def softmax_average(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """``softmax(q k / sqrt(D) + mask) v``; dropout is the probability with which a weight is set to 0."""
    if not dropout:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores + mask
    return drop_some(scores.softmax(dim=-1), dropout) @ v
