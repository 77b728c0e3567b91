"""Tests of the marker file with which a torchrun job recognizes its runs."""

import pytest

from rlxf.cli.job import FILE, Job

JOB = Job("this", frozenset({"host 1 2"}))


def test_a_job_recognizes_its_runs(tmp_path):
    assert not JOB.began(tmp_path)
    JOB.mark(tmp_path)
    assert JOB.began(tmp_path)
    assert not Job("other", JOB.agents).began(tmp_path)
    assert not Job("this", frozenset({"host 1 3"})).began(tmp_path)
    assert Job("this", frozenset({"host 1 3", "host 1 2"})).began(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": "this"}', '{"name": "this", "agents": "host 1 2"}'])
def test_invalid_marker_files_are_ignored(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert not JOB.began(tmp_path)


def test_a_job_without_known_agents_recognizes_no_run(tmp_path):
    job = Job("this", frozenset())
    job.mark(tmp_path)
    assert not job.began(tmp_path)
