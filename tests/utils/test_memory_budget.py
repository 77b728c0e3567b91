"""The budget adds up what a file asks for, and says how to raise it."""

import pytest

from rlxf.utils.memory_budget import DEFAULT, MemoryBudgetError, budget_bytes, check_budget, memory_budget


def test_the_budget_is_that_of_the_block_else_of_the_variable_else_the_default(monkeypatch):
    monkeypatch.delenv("RLXF_MEMORY_BUDGET", raising=False)
    assert budget_bytes() == DEFAULT
    monkeypatch.setenv("RLXF_MEMORY_BUDGET", "77")
    assert budget_bytes() == 77
    with memory_budget(5):
        assert budget_bytes() == 5
    assert budget_bytes() == 77


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "2 GB", "x"])
def test_a_variable_that_is_no_size_is_refused(text, monkeypatch):
    monkeypatch.setenv("RLXF_MEMORY_BUDGET", text)
    with pytest.raises(ValueError, match=f"RLXF_MEMORY_BUDGET must be a whole number of bytes.*{text}"):
        budget_bytes()


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_block_of_no_size_is_refused(size, error):
    with pytest.raises(error, match="max_bytes must be"), memory_budget(size):
        pass


def test_parts_are_summed_and_the_largest_named():
    with memory_budget(100):
        check_budget({"a": 60, "b": 40})
        with pytest.raises(
            MemoryBudgetError, match=r"asks for 101 bytes .*\(60 bytes for a, 41 bytes for b\)"
        ):
            check_budget({"b": 41, "a": 60})


def test_a_file_with_more_arrays_may_ask_for_more_and_the_error_says_what_suffices():
    asked = {"a": 1_900_000_000}
    with memory_budget(100):
        check_budget(asked, file_bytes=475_000_000)
        with pytest.raises(MemoryBudgetError, match=r"asks for 1\.9 GB.*RLXF_MEMORY_BUDGET=1994999958"):
            check_budget(asked, file_bytes=10)
    with memory_budget(1994999958):
        check_budget(asked, file_bytes=10)
