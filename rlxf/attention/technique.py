"""Base class of techniques, the view of a spec that they receive, and the storage of auxiliary-loss terms."""

from collections.abc import Callable, Iterable, Set
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from rlxf.attention.attention_options import AttentionArguments, AttentionOptions
from rlxf.attention.feed_forward import default_inner_width
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import MAX_SEED, PythonNumbers, check_int

AttentionFactory = Callable[[AttentionArguments], nn.Module]
"""Constructor of an attention module, such as `Attention`."""
Item = TypeVar("Item")


class SpecView:
    """Settings of a transformer, as techniques and modules receive them; the base of `TransformerSpec`."""

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
        """Number of heads with attention weights; see `Kernel.score_heads`."""
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


def is_outdated(kind: type, name: str, methods: Set[str]) -> bool:
    """Return whether a class overrides one of the methods, but inherits the attribute ``name``.

    The attribute comes from a base class that already has the method. It was written for that method, and may
    not hold for another one.
    """
    classes = kind.__mro__
    owner = next(number for number, base in enumerate(classes) if name in vars(base))
    return any(
        _is_defined(getattr(base, method, None))
        for number, overriding in enumerate(classes[:owner])
        for method in methods & vars(overriding).keys()
        for base in classes[number + 1 : owner + 1]
    )


def _is_defined(method: Any) -> bool:
    """Return whether a method exists and is not abstract."""
    return method is not None and not getattr(method, "__isabstractmethod__", False)


def drop_outdated(kind: type, base: type, names: Iterable[str], methods: Set[str]) -> None:
    """Replace the attributes of a class that are outdated by those of ``base``; see `is_outdated`."""
    for name in names:
        if is_outdated(kind, name, methods):
            setattr(kind, name, vars(base)[name])


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


def layer_seed(seed: int, layer: int) -> int:
    """Return the seed of a layer, numbered from 0: layers have consecutive seeds, modulo `MAX_SEED` + 1."""
    return (seed + layer) % (MAX_SEED + 1)
