"""Tests of the memory budget for files."""

import pytest

from rlxf.utils.memory_budget import DEFAULT, MemoryBudgetError, budget_bytes, check_budget, memory_budget


def test_budget_of_block_variable_and_default(monkeypatch):
    monkeypatch.delenv("RLXF_MEMORY_BUDGET", raising=False)
    assert budget_bytes() == DEFAULT
    monkeypatch.setenv("RLXF_MEMORY_BUDGET", "77")
    assert budget_bytes() == 77
    with memory_budget(5):
        assert budget_bytes() == 5
    assert budget_bytes() == 77


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "2 GB", "x"])
def test_invalid_variable_is_rejected(text, monkeypatch):
    monkeypatch.setenv("RLXF_MEMORY_BUDGET", text)
    with pytest.raises(ValueError, match=f"RLXF_MEMORY_BUDGET must be an integer number of bytes.*{text}"):
        budget_bytes()


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_invalid_max_bytes_is_rejected(size, error):
    with pytest.raises(error, match="max_bytes must be"), memory_budget(size):
        pass


def test_requirements_are_summed_and_the_largest_reported():
    with memory_budget(100):
        check_budget({"a": 60, "b": 40})
        with pytest.raises(
            MemoryBudgetError, match=r"requires 101 bytes .*\(60 bytes for a, 41 bytes for b\)"
        ):
            check_budget({"b": 41, "a": 60})


def test_budget_grows_with_file_and_error_suggests_a_sufficient_budget():
    required = {"a": 1_900_000_000}
    with memory_budget(100):
        check_budget(required, file_bytes=475_000_000)
        with pytest.raises(MemoryBudgetError, match=r"requires 1\.9 GB.*RLXF_MEMORY_BUDGET=1994999958"):
            check_budget(required, file_bytes=10)
    with memory_budget(1994999958):
        check_budget(required, file_bytes=10)
