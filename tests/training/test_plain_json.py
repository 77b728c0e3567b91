"""JSON that comes back equal or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlxf.training.plain_json import MAX_JSON_BYTES, dump_json, load_json

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(VALUES)
def test_every_value_comes_back_equal(value):
    assert load_json(dump_json(value)) == value
    assert load_json(dump_json(value, indent=2)) == value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({1: 2}, TypeError),
        ({"a": [{None: 2}]}, TypeError),
        (object(), TypeError),
        (float("nan"), ValueError),
        ([float("inf")], ValueError),
        ("x" * MAX_JSON_BYTES, ValueError),
    ],
)
def test_what_would_not_come_back_is_refused(value, error):
    with pytest.raises(error):
        dump_json(value)


def test_a_value_inside_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="deeper than 64"):
        dump_json(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b'{"a": 1, "a": 2}',
        b"[" * 65 + b"]" * 65,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff\xfe1\x00",
        b" " * (MAX_JSON_BYTES + 1),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - any sentence will do
        load_json(text)


def test_the_deepest_value_allowed_comes_back():
    value: list = []
    for _ in range(63):
        value = [value]
    assert load_json(dump_json(value)) == value
