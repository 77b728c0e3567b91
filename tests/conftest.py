"""Fixtures of all tests."""

import pytest
import torch


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
