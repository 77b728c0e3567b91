"""Which techniques go together: what ``rlxf techniques --pairs`` tells."""

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
    """Two techniques of different axes, with their defaults.

    Args:
        names: of the two, with their axes.
        refusal: the sentence with which a transformer of both is refused; None if it can be built.
    """

    names: tuple[str, str]
    refusal: str | None


def pairs(causal: bool) -> Iterator[Pair]:
    """All that there are; None counts where it is a choice."""
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(_choices(axis) for axis in axes)):
            choices = dict(zip(axes, two, strict=True))
            first, second = (f"{axis} {_name(technique)}" for axis, technique in choices.items())
            yield Pair((first, second), _refusal(causal, choices))


def show_pairs() -> None:
    """Print how many pairs can be built, and a table of those that agents, which are causal, cannot have."""
    refused = [pair for pair in pairs(causal=True) if pair.refusal]
    table = Table("technique", "does not go with", "because", expand=True)
    for pair in refused:
        table.add_row(*pair.names, pair.refusal)
    show(table)
    for causal in (True, False):
        found = [pair.refusal is None for pair in pairs(causal)]
        show(f"{causal=}: {sum(found)} pairs of techniques go together, {len(found) - sum(found)} do not")


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
