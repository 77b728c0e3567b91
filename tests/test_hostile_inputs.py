"""A file of a stranger is data: whatever it says, nothing is imported, started or written elsewhere.

The files are used in one process with an audit hook, after benign ones: see `tests.hostile`.
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
def found(tmp_path_factory):
    """What came of each attack."""
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.hostile.process", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), "scripts"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_file_does_no_harm(found, name):
    came = found[name]
    assert came["events"] == [], "imports, processes, connections or writes"
    assert came["untouched"], "files that are not the run's were changed"


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_by_name_or_used_without_harm(found, name):
    told, came = ATTACKS[name].told, found[name]
    if told is None:
        assert came["status"] == 0, came["said"]
    else:
        assert came["status"] == 2, came["said"]
        assert told in came["said"]


@pytest.mark.parametrize("name", ATTACKS)
def test_it_takes_little_memory(found, name):
    assert found[name]["memory"] <= memory.MOST


@pytest.mark.parametrize("name", HARMFUL)
def test_the_watch_sees_harm(found, name):
    came = found[name]
    assert came["events"] or not came["untouched"] or came["memory"] > memory.MOST


@pytest.mark.parametrize(("name", "event"), [("import", "import"), ("start", "subprocess.Popen")])
def test_the_watch_names_it(found, name, event):
    assert any(each.startswith(event) for each in found[name]["events"])


def test_a_run_named_like_a_package_is_not_imported(tmp_path):
    """Python looks for modules in the working directory first, where the run of a stranger may stand."""
    run = tmp_path / "minigrid"
    run.mkdir()
    (run / "__init__.py").write_text("open('ran', 'w')")
    (run / "config.json").write_text('{"agent": "gtrxl", "env": "MiniGrid-MemoryS7-v0"}')
    (run / "checkpoint.zip").touch()
    command = [sys.executable, "-m", "rlxf", "evaluate", "minigrid", "--episodes", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "ran").exists()
