"""Parametrization with products of parameters, of which the default selection runs a covering part."""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest


def covering(strength: int, **parameters: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test with the product of parameters.

    The default selection contains each combination of the values of ``strength`` parameters: 1 for each
    value, 2 for each pair of values. The other cases are marked ``thorough``.

    Args:
        strength: number of parameters whose values are combined completely; less than that of all parameters.
        parameters: id -> value of each parameter, by its name.
    """
    assert 0 < strength < len(parameters)
    names = list(product(*parameters.values()))
    always = covering_cases(names, strength)
    return pytest.mark.parametrize(
        list(parameters),
        [
            pytest.param(
                *(values[name] for values, name in zip(parameters.values(), case, strict=True)),
                id=", ".join(case),
                marks=[pytest.mark.thorough] * (case not in always),
            )
            for case in names
        ],
    )


def covering_cases(cases: list[tuple[str, ...]], strength: int) -> set[tuple[str, ...]]:
    """Return cases that contain all combinations.

    The next case is the one that adds the most combinations, of these the one with the least used values, and
    of these the first one.
    """
    missing = {part for case in cases for part in combined(case, strength)}
    chosen: set[tuple[str, ...]] = set()
    uses: Counter[tuple[int, str]] = Counter()

    def gain(case: tuple[str, ...]) -> tuple[int, int]:
        return len(combined(case, strength) & missing), -sum(uses[value] for value in enumerate(case))

    while missing:
        best = max(cases, key=gain)
        chosen.add(best)
        uses.update(enumerate(best))
        missing -= combined(best, strength)
    return chosen


def combined(case: tuple[str, ...], strength: int) -> set[tuple[tuple[int, str], ...]]:
    """Return the combinations of ``strength`` values of a case, with their places."""
    return set(combinations(enumerate(case), strength))
