"""Sparse Transformer's strided and fixed attention: a local rule, and one for tokens farther back."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from torch import Tensor

from rlxf.attention.patterns.base import Either, Pattern, check_fits_heads, group_in_blocks
from rlxf.attention.patterns.local import Local1D
from rlxf.attention.patterns.window import SameColumn, Window
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_choice, check_int

Combination = Literal["by-layer", "by-head", "merged"]
"""Combination of two rules: alternating by layer, alternating by head, or both in every head."""
WindowForm = Literal["code", "text"]


class TwoRules(Pattern):
    """Pattern of two rules, A1 and A2: layers or heads alternate between them, or every head uses both."""

    combination: Combination

    @property
    @abstractmethod
    def rules(self) -> tuple[Pattern, Pattern]:
        """Rules A1 and A2."""

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether A1 or A2 allows the pair."""
        return Either(*self.rules).mask_mod(i, j)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if the heads, or the layers with attention, use one of the rules only."""
        if self.combination == "by-head" and choices.heads == 1:
            raise ValueError(
                f"{self} alternates between two rules by head, and the transformer has heads=1; set "
                f"combination='merged' or more heads"
            )
        used = {number % 2 for number in choices.attention_passes}
        if self.combination == "by-layer" and len(used) == 1:
            raise ValueError(
                f"{self} alternates between two rules by layer, and with layers={choices.layers} the layers "
                f"with attention use only one of them; set combination='merged' or more layers"
            )

    def for_layer(self, layer: int) -> Pattern:
        return self.rules[layer % 2] if self.combination == "by-layer" else self

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        if self.combination != "by-head":
            return Either(*self.rules).for_heads(heads)
        by_rule = [rule.for_heads(heads) for rule in self.rules]
        return tuple(by_rule[head % 2][head // 2 % len(by_rule[head % 2])] for head in range(heads))


@dataclass(frozen=True)
class Strided(TwoRules):
    """Two rules: A1, ``|i - j| < stride``, and A2, ``stride`` divides ``i - j``.

    Together they connect any two tokens in two steps. With ``by-layer`` layers alternate between A1 and A2,
    with ``by-head`` heads alternate, and with ``merged`` a query attends to the keys of both.

    In the authors' code a query attends to ``stride`` keys by A1, including itself; in the text of the paper
    it attends to one more (``t = max(0, i - l)``). The published results were computed with the code. The
    bidirectional form, the same rules on both sides, is rlxf's variant.

    Source: Child et al. 2019, arXiv:1904.10509, sections 4.2 and 4.3.

    Args:
        stride: l, in tokens; with a value near the square root of the length L, the cost grows with L^1.5.
        combination: how the rules are combined.
        form: extent of A1, as in the "code" or in the "text".

    Raises:
        TypeError: if stride is not an integer.
        ValueError: if stride is less than 1, or combination or form is unknown; in a spec, if heads or layers
            use one of the rules only.
    """

    paper: ClassVar[str] = "Child et al. 2019, arXiv:1904.10509"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (stride + L / stride) pairs"
    stride: int = 32
    combination: Combination = "by-layer"
    form: WindowForm = "code"

    def __post_init__(self) -> None:
        check_int("Strided stride", self.stride)
        check_choice("Strided combination", self.combination, get_args(Combination))
        check_choice("Strided form", self.form, get_args(WindowForm))

    @property
    def rules(self) -> tuple[Pattern, Pattern]:
        return Window(self.stride if self.form == "code" else self.stride + 1), SameColumn(self.stride)

    shift_period = 1  # only distances count


@dataclass(frozen=True)
class FixedColumns(TwoRules):
    """Two rules: A1, i and j are in one block of l, and A2, ``j mod l >= l - c``: j is among its last c.

    The last c tokens of each block summarize it for all later tokens. With ``by-layer`` layers alternate
    between A1 and A2, with ``by-head`` heads alternate, and with ``merged`` a query attends to the keys of
    both. With n ``summaries``, head h reads one of n groups of c columns: the (h mod n)-th from the end of
    the block, counted from 0, as in the authors' code. With ``by-head`` only the heads of A2 are counted:
    head h reads the ((h // 2) mod n)-th.

    In layers or heads with only A2, the first tokens of an episode attend to no keys, and their output is 0.
    The bidirectional form is rlxf's variant: it includes summaries of later blocks. The paper calls this
    pattern "fixed"; in this package, `Fixed` is a depth technique.

    Source: Child et al. 2019, arXiv:1904.10509, sections 4.2 and 4.3.

    Args:
        stride: l, in tokens; with a value near the square root of the length L, the cost grows with L^1.5.
        columns: c, in tokens.
        combination: how the rules are combined.
        summaries: n; ``n columns`` must not exceed ``stride``.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is less than 1, the columns do not fit in a block, or combination is unknown; in
            a spec, if heads or layers use one of the rules only, or there are more summaries than heads.
    """

    paper: ClassVar[str] = "Child et al. 2019, arXiv:1904.10509"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (stride + L columns / stride) pairs"
    stride: int = 32
    columns: int = 4
    combination: Combination = "merged"
    summaries: int = 1

    def __post_init__(self) -> None:
        for name in ("stride", "columns", "summaries"):
            check_int(f"FixedColumns {name}", getattr(self, name))
        check_choice("FixedColumns combination", self.combination, get_args(Combination))
        if self.summaries * self.columns > self.stride:
            raise ValueError(
                f"FixedColumns requires summaries * columns <= stride, "
                f"got {self.summaries} * {self.columns} > {self.stride}"
            )

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless both rules and all summaries are used."""
        super().check(choices)
        heads = choices.heads // 2 if self.combination == "by-head" else choices.heads
        check_fits_heads(self, "summaries", self.summaries, heads)

    @property
    def rules(self) -> tuple[Pattern, Pattern]:
        first = self.stride - self.summaries * self.columns
        return Local1D(self.stride, 0), SummaryColumns(self.stride, first, self.stride, self.summaries)

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.stride


@dataclass(frozen=True)
class SummaryColumns(Pattern):
    """Pattern ``first <= j mod stride < last``.

    The columns are divided into ``parts``, among which heads alternate, from the last part to the first.
    """

    stride: int
    first: int
    last: int
    parts: int = 1

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.stride

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        everywhere = i == i  # True for all queries; gives the result its shape
        return everywhere & (j % self.stride >= self.first) & (j % self.stride < self.last)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        if self.parts == 1:
            return (self,)
        size = (self.last - self.first) // self.parts
        ends = (self.last - head % self.parts * size for head in range(heads))
        return tuple(replace(self, first=end - size, last=end, parts=1) for end in ends)

    def group(self, i: Tensor) -> Tensor:
        """Return the block of each position, with large blocks divided into groups."""
        return group_in_blocks(i, self.stride)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions[self.mask_mod(positions, positions)]
