"""Specification of a transformer as plain data: techniques and sizes."""

import json
from dataclasses import dataclass, fields
from typing import Any, get_args

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
from rlxf.attention.registry import (
    OPTIONAL,
    TECHNIQUES,
    technique_from_json,
    technique_to_json,
    techniques_of,
)
from rlxf.attention.residuals.add import Add
from rlxf.attention.residuals.base import Residual
from rlxf.attention.transformer import Transformer
from rlxf.attention.validation import check_bool, check_choice, check_finite_number, check_int

MOST_LAYERS = 1000
"""Depth of the deepest trained transformer: Wang et al. 2022, arXiv:2203.00555."""


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Configuration of a `Transformer`: a technique for each of six axes, and the sizes.

    A Gated Transformer-XL is ``TransformerSpec(position=XLRelative(), pattern=Window(M + 1),
    memory=XL(M), residual=GRUGate(bias=2.0), norm="pre")``.

    Args:
        width: features of a token C.
        layers: number of passes of a token through layers; with `Fixed` depth, the number of layers L.
        heads: attention heads H; must divide the width.
        feed_forward: hidden features of the feed-forward sublayer; None for 4 C.
        feed_forward_chunk: tokens per chunk of the feed-forward sublayer, which reduces memory; None
            processes all tokens at once. See `FeedForward`.
        position: position encoding; None for none.
        pattern: attention pattern: the keys that a query may attend to.
        kernel: attention kernel: computes the weighted average of the values.
        memory: memory of the tokens before a segment; None for none.
        residual: residual connection of each sublayer.
        depth: number of passes of each token, fixed or adaptive.
        norm: layer norm before ("pre") or after ("post") each sublayer.
        final_norm: whether a layer norm follows the last layer.
        causal: whether future tokens are masked. False gives a bidirectional encoder, which cannot act.
        cross_attention: whether layers have cross-attention to a context, as in a decoder.
        activation: activation of the feed-forward sublayer: "relu", "gelu" or "gelu_tanh".
        dropout: probability of dropping an attention weight or a feature of a sublayer's output in
            training. Use 0 for PPO, because actions must have the same probabilities in training.

    Raises:
        ValueError: if a size is out of range, heads do not divide the width, or techniques are incompatible.
        TypeError: if a size is not an int, or a technique does not belong to its axis.
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
        """Number of layers with distinct weights."""
        return 1 + max(map(self.depth.layer_of_pass, range(self.layers)))

    @property
    def inner_width(self) -> int:
        """Hidden features of the feed-forward sublayer."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    def build(self) -> Transformer:
        """Build the module with random weights from torch's global generator."""
        return Transformer(self)

    def to_json(self) -> str:
        """Return this spec as JSON text; `from_json` is the inverse."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return this spec as plain data, with techniques as ``{"name": ..., ...options}``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {axis: technique_to_json(values[axis]) for axis in TECHNIQUES}

    @classmethod
    def from_json(cls, text: str) -> "TransformerSpec":
        """Create a spec from the result of `to_json`.

        Raises:
            ValueError: if a technique, an option or a field is unknown or out of range.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TransformerSpec":
        """Create a spec from the result of `to_dict`. Raises like `from_json`."""
        if not isinstance(data, dict):
            raise ValueError(f"TransformerSpec must be a JSON object, got {data!r}")
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"TransformerSpec has no field {sorted(unknown)}; it has {sorted(known)}")
        chosen = {axis: technique_from_json(axis, data[axis]) for axis in TECHNIQUES if axis in data}
        return cls(**{**data, **chosen})

    def _check_sizes(self) -> None:
        for name in ("width", "layers", "heads"):
            check_int(name, getattr(self, name))
        check_int("feed_forward", self.inner_width)
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers must be at most {MOST_LAYERS:,}, got {self.layers:,}")
        if self.feed_forward_chunk is not None:
            check_int("feed_forward_chunk", self.feed_forward_chunk)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got {self.heads} heads and width {self.width}")
        check_finite_number("dropout", self.dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    def _check_words(self) -> None:
        for name in ("final_norm", "causal", "cross_attention"):
            check_bool(name, getattr(self, name))
        for name, words in (("norm", get_args(Norm)), ("activation", get_args(Activation))):
            check_choice(name, getattr(self, name), words)

    def _check_technique(self, axis: str) -> None:
        choice = getattr(self, axis)
        if choice is None and axis in OPTIONAL:
            return
        if type(choice) not in techniques_of(axis).values():
            raise TypeError(f"{axis} must be one of {', '.join(TECHNIQUES[axis])}, got {choice!r}")
