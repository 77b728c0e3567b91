"""Tests of the marker file with which a torchrun job recognizes its runs, and of silenced processes."""

import os
import subprocess
import sys

import pytest

from rlxf.cli.torchrun_job import MARKER_FILE, TorchrunJob

JOB = TorchrunJob("this", frozenset({"host 1 2"}))


def test_a_job_recognizes_its_runs(tmp_path):
    assert not JOB.started(tmp_path)
    JOB.mark(tmp_path)
    assert JOB.started(tmp_path)
    assert not TorchrunJob("other", JOB.agents).started(tmp_path)
    assert not TorchrunJob("this", frozenset({"host 1 3"})).started(tmp_path)
    assert TorchrunJob("this", frozenset({"host 1 3", "host 1 2"})).started(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"job_id": "this"}', '{"job_id": "this", "agents": "host 1 2"}']
)
def test_invalid_marker_files_are_ignored(tmp_path, text):
    (tmp_path / MARKER_FILE).write_text(text)
    assert not JOB.started(tmp_path)


def test_a_job_without_known_agents_recognizes_no_run(tmp_path):
    job = TorchrunJob("this", frozenset())
    job.mark(tmp_path)
    assert not job.started(tmp_path)


SILENCED = r"""
from types import SimpleNamespace
from rlxf.cli import torchrun_job
torchrun_job.init_process_group = lambda: SimpleNamespace(is_main=False)
torchrun_job.init_distributed()
print("\u2502 \u0142")
"""


def test_silent_processes_print_any_character_in_any_locale():
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", SILENCED], env=os.environ | ascii_locale, check=True)
