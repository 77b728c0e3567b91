"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def denormal_numbers():
    """An agent has torch flush them, for the whole process: the next test begins with all numbers."""
    torch.set_flush_denormal(False)
