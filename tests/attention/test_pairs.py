"""Any two techniques of different axes make a working transformer, or are refused in one sentence."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    Cache,
    DynamicSpan,
    Fixed,
    Index,
    RoPE,
    Routing,
    Transformer,
    TransformerSpec,
    Universal,
    Verdict,
)
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES
from tests.attention.passes import act, agree
from tests.attention.specs import DEFAULT, LINFORMER, SHORT, fresh
from tests.attention.worlds import END, GAP, ON, RESET, World, index_of, numbers, world

Choice = dict[str, Any]
"""Axis -> technique."""

SMALL = replace(DEFAULT, layers=3)
"""More than one: layers may be shared, computed back, or look at other tokens."""
RUN = index_of([[ON, ON, END, ON, GAP, ON, ON, ON, ON, ON], [RESET, ON, ON, ON, ON, END, ON, ON, ON, RESET]])
"""Rows of two episodes, with empty slots inside and around them."""
HALF = 5
UPDATES = 2


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
    """It reads, learns, more than once, and, if causal, acts as it learns, or leaves as if it were alone."""
    model = fresh(spec).double()
    first, second = world(spec, RUN).cut([HALF, RUN.shape[1] - HALF])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(UPDATES):
        learns(model, first, second)
        optimizer.step()
        optimizer.zero_grad()
        model.after_update()
    _, state = model(first.x, first.index)
    y, _ = model(second.x, second.index, state)
    if spec.causal:
        start = model.initial_state(len(first.x)) if state is None else state
        cache = model.cache(start, start.index.shape[1] + second.length)
        if spec.depth != Fixed():
            leaves_as_if_alone(model, second, cache.copy())
        agree(act(model, second, cache)[0][second.filled], y[second.filled].detach())


def learns(model: Transformer, first: World, second: World) -> None:
    """All numbers are finite, of the loss with its penalty and what early outputs teach, too."""
    _, state = model(first.x, first.index)
    found = model.exits(second.x, second.index, state)
    seen, penalty = found.outputs[:, second.filled], model.penalty()
    loss = (found.shares[:, None, None] * seen * numbers(*seen.shape, seed=1)).sum()
    lesson = None if found.lesson is None else found.lesson(verdict(found.outputs.detach(), second.index))
    sum(part for part in (loss, penalty, lesson) if part is not None).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(number.isfinite().all() for number in (seen, loss, *gradients))


def verdict(outputs: Tensor, index: Index) -> Verdict:
    """What might be known of outputs (N, B, T, C)."""
    right = outputs[..., 0] > 0
    return Verdict(-outputs.square().mean(dim=-1), right, right == right[-1], index)


def leaves_as_if_alone(model: Transformer, run: World, cache: Cache) -> None:
    """Rows may leave behind different passes: what they say does not depend on one another."""
    rows = range(len(run.x))
    together = early(model, run, cache.copy(), slice(None))
    alone = [early(model, run, cache.rows(torch.tensor([row])), slice(row, row + 1)) for row in rows]
    agree(together[run.filled], torch.cat(alone)[run.filled])


def early(model: Transformer, run: World, cache: Cache, rows: slice) -> Tensor:
    """Outputs (B, T, C) of tokens that leave as early as they may."""
    steps = []
    for t in range(run.length):
        here = Index(run.index.position[rows, t : t + 1], run.index.episode[rows, t : t + 1])
        steps.append(model.early_step(run.x[rows, t], here, cache, lambda y: y[..., 0].sigmoid()))
    return torch.stack(steps, dim=1)


@pytest.mark.parametrize("kernel", [DynamicSpan(6, 3, penalty=0.5), Routing(3, commitment=0.5)], ids=repr)
def test_a_layer_that_is_passed_several_times_pays_each_time(kernel):
    """As many layers with the same weights pay as much."""
    shared = fresh(replace(SMALL, kernel=kernel, position=RoPE(), depth=Universal(), final_norm=False))
    apart = fresh(replace(shared.spec, depth=Fixed()))
    for block in apart.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    run, paid = world(SMALL, RUN, torch.float32), []
    for model in (shared, apart):
        for _ in range(2):
            model(run.x, run.index)  # nobody asks what that costs
        model(run.x, run.index)
        paid.append(model.penalty())
        assert model.penalty() is None
    agree(paid[0], paid[1])
