"""Tests of the memory that glibc keeps between updates."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from rlxf.utils.allocator import keep_freed_memory

torch.set_num_threads(1)
keep_freed_memory()
for round in range(30):
    if round == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**19) for _ in range(20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
def test_pages_of_freed_blocks_stay_mapped():
    """Twenty rounds of twenty blocks of 2 MiB, 204,800 pages.

    Without the call, glibc maps them again in most processes; it depends on the blocks that the imports free.
    """
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        assert int(ended.stdout) < 2_000
