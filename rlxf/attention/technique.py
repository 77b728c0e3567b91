"""Base class of all techniques, what they see of a transformer and keep for a loss, and checks of options."""

import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from rlxf.attention.attention_options import AttentionArguments, AttentionOptions
from rlxf.attention.feed_forward import default_inner_width
from rlxf.attention.token_index import TokenIndex

AttentionFactory = Callable[[AttentionArguments], nn.Module]
"""Constructor of an attention module, such as `Attention`."""
Item = TypeVar("Item")


POST_INIT = "__post_init__"
"""Name of the method in which dataclasses check their fields."""


def to_python_number(value: Any) -> Any:
    """Return an integer as an int and another real number as a float, also in a tuple or list.

    Other values are returned as they are, among them bools and NumPy's bools, which are no numbers here.
    """
    if type(value) in (tuple, list):
        return type(value)(map(to_python_number, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


class PythonNumbers:
    """Base of dataclasses whose fields have built-in numbers, so that they can be stored as JSON.

    NumPy scalars are converted before ``__post_init__`` of the dataclass.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check = cls.__dict__.get(POST_INIT)
        if check is not None:
            setattr(cls, POST_INIT, _after_conversion(check))

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if field.init:
                object.__setattr__(self, field.name, to_python_number(getattr(self, field.name)))


def _after_conversion(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``__post_init__`` of a dataclass, preceded by the conversion."""

    @wraps(check)
    def convert_and_check(self: Any) -> None:
        PythonNumbers.__post_init__(self)
        check(self)

    return convert_and_check


class SpecView:
    """Settings of a transformer, as techniques and modules see them; the base of `TransformerSpec`."""

    position: Any
    pattern: Any
    kernel: Any
    memory: Any
    recurrence: Any
    attention_layers: tuple[int, ...]
    residual: Any
    depth: Any
    width: int
    layers: int
    heads: int
    kv_heads: int | None
    qk_norm: Any
    attention_gate: Any
    feed_forward: int | None
    feed_forward_chunk: int | None
    norm: Any
    norm_type: Any
    final_norm: bool
    causal: bool
    cross_attention: bool
    activation: Any
    dropout: float

    @property
    def attention_options(self) -> AttentionOptions:
        """Options of the attention layers."""
        return AttentionOptions(self.kv_heads, self.qk_norm, self.attention_gate)

    @property
    def score_heads(self) -> int:
        """Number of heads with attention weights, as positions see them; see `Kernel.score_heads`."""
        return int(self.kernel.score_heads(self.heads))

    @property
    def shares_keys(self) -> bool:
        """True if several heads share keys and values."""
        return self.kv_heads is not None and self.kv_heads < self.heads

    @property
    def distinct_layers(self) -> int:
        """Number of layers with distinct weights."""
        return 1 + max(map(self.depth.layer_of_pass, range(self.layers)))

    @property
    def inner_width(self) -> int:
        """Hidden features of the feed-forward sublayer."""
        if self.feed_forward is not None:
            return self.feed_forward
        return default_inner_width(self.width, self.activation)

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer, numbered from 0, has a recurrent mixer in place of self-attention."""
        return self.recurrence is not None and layer not in self.attention_layers

    @property
    def attention_passes(self) -> list[int]:
        """Numbers of the passes with self-attention, from 0."""
        order = map(self.depth.layer_of_pass, range(self.layers))
        return [number for number, layer in enumerate(order) if not self.is_recurrent(layer)]

    @property
    def max_positions(self) -> int | None:
        """Number of positions, in tokens, from 0; None if unlimited."""
        most: int | None = None if self.position is None else self.position.max_positions
        return most

    @property
    def counts_positions_by_segment(self) -> bool:
        """True if positions count from the start of a segment of the memory, as those of `RMT`."""
        return self.memory is not None and self.memory.segment_length is not None

    @property
    def has_recurrence(self) -> bool:
        """True if at least one layer has a recurrent mixer in place of self-attention."""
        return any(map(self.is_recurrent, range(self.distinct_layers)))

    @property
    def has_attention(self) -> bool:
        """True if at least one layer has self-attention."""
        return not all(map(self.is_recurrent, range(self.distinct_layers)))


class LayerPasses(Protocol):
    """Passes of tokens through layers in one call of a transformer.

    All tokens enter every pass, in order, even if they skip its computation: keys and values for later tokens
    are computed from the inputs of a pass. Tokens x are the residual stream: usually (B, T, C).
    """

    index: TokenIndex
    """Positions and episodes of the tokens, (B, T)."""

    @property
    def count(self) -> int:
        """Number of passes N."""
        ...

    @property
    def filled(self) -> Tensor:
        """Mask of tokens, as opposed to empty slots, (B, T) bool."""
        ...

    def run_all(self, x: Tensor) -> Tensor:
        """Run all passes, each once, on x (B, T, C) and return the selected outputs, (B, Tq, C)."""
        ...

    def start_pass(self, pass_index: int, x: Tensor) -> Tensor:
        """Return the input x (B, T, C) of a pass, counted from 0, and add it to the memory of that pass."""
        ...

    def run(self, pass_index: int, x: Tensor) -> Tensor:
        """Run the layer of a pass on all tokens: (B, T, C), in the last pass (B, Tq, C)."""
        ...

    def skip(self, pass_index: int, x: Tensor) -> None:
        """Skip a pass that no token needs, and store its input x for later tokens."""
        ...

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of attention for the residual stream x: (B, T, C)."""
        ...

    def select_outputs(self, x: Tensor) -> Tensor:
        """Select the tokens whose outputs are requested, (B, Tq, ...), of all tokens (B, T, ...)."""
        ...


class PendingTerms(list[Item]):
    """List of what the last forward keeps for an auxiliary loss; a copy or pickle of it is empty.

    Its tensors belong to the autograd graph of that forward, which cannot be copied.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), ()


class Technique(PythonNumbers):
    """Base of all techniques: frozen dataclasses, one per option of an axis of a transformer.

    ``paper`` is the source. ``causal_form`` is the origin of the causal form: the paper, this library or
    torch, or "token by token" where none is needed.
    ``cost`` is the additional cost as a function of the sequence length L.
    """

    paper: ClassVar[str]
    causal_form: ClassVar[str]
    cost: ClassVar[str]

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless this technique is compatible with the other settings of a transformer.

        A spec that passes all checks can be built, unless the options of its recurrence give an initial
        weight that is not finite.
        """

    def check_capture(self, choices: SpecView) -> None:
        """Raise CompilationError if a training pass cannot be captured as one program; by default never.

        A captured pass repeats the operations of its first run, and so must a pass with this technique: for
        other values of tensors, and in the backward pass.
        """

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of self-attention that this technique requires; by default ``default``."""
        return default


MAX_INT = 2**31 - 1
"""Largest accepted size, distance or count: the product of two of them fits into an int64."""

MAX_SEED = 2**63 - 1
"""Largest accepted seed: the maximum of int64."""

MIN_FLOAT, MAX_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest and largest magnitude of a normal float32."""


def check_int(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> None:
    """Check that ``value`` is an int, or a NumPy integer, from ``least`` to ``most``.

    Raises:
        TypeError: if it is not an integer, or a bool.
        ValueError: if it is out of range.
    """
    value = to_python_number(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_layer_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return numbers of layers, from 0, as a tuple in ascending order; a list from JSON is accepted.

    Raises:
        TypeError: if ``value`` is not a tuple or list of ints.
        ValueError: if it is empty, or a number is negative or given twice.
    """
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name} must be a tuple of whole numbers, got {value!r}")
    for number in value:
        check_int(name, number, least=0)
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{name} must be different numbers, at least one, got {value}")
    return tuple(sorted(value))


def is_tuple_or_list(value: Any) -> bool:
    """Return whether an option is a tuple, or a list: JSON has no tuples."""
    return isinstance(value, tuple | list)


def check_seed(name: str, value: Any) -> None:
    """Check that ``value`` is an int from 0 to `MAX_SEED`. Raises like `check_int`."""
    check_int(name, value, least=0, most=MAX_SEED)


def layer_seed(seed: int, layer: int) -> int:
    """Return the seed of a layer, numbered from 0: layers have consecutive seeds, modulo `MAX_SEED` + 1."""
    return (seed + layer) % (MAX_SEED + 1)


def check_finite_number(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number that float32 represents without overflow or underflow.

    NumPy scalars are accepted.

    Raises:
        TypeError: if it is not a real number, or a bool.
        ValueError: if it is NaN, infinite, or outside the range of normal float32 numbers and not 0.
    """
    value = to_python_number(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
        raise ValueError(f"{name} must be 0 or from 1.2e-38 to 3.4e+38 in size, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number and at least 0. Raises like `check_finite_number`."""
    check_finite_number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number above 0. Raises like `check_finite_number`."""
    check_finite_number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")


def check_choice(name: str, value: Any, words: tuple[str | None, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the given words."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool. The truth value of other types is not accepted."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
