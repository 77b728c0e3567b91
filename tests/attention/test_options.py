"""Every option of every technique rejects invalid values with an error that names the value."""

import math
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from rlxf.attention import (
    LSH,
    RFA,
    BigBird,
    BigBirdETC,
    Blockwise,
    Dilated,
    FixedColumns,
    Floater,
    GRUGate,
    Linformer,
    Local1D,
    Local2D,
    Longformer,
    Performer,
    Routing,
    Softmax,
    Strided,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.registry import HEADS, TECHNIQUES, technique_from_json
from rlxf.utils.checks import MAX_INT, MAX_SEED

OPTIONS = [
    (axis, technique, option.name)
    for axis, techniques in (TECHNIQUES | {"head": HEADS}).items()
    for technique in techniques.values()
    for option in fields(technique)
]
STRANGE = ["3", "false", None, True, 2.5, math.nan, math.inf, [1], (1,), [[1]], {"a": 1}, 1j, b"1", object]


def allowed(kind: Any) -> set[type]:
    """Return the accepted types of an option: an int is accepted as a float, a list as a tuple."""
    if get_origin(kind) is Literal:
        return {str}
    if parts := get_args(kind):
        own = [tuple] if get_origin(kind) is tuple else []
        return {one for part in own or parts for one in allowed(part)}
    return {kind} | ({int} if kind is float else {list} if kind is tuple else set())


def test_allowed_types_come_from_annotations():
    kinds = {kind for _, technique, name in OPTIONS for kind in allowed(hint(technique, name))}
    assert kinds == {bool, int, float, str, tuple, list, NoneType}


def hint(technique: type, name: str) -> Any:
    return get_type_hints(technique)[name]


def refusal(axis: str, technique: type, name: str, value: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        technique(**{name: value})
    with pytest.raises(ValueError) as read:  # noqa: PT011, the caller checks the message
        technique_from_json(axis, {"name": technique.__name__, name: value})
    assert str(error.value) in str(read.value)
    return str(error.value)


@pytest.mark.parametrize(("axis", "technique", "name"), OPTIONS)
def test_values_of_wrong_type_raise(axis, technique, name):
    for value in STRANGE:
        if type(value) not in allowed(hint(technique, name)):
            message = refusal(axis, technique, name, value)
            assert name in message
            assert repr(value) in message


@pytest.mark.parametrize(("axis", "technique", "name"), OPTIONS)
def test_too_large_numbers_raise(axis, technique, name):
    kinds = allowed(hint(technique, name))
    if {int, float} & kinds:
        for value in [10**400, -(10**400), *([] if float in kinds else [10**30])]:
            message = refusal(axis, technique, name, value)
            assert name in message
            assert str(value) in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(MAX_INT + 2), f"Window size must be at most {MAX_INT + 1}, got {MAX_INT + 2}"),
        (lambda: BigBird(seed=2**63), f"BigBird seed must be at most {MAX_SEED}, got {2**63}"),
        (lambda: BigBird(random=2**16 + 1), "BigBird random must be at most 65536, got 65537"),
        (lambda: BigBirdETC(block=0), "BigBirdETC block must be at least 1, got 0"),
        (lambda: BigBirdETC(farthest=2.5), "BigBirdETC farthest must be a whole number, got 2.5"),
        (lambda: Blockwise(permutations=(3,)), "permutations must be a tuple of tuples, got \\(3,\\)"),
        (lambda: Blockwise(2, 2, ((0.0, 1.0),)), "permutations must be a whole number, got 0.0"),
        (lambda: Blockwise(2, 2, ((False, True),)), "permutations must be a whole number, got False"),
        (lambda: RFA(sigma=1e-300), "RFA sigma must be 0 or from 1.2e-38 to 3.4e\\+38 in size, got 1e-300"),
        (lambda: GRUGate(1e300), "bias must be 0 or from 1.2e-38 to 3.4e\\+38 in size, got 1e\\+300"),
        (lambda: Floater(step=101.0), "Floater step must be above 0 and at most 100.0, got 101.0"),
        (lambda: Softmax("yes"), "Softmax softmax1 must be True or False, got 'yes'"),
        (lambda: Linformer(bias=1), "Linformer bias must be True or False, got 1"),
        (lambda: TransformerSpec(dropout="0.1"), "dropout must be a number, got '0.1'"),
    ],
)
def test_values_out_of_range_raise(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


LARGE = [
    Window(MAX_INT + 1),
    Dilated(MAX_INT, MAX_INT, plain_heads=1),
    Local1D(MAX_INT, MAX_INT),
    Local2D(MAX_INT, MAX_INT, 1, MAX_INT, MAX_INT),
    Local2D(MAX_INT, MAX_INT, MAX_INT, MAX_INT, MAX_INT),
    Strided(MAX_INT, form="text"),
    Strided(MAX_INT, combination="merged"),
    FixedColumns(MAX_INT, MAX_INT),
    Blockwise(MAX_INT, 8),
    Longformer(MAX_INT - 1, MAX_INT, farthest=MAX_INT),
    BigBird(MAX_INT, seed=MAX_SEED),
    BigBird(8, random=2**16),
    BigBirdETC(MAX_INT, farthest=MAX_INT),
]


@pytest.mark.parametrize("pattern", LARGE, ids=repr)
def test_largest_sizes_do_not_overflow(pattern):
    i = torch.arange(100)
    for layer in range(2):
        for rule in pattern.for_layer(layer).for_heads(2):
            visible = i[rule.mask_mod(i[:, None], i).expand(100, 100).any(0)]
            candidates = rule.candidate_keys(i, i)
            assert torch.isin(visible, candidates).all()
            assert rule.group(i).shape == i.shape


@pytest.mark.parametrize("kernel", [LSH, Routing, RFA, Performer])
def test_largest_seed_is_accepted(kernel):
    spec = TransformerSpec(width=8, heads=2, kernel=kernel(seed=MAX_SEED))
    y, _ = spec.build()(torch.ones(1, 3, 8), TokenIndex.range(1, 3))
    assert y.isfinite().all()
