"""Any two techniques of different axes make a working transformer, or are refused in one sentence."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from rlxf.attention import TransformerSpec
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES
from tests.attention.passes import act, agree
from tests.attention.specs import DEFAULT, LINFORMER, SHORT, fresh
from tests.attention.worlds import END, GAP, ON, RESET, index_of, numbers, world

Choice = dict[str, Any]
"""Axis -> technique."""

SMALL = replace(DEFAULT, layers=1)
RUN = index_of([[ON, ON, END, ON, GAP, ON, ON, ON, ON, ON], [RESET, ON, ON, ON, ON, END, ON, ON, ON, RESET]])
"""Rows of two episodes, with empty slots inside and around them."""
HALF = 5


def choices(axis: str, causal: bool) -> dict[str, Any]:
    """Name -> technique with short settings, None where that is a choice."""
    short = SHORT if causal else SHORT | {"Linformer": LINFORMER}
    named = {name: short.get(name) or technique() for name, technique in TECHNIQUES[axis].items()}
    return ({"None": None} if axis in OPTIONAL else {}) | named


def pairs(causal: bool) -> dict[str, Choice]:
    """All pairs, by name."""
    found = {}
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(choices(axis, causal).items() for axis in axes)):
            name = ", ".join(f"{axis} {name}" for axis, (name, _) in zip(axes, two, strict=True))
            found[name] = {axis: technique for axis, (_, technique) in zip(axes, two, strict=True)}
    return found


def refusal(choice: Choice, causal: bool) -> str | None:
    """The sentence with which a choice is refused; None if it is not."""
    try:
        replace(SMALL, causal=causal, **choice)
    except ValueError as error:
        return str(error)
    return None


def each(causal: bool) -> pytest.MarkDecorator:
    given = pairs(causal)
    return pytest.mark.parametrize("choice", given.values(), ids=given)


@each(causal=True)
def test_causal(choice):
    works_or_is_refused(choice, True)


@each(causal=False)
def test_bidirectional(choice):
    works_or_is_refused(choice, False)


def works_or_is_refused(choice: Choice, causal: bool) -> None:
    sentence = refusal(choice, causal)
    if sentence is None:
        works(replace(SMALL, causal=causal, **choice))
        return
    assert "\n" not in sentence
    alone = [part for part in choice.items() if refusal(dict([part]), causal) == sentence]
    named = [part for part in choice.values() if part is not None and repr(part) in sentence]
    assert len(named) == 2 or [technique for _, technique in alone] == named


@cache
def works(spec: TransformerSpec) -> None:
    """It reads, learns and, if causal, acts as it learns."""
    model = fresh(spec).double()
    run = world(spec, RUN)
    first, second = run.cut([HALF, run.length - HALF])
    _, state = model(first.x, first.index)
    y, _ = model(second.x, second.index, state)
    seen = y[second.filled]
    assert seen.isfinite().all()
    (seen * numbers(*seen.shape, seed=1)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    if spec.causal:
        start = model.initial_state(len(run.x)) if state is None else state
        cache = model.cache(start, start.index.shape[1] + second.length)
        agree(act(model, second, cache)[0][second.filled], seen.detach())
