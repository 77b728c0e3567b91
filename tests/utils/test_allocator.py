"""Tests of the memory that glibc keeps between updates."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import sys
import torch
from rlxf.utils.allocator import keep_freed_memory

torch.set_num_threads(1)
keep_freed_memory()
number, mebibytes = map(int, sys.argv[1:])
for round in range(30):
    if round == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(mebibytes * 2**18) for _ in range(number)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
@pytest.mark.parametrize(("number", "mebibytes"), [(20, 2), (6, 24)])
def test_pages_of_freed_blocks_stay_mapped(number, mebibytes):
    """Twenty rounds of blocks, of 40 MiB in total, and of 144 MiB like those of a minibatch of images.

    Without the call, glibc maps them again in most processes; it depends on the blocks that the imports free.
    """
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM, str(number), str(mebibytes)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(ended.stdout) < 2_000
