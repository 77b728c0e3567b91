"""Whose a run is: a file that says so is believed as far as it says it."""

import pytest

from rlxf.cli.job import FILE, Job

JOB = Job("this", frozenset({"host 1 2"}))


def test_a_job_knows_what_it_began(tmp_path):
    assert not JOB.began(tmp_path)
    JOB.mark(tmp_path)
    assert JOB.began(tmp_path)
    assert not Job("other", JOB.agents).began(tmp_path)
    assert not Job("this", frozenset({"host 1 3"})).began(tmp_path)
    assert Job("this", frozenset({"host 1 3", "host 1 2"})).began(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": "this"}', '{"name": "this", "agents": "host 1 2"}'])
def test_a_file_of_something_else_says_nothing(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert not JOB.began(tmp_path)


def test_without_the_moment_when_a_process_began_no_folder_is_known(tmp_path):
    nobody = Job("this", frozenset())
    nobody.mark(tmp_path)
    assert not nobody.began(tmp_path)
