"""A transformer as plain data: six choices and the sizes."""

import json
from dataclasses import dataclass, fields
from typing import Any, get_args

from rlxf.attention.checks import check_finite_number, check_flag, check_whole, check_word
from rlxf.attention.depth.base import Depth
from rlxf.attention.depth.fixed import Fixed
from rlxf.attention.feed_forward import Activation
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.memory.base import Memory
from rlxf.attention.norm import Norm
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.full import Full
from rlxf.attention.positions.base import Position
from rlxf.attention.residuals.add import Add
from rlxf.attention.residuals.base import Residual
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES, known, technique_from_json, technique_to_json
from rlxf.attention.transformer import Transformer

MOST_LAYERS = 1000
"""As many as the deepest transformer that was trained: Wang et al. 2022, arXiv:2203.00555."""


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Six choices and the sizes. Compares, prints, goes to JSON and back, and builds.

    A Gated Transformer-XL is ``TransformerSpec(position=XLRelative(), pattern=Window(M + 1),
    memory=XL(M), residual=GRUGate(bias=2.0), norm="pre")``.

    Args:
        width: features of a token C.
        layers: number of passes of a token through a layer; with `Fixed` depth, of layers L.
        heads: attention heads H; must divide the width.
        feed_forward: features inside the feed-forward sublayer; None for 4 C.
        feed_forward_chunk: tokens that the feed-forward sublayer takes at a time, to need less memory; None
            for all of them. See `FeedForward`.
        position: how does order enter? None: not at all.
        pattern: which tokens may a query see?
        kernel: how is the weighted average computed?
        memory: what survives from before the segment? None: nothing.
        residual: how does a sublayer's output join the stream?
        depth: how many times is a token processed?
        norm: layer norm before ("pre") or behind ("post") each sublayer.
        final_norm: one more layer norm at the top.
        causal: hide what is ahead of the query. False: a bidirectional encoder, which cannot act.
        cross_attention: a decoder, whose layers also look at a context.
        activation: of the feed-forward sublayer, "relu", "gelu" or "gelu_tanh".
        dropout: probability of dropping an attention weight or a feature of a sublayer's output in
            training. Keep it 0 for PPO: acting must equal learning.

    Raises:
        ValueError: if a size is out of range or heads do not divide the width.
        TypeError: if a size is no whole number, or a choice no technique of its axis.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    feed_forward: int | None = None
    feed_forward_chunk: int | None = None
    position: Position | None = None
    pattern: Pattern = Full()
    kernel: Kernel = Softmax()
    memory: Memory | None = None
    residual: Residual = Add()
    depth: Depth = Fixed()
    norm: Norm = "pre"
    final_norm: bool = True
    causal: bool = True
    cross_attention: bool = False
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_words()
        for axis in TECHNIQUES:
            self._check_technique(axis)
        for axis in TECHNIQUES:
            if (technique := getattr(self, axis)) is not None:
                technique.check(self)
        self.kernel.for_layers(self.kinds)

    @property
    def kinds(self) -> int:
        """Layers that have weights of their own."""
        return 1 + max(map(self.depth.layer_of, range(self.layers)))

    @property
    def inner_width(self) -> int:
        """Features inside the feed-forward sublayer."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    def build(self) -> Transformer:
        """The module, with fresh weights from torch's global generator."""
        return Transformer(self)

    def to_json(self) -> str:
        """This spec as JSON text; `from_json` reads it."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """This spec as plain data: techniques as ``{"name": ..., ...options}``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {axis: technique_to_json(values[axis]) for axis in TECHNIQUES}

    @classmethod
    def from_json(cls, text: str) -> "TransformerSpec":
        """Read what `to_json` wrote.

        Raises:
            ValueError: if a technique, an option or a field is unknown or out of range.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TransformerSpec":
        """Read what `to_dict` wrote; raises as `from_json` does."""
        if not isinstance(data, dict):
            raise ValueError(f"TransformerSpec must be a JSON object, got {data!r}")
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"TransformerSpec has no field {sorted(unknown)}; it has {sorted(known)}")
        chosen = {axis: technique_from_json(axis, data[axis]) for axis in TECHNIQUES if axis in data}
        return cls(**{**data, **chosen})

    def _check_sizes(self) -> None:
        for name in ("width", "layers", "heads"):
            check_whole(name, getattr(self, name))
        check_whole("feed_forward", self.inner_width)
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers must be at most {MOST_LAYERS:,}, got {self.layers:,}")
        if self.feed_forward_chunk is not None:
            check_whole("feed_forward_chunk", self.feed_forward_chunk)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got {self.heads} heads and width {self.width}")
        check_finite_number("dropout", self.dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    def _check_words(self) -> None:
        for name in ("final_norm", "causal", "cross_attention"):
            check_flag(name, getattr(self, name))
        for name, words in (("norm", get_args(Norm)), ("activation", get_args(Activation))):
            check_word(name, getattr(self, name), words)

    def _check_technique(self, axis: str) -> None:
        choice = getattr(self, axis)
        if choice is None and axis in OPTIONAL:
            return
        if type(choice) not in known(axis).values():
            raise TypeError(f"{axis} must be one of {', '.join(TECHNIQUES[axis])}, got {choice!r}")
