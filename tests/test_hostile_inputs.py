"""Tests that malicious files cannot import modules, start processes or write other files.

One process uses the files under an audit hook, after benign files: see `tests.hostile`.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.hostile import memory
from tests.hostile.controls import HARMFUL
from tests.hostile.process import ATTACKS

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of each attack."""
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.hostile.process", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), "scripts"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def test_number_of_attacks():
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_file_does_no_harm(results, name):
    result = results[name]
    assert result["events"] == [], "imports, processes, connections or writes"
    assert result["untouched"], "files that are not the run's were changed"


@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_file_is_rejected_or_used_without_harm(results, name):
    message, result = ATTACKS[name].message, results[name]
    if message is None:
        assert result["status"] == 0, result["output"]
    else:
        assert result["status"] == 2, result["output"]
        assert message in result["output"]


@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_file_requires_little_memory(results, name):
    assert results[name]["memory"] <= memory.MAX_MEMORY


@pytest.mark.parametrize("name", HARMFUL)
def test_audit_detects_harm(results, name):
    result = results[name]
    assert result["events"] or not result["untouched"] or result["memory"] > memory.MAX_MEMORY


@pytest.mark.parametrize(("name", "event"), [("import", "import"), ("start", "subprocess.Popen")])
def test_audit_names_the_event(results, name, event):
    assert any(each.startswith(event) for each in results[name]["events"])


@pytest.mark.thorough
def test_run_with_the_name_of_a_package_is_not_imported(tmp_path):
    """Python searches modules in the working directory first, which may contain a malicious run."""
    run = tmp_path / "minigrid"
    run.mkdir()
    (run / "__init__.py").write_text("open('ran', 'w')")
    (run / "config.json").write_text('{"agent": "gtrxl", "env": "MiniGrid-MemoryS7-v0"}')
    (run / "checkpoint.zip").touch()
    command = [sys.executable, "-m", "rlxf", "evaluate", "minigrid", "--episodes", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "ran").exists()
