"""Read in groups with gathered keys, or all pairs at once: the same. And no tensor as large as all pairs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlxf.attention import (
    ETC,
    XL,
    ALiBi,
    BigBird,
    BigBirdETC,
    Blockwise,
    Deberta,
    Dilated,
    DistanceAware,
    ETCLabels,
    FixedColumns,
    Full,
    Index,
    Local1D,
    Local2D,
    Longformer,
    RoPE,
    ShawRelative,
    Softmax,
    State,
    Strided,
    T5Bias,
    Transformer,
    TransformerSpec,
    Tupe,
    Window,
    XLRelative,
    arrangement,
)
from rlxf.attention import relation as relations
from rlxf.attention.arrangement import arrange, arrange_run, find_runs, rounded
from rlxf.attention.index import EMPTY
from rlxf.attention.kept import Kept
from rlxf.attention.patterns.base import GlobalTokens
from rlxf.attention.positions.base import PairwisePosition
from rlxf.attention.techniques import TECHNIQUES
from tests.attention.specs import SHORT, each, fresh
from tests.attention.worlds import numbers

SMALL = TransformerSpec(width=8, heads=2, layers=2, feed_forward=12)
LENGTH, START = 24, 52
"""Positions 52 to 75: groups of 64 begin in between."""

PATTERNS = (
    Full(),
    Window(5),
    Dilated(3, 2),
    Dilated(3, 2, plain_heads=1),
    Local1D(4, 3),
    Local2D(12, 2, 3, 1, 2),
    Strided(4),
    Strided(4, way="merged"),
    Strided(4, way="heads"),
    FixedColumns(4, 1),
    FixedColumns(4, 1, summaries=2),
    FixedColumns(4, 1, way="heads"),
    Blockwise(4, 3),
    ETC(3, 55),
    Longformer(4, global_tokens=54),
    BigBird(4, 1, 2, 1),
    BigBirdETC(4, 1, 2, 55),
    Window(3) | Dilated(2, 5),
)
"""With positions near 52, so are the last of the global tokens."""

POSITIONS = (
    RoPE(),
    ALiBi(),
    XLRelative(),
    ShawRelative(3),
    T5Bias(4, max_distance=5),
    Tupe(128, buckets=4, max_distance=5),
    Deberta(3),
    DistanceAware(),
    ETCLabels(3, global_tokens=54),
)

SPECS = {
    repr(pattern): replace(
        SMALL, pattern=pattern, layers=2 if isinstance(pattern, Strided | GlobalTokens) else 1
    )
    for pattern in PATTERNS
}
"""Two layers where the second differs from the first."""
BOTH_WAYS = {f"encoder, {name}": replace(spec, causal=False) for name, spec in SPECS.items()}
WITH_POSITIONS = {
    f"{type(position).__name__}, {pattern}": replace(SMALL, layers=1, pattern=pattern, position=position)
    for position in POSITIONS
    for pattern in (Window(5), Dilated(3, 2, plain_heads=1), Longformer(4, global_tokens=54))
}
OTHERS = {
    "softmax1": replace(SMALL, pattern=Window(5), kernel=Softmax(softmax1=True)),
    "values by distance, bidirectional": replace(
        SMALL, pattern=Strided(4, way="heads"), position=ShawRelative(3), causal=False
    ),
}


def test_every_pattern_and_every_position_of_pairs_is_tested():
    assert set(TECHNIQUES["pattern"].values()) <= {type(pattern) for pattern in PATTERNS}
    pairs = {one for one in TECHNIQUES["position"].values() if issubclass(one, PairwisePosition)}
    assert pairs <= {type(position) for position in POSITIONS}


def episodes() -> Index:
    """A row of two episodes with empty slots around them, and a row of one."""
    ends = [EMPTY] * 2 + [0] * 9 + [1] * 12 + [EMPTY]
    position = [0, 0, *range(START, START + 9), *range(START + 4, START + 16), 0]
    whole = list(range(START, START + LENGTH))
    return Index(torch.tensor([position, whole]), torch.tensor([ends, [0] * LENGTH]))


def whole_pass(model: Transformer, state: State | None = None) -> list[Tensor]:
    """Outputs at tokens, and all gradients, of a pass over `episodes`."""
    index = episodes()
    x = numbers(*index.shape, model.spec.width).requires_grad_()
    y, _ = model(x, index, state)
    filled = y[index.episode != EMPTY]
    (filled * numbers(*filled.shape, seed=1)).sum().backward()
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [filled.detach(), x.grad, *gradients]


def gathered_or_not(monkeypatch: pytest.MonkeyPatch, model: Transformer, state: State | None = None) -> None:
    monkeypatch.setattr(relations, "SAVING", 0)
    found = []
    for small in (2**40, 0):
        monkeypatch.setattr(relations, "SMALL", small)
        among = model.relation(episodes(), episodes())
        assert (among.shares is None) == (small > 0)
        found.append(whole_pass(model, state))
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-9)


WITH_KERNELS = {
    f"{name}, {pattern}": replace(SMALL, layers=1, pattern=pattern, kernel=SHORT.get(name) or technique())
    for name, technique in TECHNIQUES["kernel"].items()
    for pattern in (Window(5), Dilated(5, 2, plain_heads=1))
}


@each(SPECS | BOTH_WAYS | WITH_POSITIONS | WITH_KERNELS | OTHERS)
def test_gathered_keys_give_what_all_pairs_give(spec, monkeypatch):
    gathered_or_not(monkeypatch, fresh(spec).double())


REMEMBERING = (Window(5), Dilated(3, 2, plain_heads=1), Blockwise(4, 3), Longformer(4, global_tokens=54))


@each({repr(pattern): replace(SMALL, pattern=pattern, memory=XL(5)) for pattern in REMEMBERING})
def test_memory(spec, monkeypatch):
    where = Index(
        torch.tensor([[0, 0, 0, 0, 0], range(START - 5, START)]), torch.tensor([[EMPTY] * 5, [0] * 5])
    )
    state = State(numbers(spec.layers, 2, 5, spec.width, seed=2), where)
    gathered_or_not(monkeypatch, fresh(spec).double(), state)


@each({"XLRelative": replace(SMALL, pattern=Window(5), position=XLRelative())})
def test_some_of_the_queries(spec, monkeypatch):
    """A Decision Transformer asks at every third token."""
    monkeypatch.setattr(relations, "SAVING", 0)
    model, index = fresh(spec).double(), Index.range(2, 30, start=50)
    x, found = numbers(2, 30, spec.width), []
    for small in (2**40, 0):
        monkeypatch.setattr(relations, "SMALL", small)
        found.append(model.encode(x, index, wanted=slice(1, None, 3))[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@each({repr(pattern): replace(SMALL, layers=1, pattern=pattern) for pattern in REMEMBERING[:2]})
def test_where_all_slots_are_empty_nothing_is_seen(spec, monkeypatch):
    """As what a Decision Transformer remembers of windows that all lie in short episodes."""
    monkeypatch.setattr(relations, "SMALL", 0)
    model, index = fresh(spec).double(), Index.empty(2, 30, torch.device("cpu"))
    assert model.relation(index, index).shares is not None
    y, _ = model(numbers(2, 30, spec.width), index)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    "index",
    [
        Index(torch.tensor([[0, 2, 3]]), torch.tensor([[0, 0, 0]])),
        Index(torch.tensor([[0, 1, 0, 2]]), torch.tensor([[0, 0, 1, 0]])),
    ],
    ids=["gap", "torn"],
)
def test_what_is_no_stretch_of_time_is_not_gathered(index, monkeypatch):
    monkeypatch.setattr(relations, "SMALL", 0)
    monkeypatch.setattr(relations, "SAVING", 0)
    assert fresh(SMALL).relation(index, index).shares is None


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_leaves(result)
            if isinstance(x, Tensor)
        ]
        self.size = max([self.size, *sizes])
        return result


LONG = 512
ONE = replace(SMALL, layers=1, heads=1)
SHORT_REACH = {
    repr(pattern): replace(ONE, pattern=pattern)
    for pattern in (
        Window(17),
        Dilated(9, 4),
        Local1D(16, 16),
        Local2D(32, 4, 4, 2, 2),
        Strided(32),
        FixedColumns(32, 1),
        Blockwise(16, 4),
        ETC(16, 2),
        Longformer(32),
        BigBird(16),
        BigBirdETC(16),
    )
} | {
    f"{type(position).__name__}, {pattern}": replace(ONE, pattern=pattern, position=position)
    for position in (
        ALiBi(),
        XLRelative(),
        ShawRelative(3),
        T5Bias(),
        Tupe(LONG),
        Deberta(3),
        DistanceAware(),
    )
    for pattern in (Window(17), Longformer(32))
}


@each(SHORT_REACH)
def test_no_tensor_is_as_large_as_all_pairs(spec):
    model, x = fresh(spec), numbers(1, LONG, spec.width, dtype=torch.float32)
    with Largest() as largest:
        y, _ = model(x, Index.range(1, LONG))
        y.sum().backward()
    assert LONG * spec.width <= largest.size < LONG**2 / 3


def test_what_hides_less_than_a_third_is_not_gathered():
    index, both_ways = Index.range(1, LONG), replace(SMALL, causal=False)
    assert fresh(SMALL).relation(index, index).shares is not None
    assert fresh(both_ways).relation(index, index).shares is None
    assert fresh(replace(both_ways, pattern=Window(LONG // 2))).relation(index, index).shares is None


def test_sizes_are_few_and_near():
    sizes = [rounded(size) for size in range(1, 5000)]
    assert all(size <= least < 1.25 * size for size, least in enumerate(sizes, start=1))
    assert len(set(sizes)) < 50


def test_stretches_of_equal_length_are_arranged_once(monkeypatch):
    """Where distances alone count, an episode's age does not matter."""
    made = []
    fresh_cache = Kept(lambda *given: made.append(given) or arrange_run.make(*given), 2**20, arrange_run.size)
    monkeypatch.setattr(arrangement, "arrange_run", fresh_cache)
    starts = torch.tensor([0, 7, 64, 1000])[:, None]
    index = Index(starts + torch.arange(LENGTH), torch.zeros(4, LENGTH, dtype=torch.long))
    for _ in range(2):
        arrange(Window(5), True, find_runs(index, index), torch.device("cpu"))
    assert len(made) == 1


@pytest.mark.parametrize("most", [0, 3, 8])
def test_what_was_used_last_is_kept_as_long_as_there_is_room(most):
    made = []
    double = Kept(lambda n: made.append(n) or 2 * n, most, size=lambda result: 1)
    numbers = [0, 1, 2, 0, 3, 1, 0]
    assert [double(n) for n in numbers] == [2 * n for n in numbers]
    assert made == {0: numbers, 3: [0, 1, 2, 3, 1], 8: [0, 1, 2, 3]}[most]
    assert double.held <= most
