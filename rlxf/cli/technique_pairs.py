"""Compatibility of techniques, printed by ``rlxf techniques --pairs``."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from rich.table import Table

from rlxf.attention import TransformerSpec
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES
from rlxf.cli.screen import show
from rlxf.cli.technique_names import NONE


@dataclass(frozen=True)
class Pair:
    """Two techniques of different axes, with their default options.

    Args:
        names: axis and name of both techniques.
        refusal: error message of a transformer with both techniques; None if it can be built.
    """

    names: tuple[str, str]
    refusal: str | None


def pairs(causal: bool) -> Iterator[Pair]:
    """Yield all pairs of techniques, including None for optional axes."""
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(_choices(axis) for axis in axes)):
            choices = dict(zip(axes, two, strict=True))
            first, second = (f"{axis} {_name(technique)}" for axis, technique in choices.items())
            yield Pair((first, second), _refusal(causal, choices))


def show_pairs() -> None:
    """Print the pairs that causal transformers do not support, and the numbers of supported pairs."""
    refused = [pair for pair in pairs(causal=True) if pair.refusal]
    table = Table("technique", "is incompatible with", "because", expand=True)
    for pair in refused:
        table.add_row(*pair.names, pair.refusal)
    show(table)
    for causal in (True, False):
        valid = [pair.refusal is None for pair in pairs(causal)]
        show(f"{causal=}: {sum(valid)} pairs of techniques are compatible, {len(valid) - sum(valid)} are not")


def _choices(axis: str) -> list[Any]:
    return [*([None] if axis in OPTIONAL else []), *(technique() for technique in TECHNIQUES[axis].values())]


def _name(technique: Any) -> str:
    return NONE if technique is None else type(technique).__name__


def _refusal(causal: bool, choices: dict[str, Any]) -> str | None:
    try:
        TransformerSpec(causal=causal, **choices)
    except ValueError as error:
        return str(error)
    return None
