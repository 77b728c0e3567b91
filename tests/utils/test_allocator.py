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
if {keep}:
    keep_freed_memory()
for round in range(21):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**19) for _ in range(20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
def test_pages_of_freed_blocks_stay_mapped():
    """Twenty rounds of twenty blocks of 2 MiB: without the call, glibc unmaps and maps their pages again."""
    faults = {}
    for keep in (False, True):
        command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
        faults[keep] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults[True] < faults[False] / 10
