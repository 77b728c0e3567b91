"""Base class of all techniques, and what techniques see of a transformer."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from rlxf.attention.token_index import TokenIndex

AttentionFactory = Callable[[int, int, Any, Any, float], nn.Module]
"""Constructor of self-attention from width, heads, position, kernel and dropout, as that of `Attention`."""


class SpecView(Protocol):
    """Read-only view of a `TransformerSpec`, for checks of techniques and modules of a transformer."""

    @property
    def position(self) -> Any: ...
    @property
    def pattern(self) -> Any: ...
    @property
    def kernel(self) -> Any: ...
    @property
    def memory(self) -> Any: ...
    @property
    def residual(self) -> Any: ...
    @property
    def depth(self) -> Any: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def norm(self) -> Any: ...
    @property
    def causal(self) -> bool: ...
    @property
    def cross_attention(self) -> bool: ...
    @property
    def final_norm(self) -> bool: ...
    @property
    def kinds(self) -> int: ...
    @property
    def inner_width(self) -> int: ...
    @property
    def feed_forward_chunk(self) -> int | None: ...
    @property
    def activation(self) -> Any: ...
    @property
    def dropout(self) -> float: ...
    def build(self) -> Any: ...


class LayerPasses(Protocol):
    """Passes of tokens through layers in one call of a transformer.

    All tokens enter every pass, in order, even if they skip its computation: keys and values for later tokens
    are computed from the inputs of a pass. Tokens x are the residual stream: usually (B, T, C).
    """

    @property
    def count(self) -> int:
        """Number of passes N."""
        ...

    @property
    def index(self) -> TokenIndex:
        """Positions and episodes of the tokens, (B, T)."""
        ...

    @property
    def filled(self) -> Tensor:
        """Mask of tokens, as opposed to empty slots, (B, T) bool."""
        ...

    def run_all(self, x: Tensor) -> Tensor:
        """Run all passes, each once, on x (B, T, C) and return the selected outputs, (B, Tq, C)."""
        ...

    def start_pass(self, number: int, x: Tensor) -> Tensor:
        """Return the input x (B, T, C) of pass ``number``, and add it to the memory of that pass."""
        ...

    def run(self, number: int, x: Tensor) -> Tensor:
        """Run the layer of a pass on all tokens: (B, T, C), in the last pass (B, Tq, C)."""
        ...

    def skip(self, number: int, x: Tensor) -> None:
        """Skip a pass that no token needs, and store its input x for later tokens."""
        ...

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of attention for the residual stream x: (B, T, C)."""
        ...

    def select_outputs(self, x: Tensor) -> Tensor:
        """Select the tokens whose outputs are requested, (B, Tq, ...), of all tokens (B, T, ...)."""
        ...


class Technique:
    """Base of all techniques: frozen dataclasses, one per option of an axis of a transformer.

    ``paper`` is the source and ``causal`` the origin of the causal form: the paper or this library. ``cost``
    is the additional cost as a function of the sequence length L.
    """

    paper: ClassVar[str]
    causal: ClassVar[str]
    cost: ClassVar[str]

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless this technique is compatible with the other settings of a transformer.

        A spec that passes all checks can be built: `build` raises no further errors.
        """

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of self-attention that this technique requires; by default ``default``."""
        return default
