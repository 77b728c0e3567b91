"""A block-sparse pass, from the spec to the kernel, runs through few files."""

import sys
from pathlib import Path

import rlxf
from rlxf.attention import BigBird, TokenIndex, TransformerSpec
from rlxf.attention.sparse import attention
from tests.attention.worlds import numbers

MAX_FILES = 27
LENGTH = 1024


def test_few_files_run_from_spec_to_sparse_kernel():
    package, files = str(Path(rlxf.__file__).parent), set()

    def record(frame, event, arg):
        if frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename)

    spec = TransformerSpec(width=8, heads=2, layers=1, pattern=BigBird(16), causal=False)
    x, index = numbers(1, LENGTH, spec.width).float(), TokenIndex.range(1, LENGTH)
    sys.setprofile(record)
    try:
        spec.build()(x, index)
    finally:
        sys.setprofile(None)
    assert attention.__file__ in files
    assert len(files) <= MAX_FILES, sorted(files)
