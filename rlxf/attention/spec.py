"""Specification of a transformer as plain data: a technique for each axis, and the sizes."""

import json
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any, get_args

from rlxf.attention.attention_options import AttentionGate, QKNorm
from rlxf.attention.depth.base import Depth
from rlxf.attention.depth.constant import Fixed
from rlxf.attention.feed_forward import Activation
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.memory.base import Memory
from rlxf.attention.norm import Norm, NormType
from rlxf.attention.parameter_checks import parameter_fault
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.window import Full
from rlxf.attention.positions.base import Position
from rlxf.attention.recurrent.base import Recurrence
from rlxf.attention.registry import (
    OPTIONAL,
    TECHNIQUES,
    technique_from_json,
    technique_to_json,
    techniques_of,
)
from rlxf.attention.residuals.base import Add, Residual
from rlxf.attention.segmented import SegmentedTransformer
from rlxf.attention.technique import SpecView, check_layer_numbers
from rlxf.attention.transformer import Transformer
from rlxf.utils.checks import (
    PythonNumbers,
    check_between,
    check_bool,
    check_choice,
    check_int,
)

MAX_LAYERS = 1000
"""Depth of the deepest trained transformer: Wang et al. 2022, arXiv:2203.00555."""


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(PythonNumbers, SpecView):
    """Configuration of a `Transformer`: a technique for each of seven axes, and the sizes.

    A Gated Transformer-XL is ``TransformerSpec(position=XLRelative(), pattern=Window(M + 1),
    memory=XL(M), residual=GRUGate(bias=2.0), norm="pre")``.

    Args:
        width: features of a token C.
        layers: number of passes of a token through layers; with `Fixed` depth, the number of layers L.
        heads: attention heads H; must divide the width.
        kv_heads: heads of keys and values that the H heads share, which must divide H; 1 for multi-query
            attention, None for H. `AttentionOptions` describes this option and the next two.
        qk_norm: normalization of queries and keys: "rms", "rms_all_heads" or "l2"; None for none.
        attention_gate: gate of the outputs of attention: "elementwise" or "headwise"; None for none.
        feed_forward: hidden features of the feed-forward sublayer; None for 4 C, with "swiglu" 8 C / 3, for
            the same number of parameters.
        feed_forward_chunk: tokens per chunk of the feed-forward sublayer, which reduces memory; None
            processes all tokens at once. See `FeedForward`.
        position: position encoding; None for none.
        pattern: attention pattern: the keys that a query may attend to.
        kernel: attention kernel: computes the weighted average of the values.
        memory: memory of the tokens before a segment; None for none.
        recurrence: recurrent mixer in place of self-attention; None for self-attention in all layers. Its
            state lasts for the whole episode, whatever the memory.
        attention_layers: layers, from 0, that keep self-attention in a transformer with a recurrence.
        residual: residual connection of each sublayer.
        depth: number of passes of each token, fixed or adaptive.
        norm: norm before ("pre") or after ("post") each sublayer.
        norm_type: "layer_norm", or "rms_norm", which does not subtract the mean; see `RMSNorm`.
        final_norm: whether a norm follows the last layer.
        causal: whether future tokens are masked. False gives a bidirectional encoder, which cannot act.
        cross_attention: whether layers have cross-attention to a context, as in a decoder.
        activation: activation of the feed-forward sublayer: "relu", "gelu" or "gelu_tanh"; or "swiglu", which
            makes it a gated network; see `SwiGLU`.
        dropout: probability of dropping an attention weight or a feature of a sublayer's output in
            training. Use 0 for PPO, because actions must have the same probabilities in training.

    Raises:
        ValueError: if a size is out of range, heads do not divide the width, or techniques are incompatible.
        TypeError: if a size is not an int, or a technique does not belong to its axis.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    qk_norm: QKNorm | None = None
    attention_gate: AttentionGate | None = None
    feed_forward: int | None = None
    feed_forward_chunk: int | None = None
    position: Position | None = None
    pattern: Pattern = Full()
    kernel: Kernel = Softmax()
    memory: Memory | None = None
    recurrence: Recurrence | None = None
    attention_layers: tuple[int, ...] = ()
    residual: Residual = Add()
    depth: Depth = Fixed()
    norm: Norm = "pre"
    norm_type: NormType = "layer_norm"
    final_norm: bool = True
    causal: bool = True
    cross_attention: bool = False
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        layers = self.attention_layers
        layers = () if layers in ((), []) else check_layer_numbers("attention_layers", layers)
        object.__setattr__(self, "attention_layers", layers)
        self._check_sizes()
        self._check_switches()
        for axis in TECHNIQUES:
            self._check_technique(axis)
        for axis in TECHNIQUES:
            if (technique := getattr(self, axis)) is not None:
                technique.check(self)
        self.kernel.for_layers(self.distinct_layers)
        self._check_layers_with_attention()

    def build(self) -> Transformer:
        """Build the module with random weights from torch's global generator.

        Raises:
            ValueError: if the options of a recurrence give an initial weight that is not finite.
        """
        kind = SegmentedTransformer if self.counts_positions_by_segment else Transformer
        transformer = kind(self)
        if self.has_recurrence and (fault := parameter_fault(transformer)) is not None:
            raise ValueError(f"{fault}; use other options")
        return transformer

    def resolved(self) -> "TransformerSpec":
        """Return an equivalent spec whose `feed_forward` is a number."""
        return self if self.feed_forward is not None else replace(self, feed_forward=self.inner_width)

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
            ValueError: if the text is not JSON, or a technique, an option or a field is unknown, out of range
                or of another type.
        """
        try:
            return cls.from_dict(json.loads(text))
        except RecursionError as error:
            raise ValueError("the JSON text of a TransformerSpec is nested too deeply") from error

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TransformerSpec":
        """Create a spec from the result of `to_dict`. Raises like `from_json`."""
        if not isinstance(data, dict):
            raise ValueError(f"TransformerSpec must be a JSON object, got {data!r}")
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            names = sorted(unknown, key=str)
            raise ValueError(f"TransformerSpec has no field {names}; it has {sorted(known)}")
        chosen = {axis: technique_from_json(axis, data[axis]) for axis in TECHNIQUES if axis in data}
        try:
            return cls(**{**data, **chosen})
        except TypeError as error:
            raise ValueError(f"TransformerSpec: {error}") from error

    def _check_sizes(self) -> None:
        for name in ("width", "layers", "heads"):
            check_int(name, getattr(self, name))
        check_int("feed_forward", self.inner_width)
        if self.layers > MAX_LAYERS:
            raise ValueError(f"layers must be at most {MAX_LAYERS:,}, got {self.layers:,}")
        if self.feed_forward_chunk is not None:
            check_int("feed_forward_chunk", self.feed_forward_chunk)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got {self.heads} heads and width {self.width}")
        self._check_key_heads()
        check_between("dropout", self.dropout, 0, 1, inclusive="left")

    def _check_key_heads(self) -> None:
        if self.kv_heads is None:
            return
        check_int("kv_heads", self.kv_heads)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got {self.kv_heads} kv_heads and {self.heads} heads; use "
                f"kv_heads={gcd(self.kv_heads, self.heads)}"
            )

    def _check_switches(self) -> None:
        """Check the options that are booleans or names."""
        for name in ("final_norm", "causal", "cross_attention"):
            check_bool(name, getattr(self, name))
        names = {"norm": Norm, "norm_type": NormType, "activation": Activation}
        for name, choices in names.items():
            check_choice(name, getattr(self, name), get_args(choices))
        for name, choices in {"qk_norm": QKNorm, "attention_gate": AttentionGate}.items():
            check_choice(name, getattr(self, name), (None, *get_args(choices)))

    def _check_layers_with_attention(self) -> None:
        """Check `attention_layers`, and that no choice is without effect because no layer has attention."""
        for layer in self.attention_layers:
            if layer >= self.distinct_layers:
                raise ValueError(
                    f"attention_layers must be at most {self.distinct_layers - 1}, got {layer}: with depth "
                    f"{self.depth}, layers={self.layers} have {self.distinct_layers} sets of weights, "
                    f"numbered from 0; list other layers, or use depth=Fixed()"
                )
        if self.attention_layers and not self.has_recurrence:
            raise ValueError(
                f"attention_layers={self.attention_layers} leaves no layer with a recurrence: set recurrence "
                f"and list fewer than all {self.distinct_layers} layers, or leave attention_layers out"
            )
        if not self.has_attention:
            self._check_without_attention()

    def _check_without_attention(self) -> None:
        for axis in ("pattern", "kernel", "memory", "kv_heads", "qk_norm", "attention_gate"):
            if (choice := getattr(self, axis)) != type(self).__dataclass_fields__[axis].default:
                raise ValueError(
                    f"{axis} {choice} has no effect, because all layers have the recurrence "
                    f"{self.recurrence} in place of attention; leave it out, or list layers with attention "
                    f"in attention_layers"
                )
        if self.position is not None:
            try:
                self.position.check_without_attention()
            except ValueError as error:
                raise ValueError(
                    f"{error}, but all layers have the recurrence {self.recurrence}; use position=None or "
                    f"Sinusoidal(), or list layers with attention in attention_layers"
                ) from error

    def _check_technique(self, axis: str) -> None:
        choice = getattr(self, axis)
        if choice is None and axis in OPTIONAL:
            return
        kind = type(choice)
        known = techniques_of(axis).values()
        if kind not in known and any(str(other) == str(kind) for other in known):
            raise TypeError(
                f"{axis} {choice!r} is of an earlier definition of its class, which has been registered "
                f"again since; create it again with the present class"
            )
        if kind not in known:
            raise TypeError(f"{axis} must be one of {', '.join(TECHNIQUES[axis])}, got {choice!r}")
