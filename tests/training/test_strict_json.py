"""Tests of strict JSON serialization."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlxf.training.strict_json import MAX_JSON_BYTES, dump_json, load_json, load_json_file

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(VALUES)
def test_round_trip_of_any_value(value):
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
        ([-(10**309)], ValueError),
        ("x" * MAX_JSON_BYTES, ValueError),
    ],
)
def test_values_that_json_cannot_represent_are_rejected(value, error):
    with pytest.raises(error):
        dump_json(value)


def test_circular_value_is_rejected():
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
        b"9" * 310,
        b"9" * 5000,
        b"\xff\xfe1\x00",
        b" " * (MAX_JSON_BYTES + 1),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_invalid_text_is_rejected(text):
    with pytest.raises(ValueError):  # noqa: PT011 - any message is accepted
        load_json(text)


def test_round_trip_of_the_maximum_depth():
    value: list = []
    for _ in range(63):
        value = [value]
    assert load_json(dump_json(value)) == value


def test_a_large_file_is_not_read(tmp_path):
    """The file has a terabyte without blocks on the disk."""
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="bytes of JSON exceed"):
        load_json_file(path)


def test_a_json_file_is_read(tmp_path):
    (tmp_path / "small.json").write_bytes(dump_json({"a": [1, None]}))
    assert load_json_file(tmp_path / "small.json") == {"a": [1, None]}
