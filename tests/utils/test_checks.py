"""Tests of the checks of arguments."""

import math
from fractions import Fraction
from numbers import Integral

import numpy as np
import pytest

from rlxf.utils.checks import as_whole_number, check_between, check_finite_number, is_number


@pytest.mark.parametrize(
    ("inclusive", "low", "high"),
    [("both", True, True), ("left", True, False), ("right", False, True), ("neither", False, False)],
)
def test_ends_belong_to_a_range_as_stated(inclusive, low, high):
    check_between("x", 0.5, 0, 1, inclusive)
    for value, belongs in ((0, low), (1, high), (-0.1, False), (1.1, False)):
        if belongs:
            check_between("x", value, 0, 1, inclusive)
        else:
            with pytest.raises(ValueError, match=f"^x must be (from|above) 0 .* 1, got {value}$"):
                check_between("x", value, 0, 1, inclusive)


@pytest.mark.parametrize(
    ("value", "error"), [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_other_values_are_in_no_range(value, error):
    with pytest.raises(error, match=r"^x must be"):
        check_between("x", value, -1, 1)


def test_integers_that_torch_does_not_accept_are_refused():
    check_finite_number("x", 2**63 - 1)
    check_finite_number("x", 2.0**63)
    with pytest.raises(
        ValueError, match=r"^x must be at most 2\*\*63 - 1 as an integer, got -1000.*: write -1e"
    ):
        check_finite_number("x", -(10**20))


def test_bools_are_no_numbers():
    assert all(map(is_number, (1, 0.5, np.int8(1), np.float32(0.5), Fraction(1, 2))))
    assert not any(map(is_number, (True, np.True_, "1", None, 1j)))
    assert is_number(np.int64(1), Integral)
    assert not is_number(1.0, Integral)


@pytest.mark.parametrize("number", [1e2, np.int64(100), np.float32(100)], ids=repr)
def test_whole_numbers_of_other_types_are_ints(number):
    assert type(as_whole_number("steps", number, least=1)) is int
    assert as_whole_number("steps", number, least=1) == 100


@pytest.mark.parametrize("number", [0, -1, 1.5, np.float64(2.5), math.nan, math.inf, -1e5, 1e300], ids=repr)
def test_other_numbers_are_not_whole_numbers(number):
    with pytest.raises(ValueError, match=r"^steps must be .*, got "):
        as_whole_number("steps", number, least=1)


@pytest.mark.parametrize("value", [True, np.bool_(1), "5", None, [5]], ids=repr)
def test_other_types_are_not_whole_numbers(value):
    with pytest.raises(TypeError, match=r"^steps must be a whole number, got "):
        as_whole_number("steps", value, least=1)
