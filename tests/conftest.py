"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def denormal_numbers():
    """An agent has torch flush them, for the whole process: the next test begins with all numbers."""
    torch.set_flush_denormal(False)


@pytest.fixture
def minari_root(tmp_path, monkeypatch):
    """An empty folder for Minari's datasets, and another for their caches, for one test."""
    root = tmp_path / "minari"
    root.mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    monkeypatch.setenv("RLXF_CACHE", str(tmp_path / "cache"))
    return root
