"""Any two techniques of different axes give a working transformer or a one-line error."""

import re
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    DynamicSpan,
    ExitTargets,
    Fixed,
    KVCache,
    RoPE,
    Routing,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Universal,
)
from rlxf.attention.registry import OPTIONAL, TECHNIQUES
from tests.attention.passes import act, assert_close_for_dtype
from tests.attention.specs import DEFAULT, LINFORMER, SHORT, new_model
from tests.attention.worlds import END, GAP, ON, RESET, Segment, index_of, numbers, random_segment

Choice = dict[str, Any]
"""Axis -> technique."""

SMALL = replace(DEFAULT, layers=3)
"""Spec with several layers, because layers may be shared, inverted or have different patterns."""
RUN = index_of([[ON, ON, END, ON, GAP, ON, ON, ON, ON, ON], [RESET, ON, ON, ON, ON, END, ON, ON, ON, RESET]])
"""Rows of two episodes, with empty slots inside and around them."""
REMEDY = re.compile(r"\b(use|set|choose|leave|list|give)\b")
"""Words with which a message names a choice that works."""
HALF = 5
UPDATES = 2


def choices(axis: str, causal: bool) -> dict[str, Any]:
    """Return name -> technique with short settings; includes None if the axis accepts it."""
    short = SHORT if causal else SHORT | {"Linformer": LINFORMER}
    named = {name: short.get(name) or technique() for name, technique in TECHNIQUES[axis].items()}
    return ({"None": None} if axis in OPTIONAL else {}) | named


def pairs(causal: bool) -> dict[str, Choice]:
    """Return all pairs of techniques by name."""
    results = {}
    for axes in combinations(TECHNIQUES, 2):
        for two in product(*(choices(axis, causal).items() for axis in axes)):
            name = ", ".join(f"{axis} {name}" for axis, (name, _) in zip(axes, two, strict=True))
            results[name] = {axis: technique for axis, (_, technique) in zip(axes, two, strict=True)}
    return results


def refusal(choice: Choice, causal: bool) -> str | None:
    """Return the error message for a pair; None if it is compatible."""
    try:
        replace(SMALL, causal=causal, **choice)
    except ValueError as error:
        return str(error)
    return None


def accepted(causal: bool) -> dict[str, Choice]:
    """Return the compatible pairs by name."""
    return {name: choice for name, choice in pairs(causal).items() if refusal(choice, causal) is None}


def meetings(choice: Choice) -> set[tuple[str, str, str]]:
    """Return (axis, technique, other axis) for both techniques of a pair."""
    axes = list(choice)
    return {(axis, repr(choice[axis]), other) for axis, other in zip(axes, reversed(axes), strict=True)}


def sufficient(choices_by_name: dict[str, Choice]) -> set[str]:
    """Return names of pairs in which each technique meets each axis that it meets in any of the pairs.

    Pairs that add the meetings of both of their techniques come first, so that fewer suffice.
    """
    met, names = set(), set()
    for least in (2, 1):
        for name, choice in choices_by_name.items():
            if len(meetings(choice) - met) >= least:
                names.add(name)
                met |= meetings(choice)
    return names


def each(causal: bool) -> pytest.MarkDecorator:
    """Parametrize a test with each compatible pair; those that are not `sufficient` need ``--thorough``."""
    compatible = accepted(causal)
    always = sufficient(compatible)
    return pytest.mark.parametrize(
        "choice",
        [
            pytest.param(choice, id=name, marks=[pytest.mark.thorough] * (name not in always))
            for name, choice in compatible.items()
        ],
    )


@each(causal=True)
def test_causal_pairs(choice):
    check_spec(replace(SMALL, causal=True, **choice))


@each(causal=False)
def test_bidirectional_pairs(choice):
    check_spec(replace(SMALL, causal=False, **choice))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_incompatible_pairs_are_refused_in_one_line_that_names_both(causal):
    for name, choice in pairs(causal).items():
        message = refusal(choice, causal)
        if message is not None:
            check_message(name, choice, message, causal)


