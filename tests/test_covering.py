"""Tests of the selection of cases that run by default."""

from itertools import combinations, product

import pytest

from tests.conftest import is_default, is_fast
from tests.covering import combined, covering, covering_cases

AXES = [list("abcd"), list("xyz"), list("12")]
CASES = list(product(*AXES))


@pytest.mark.parametrize(("strength", "number"), [(1, 4), (2, 12)])
def test_the_cases_contain_all_combinations(strength, number):
    chosen = covering_cases(CASES, strength)
    assert len(chosen) == number
    assert chosen <= set(CASES)
    for places in combinations(range(len(AXES)), strength):
        for values in product(*(AXES[place] for place in places)):
            assert any(tuple(case[place] for place in places) == values for case in chosen)


def test_values_of_the_shorter_parameter_are_used_equally():
    chosen = covering_cases(list(product("abcdef", "xy")), 1)
    assert sorted(number for _, number in chosen) == list("xxxyyy")


def test_combinations_of_one_case():
    assert combined(("a", "x"), 1) == {((0, "a"),), ((1, "x"),)}
    assert combined(("a", "x", "1"), 2) == {((0, "a"), (1, "x")), ((0, "a"), (2, "1")), ((1, "x"), (2, "1"))}


def test_the_other_cases_are_thorough():
    mark = covering(1, letter={"a": 1, "b": 2}, number={"x": 3, "y": 4})
    names, cases = mark.args
    assert names == ["letter", "number"]
    assert [(case.id, case.values) for case in cases] == [
        ("a, x", (1, 3)),
        ("a, y", (1, 4)),
        ("b, x", (2, 3)),
        ("b, y", (2, 4)),
    ]
    assert [bool(case.marks) for case in cases] == [False, True, True, False]


class Case:
    """Case of a test as pytest collects it, with marks."""

    def __init__(self, nodeid, **marks):
        self.nodeid, self.marks = nodeid, marks
        self.originalname = nodeid.rpartition("::")[2].partition("[")[0]

    def get_closest_marker(self, name):
        return self.marks.get(name)


def test_the_first_cases_of_a_long_test_run_by_default():
    mark = pytest.mark.first_cases(2).mark
    cases = [
        Case(f"{file}::test_long[{case}]", first_cases=mark) for file in ("a.py", "b.py") for case in "xyz"
    ]
    covered = {}
    assert [is_default(case, covered) for case in cases] == [True, True, False] * 2


def test_thorough_tests_run_neither_by_default_nor_with_fast():
    thorough, short = Case("a.py::test_long", thorough=pytest.mark.thorough.mark), Case("a.py::test_short")
    assert [is_default(case, {}) for case in (thorough, short)] == [False, True]
    assert [is_fast(case, {}) for case in (thorough, short)] == [False, True]
