"""Longformer: sliding window, dilated in some heads, and global tokens."""

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import ClassVar

from rlxf.attention.patterns.base import (
    ByLayer,
    Pattern,
    check_has_layers,
    checked_by_layer,
    number_in_layer,
    numbers_by_layer,
)
from rlxf.attention.patterns.global_tokens import GlobalTokens
from rlxf.attention.patterns.window import Dilated, check_plain_heads, limit_distance
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class Longformer(GlobalTokens):
    """Tokens attend to a window around them and to global tokens; global tokens attend to all tokens.

    The window has ``window / 2`` keys on each side. With dilation d, a token attends to every d-th key of a
    window d times as long. Global tokens have separate projections of queries, keys and values. The paper's
    windows and dilations grow with the layer: both options may be tuples, whose numbers repeat over the
    layers.

    The first tokens of an episode are the global ones, or those at given positions: all tokens of a question,
    for example. In a causal transformer they attend to earlier tokens only; this form is rlxf's variant, as
    the paper's causal form has no global tokens.

    No weight depends on the sizes. An agent whose window grows during training (the staged training of
    section 4.2) therefore takes over the parameters of the agent with the smaller window.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1; section 4.1 for windows by layer.

    Args:
        window: number of keys around a token, half of them on each side; even; a tuple repeats over
            the layers.
        dilation: distance of adjacent keys, in tokens; a tuple repeats over the layers.
        plain_heads: number of heads with a dilation of 1; they are the first ones.
        global_tokens: number of global tokens, or their positions in an episode as a tuple.
        farthest: distance, in tokens, beyond which no token attends to another; None for no bound. For an
            agent with memory, set the memory's length.

    Raises:
        TypeError: if an option is not an integer or, where allowed, a tuple of integers.
        ValueError: if window is odd or less than 2; if dilation, global_tokens or farthest is less than 1; if
            plain_heads is less than 0; if a tuple is empty; if a position is negative or given twice; or if
            window and dilation are tuples of different lengths. In a spec, if they have more numbers than the
            transformer has layers, or plain_heads has no effect or leaves no head with a dilation.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L (window + global_tokens) pairs"
    window: ByLayer = 128
    dilation: ByLayer = 1
    plain_heads: int = 0
    global_tokens: int | tuple[int, ...] = 1
    farthest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", checked_by_layer("Longformer window", self.window, least=2))
        object.__setattr__(self, "dilation", checked_by_layer("Longformer dilation", self.dilation))
        check_int("Longformer plain_heads", self.plain_heads, least=0)
        super().__post_init__()
        self._check_windows()

    def _check_windows(self) -> None:
        windows, dilations = numbers_by_layer(self.window), numbers_by_layer(self.dilation)
        if any(window % 2 for window in windows):
            raise ValueError(f"Longformer window must be even, got {self.window}")
        if len({len(windows), len(dilations)} - {1}) > 1:
            raise ValueError(
                f"Longformer window={self.window} and dilation={self.dilation} must have the same "
                "number of values, or one for all layers"
            )

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if an option has more numbers than layers, or `plain_heads` does not fit."""
        check_has_layers(self, "window", self.window, choices)
        check_has_layers(self, "dilation", self.dilation, choices)
        check_plain_heads(self, self.plain_heads, self.dilation, choices)

    def for_layer(self, layer: int) -> Pattern:
        window, dilation = number_in_layer(self.window, layer), number_in_layer(self.dilation, layer)
        return replace(self, window=window, dilation=dilation)

    @property
    def local(self) -> Pattern:
        """Window of the tokens that are not global; the union of the layers' windows if they differ."""
        number = max(len(numbers_by_layer(self.window)), len(numbers_by_layer(self.dilation)))
        windows = (
            Dilated(
                number_in_layer(self.window, layer) // 2 + 1,
                number_in_layer(self.dilation, layer),
                self.plain_heads,
            )
            for layer in range(number)
        )
        union: Pattern = reduce(or_, windows)
        return limit_distance(union, self.farthest)
