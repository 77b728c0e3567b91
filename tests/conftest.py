"""Fixtures of all tests."""

import pytest
import torch

CONTRACTS = (
    "tests/attention/test_contracts.py::test_acting_with_ring_buffer_equals_learning_in_segments",
    "tests/agents/gtrxl/test_techniques.py",
    "tests/agents/decision_transformer/test_techniques.py",
)
"""Tests of which ``--fast`` runs all cases: one for each technique."""


@pytest.fixture(autouse=True)
def denormal_numbers():
    """Disable flushing of denormal numbers before each test, as agents enable it for the whole process."""
    torch.set_flush_denormal(False)


@pytest.fixture
def minari_root(tmp_path, monkeypatch):
    """Set empty folders for Minari datasets and for their caches; return the former."""
    root = tmp_path / "minari"
    root.mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    monkeypatch.setenv("RLXF_CACHE", str(tmp_path / "cache"))
    return root


def pytest_addoption(parser):
    """Add ``--fast``."""
    parser.addoption(
        "--fast",
        action="store_true",
        help="run one case of each test and all techniques of each contract, without slow and fault tests",
    )


def pytest_collection_modifyitems(config, items):
    """Select the tests of ``--fast``."""
    if not config.getoption("--fast"):
        return
    selected, seen = [], set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        repeated = test in seen and not test.startswith(CONTRACTS)
        if not repeated and not {"slow", "faults"} & {mark.name for mark in item.iter_markers()}:
            seen.add(test)
            selected.append(item)
    kept = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = selected