def check_message(name: str, choice: Choice, message: str, causal: bool) -> None:
    """Check that a message names both techniques, or the one that is refused without the other."""
    assert "\n" not in message, name
    assert REMEDY.search(message), name
    alone = [part for part in choice.items() if refusal(dict([part]), causal) == message]
    named = [part for part in choice.values() if part is not None and repr(part) in message]
    assert len(named) == 2 or [technique for _, technique in alone] == named, name


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_each_technique_meets_each_axis_without_the_thorough_tests(causal):
    compatible = accepted(causal)
    chosen = sufficient(compatible)
    assert set.union(*(meetings(compatible[name]) for name in chosen)) == set.union(
        *map(meetings, compatible.values())
    )
    assert len(chosen) < len(compatible) / 4


@cache
def check_spec(spec: TransformerSpec) -> None:
    """Train for some updates; for causal specs check that acting equals learning and exits agree."""
    model = new_model(spec).double()
    first, second = random_segment(spec, RUN).cut([HALF, RUN.shape[1] - HALF])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(UPDATES):
        train_step(model, first, second)
        optimizer.step()
        optimizer.zero_grad()
        model.after_update()
    _, state = model(first.x, first.index)
    y, _ = model(second.x, second.index, state)
    if spec.causal:
        start = model.initial_state(len(first.x)) if state is None else state
        cache = model.cache(start, start.index.shape[1] + second.length)
        if spec.depth != Fixed():
            check_independent_exits(model, second, cache.copy())
        assert_close_for_dtype(act(model, second, cache)[0][second.filled], y[second.filled].detach())


def train_step(model: Transformer, first: Segment, second: Segment) -> None:
    """Backpropagate the loss with penalty and exit loss, and check that all numbers are finite."""
    _, state = model(first.x, first.index)
    exits = model.exits(second.x, second.index, state)
    seen, penalty = exits.outputs[:, second.filled], model.penalty()
    loss = (exits.loss_weights[:, None, None] * seen * numbers(*seen.shape, seed=1)).sum()
    lesson = (
        None
        if exits.auxiliary_loss is None
        else exits.auxiliary_loss(verdict(exits.outputs.detach(), second.index))
    )
    sum(part for part in (loss, penalty, lesson) if part is not None).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(number.isfinite().all() for number in (seen, loss, *gradients))


def verdict(outputs: Tensor, index: TokenIndex) -> ExitTargets:
    """Return exit targets for outputs (N, B, T, C)."""
    right = outputs[..., 0] > 0
    return ExitTargets(-outputs.square().mean(dim=-1), right, right == right[-1], index)


def check_independent_exits(model: Transformer, run: Segment, cache: KVCache) -> None:
    """Rows may exit after different passes; their outputs are independent of each other."""
    rows = range(len(run.x))
    together = early(model, run, cache.copy(), slice(None))
    alone = [early(model, run, cache.rows(torch.tensor([row])), slice(row, row + 1)) for row in rows]
    assert_close_for_dtype(together[run.filled], torch.cat(alone)[run.filled])


def early(model: Transformer, run: Segment, cache: KVCache, rows: slice) -> Tensor:
    """Return the outputs (B, T, C) of steps with early exits."""
    steps = []
    for t in range(run.length):
        here = TokenIndex(run.index.position[rows, t : t + 1], run.index.episode[rows, t : t + 1])
        steps.append(model.early_step(run.x[rows, t], here, cache, lambda y: y[..., 0].sigmoid()))
    return torch.stack(steps, dim=1)


@pytest.mark.parametrize("kernel", [DynamicSpan(6, 3, penalty=0.5), Routing(3, commitment=0.5)], ids=repr)
def test_penalty_counts_each_pass_of_a_shared_layer(kernel):
    """The penalty equals that of a stack of layers with the same weights."""
    shared = new_model(replace(SMALL, kernel=kernel, position=RoPE(), depth=Universal(), final_norm=False))
    apart = new_model(replace(shared.spec, depth=Fixed()))
    for block in apart.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    run, penalties = random_segment(SMALL, RUN, torch.float32), []
    for model in (shared, apart):
        for _ in range(2):
            model(run.x, run.index)  # the penalty of this pass is not queried
        model(run.x, run.index)
        penalties.append(model.penalty())
        assert model.penalty() is None
    assert_close_for_dtype(penalties[0], penalties[1])
