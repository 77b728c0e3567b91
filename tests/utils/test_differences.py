"""Tests of the first difference of two JSON values and of two cores."""

from dataclasses import replace

import pytest

from rlxf.agents.common.weight_transfer import check_same_core, core_difference
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import XL, Add, GRUGate
from rlxf.utils.differences import first_difference

CORE = gtrxl(16, width=16, layers=2, heads=2)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (1, 1, None),
        (1, 2, ("core", 1, 2)),
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ("core.b.c", 2, 3)),
        ({"a": 1}, {"a": 1, "b": 2}, ("core.b", None, 2)),
        ({"name": "Add"}, {"name": "GRUGate", "bias": 2}, ("core", "Add", "GRUGate")),
        ({"name": "GRUGate", "bias": 1}, {"name": "GRUGate", "bias": 2}, ("core.bias", 1, 2)),
        (None, {"name": "RoPE", "base": 3}, ("core", None, "RoPE")),
        ([{"name": "RoPE"}], [{"name": "Add"}], ("core", [{"name": "RoPE"}], [{"name": "Add"}])),
    ],
)
def test_first_difference(theirs, ours, expected):
    assert first_difference("core", theirs, ours) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"memory": XL(9)}, None),
        ({"width": 32}, ("width", 16, 32)),
        ({"feed_forward": 65}, ("feed_forward", 64, 65)),
        ({"residual": GRUGate(bias=3.0)}, ("residual.bias", 2.0, 3.0)),
        ({"residual": Add()}, ("residual", "GRUGate", "Add")),
    ],
)
def test_difference_of_two_cores_names_one_option(changes, expected):
    other = replace(CORE, **changes)
    assert core_difference(CORE, other) == expected
    if expected is None:
        check_same_core(CORE, other)
        return
    name, theirs, ours = expected
    message = f"their core has {name}={theirs}, the agent's has {name}={ours}; build both with the same core"
    with pytest.raises(ValueError, match=message):
        check_same_core(CORE, other)
