"""Programs that use worker processes: definitions of their scripts, and files of their working directory."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SCRIPT = """
import enum
import gymnasium
import numpy as np
from rlxf.envs import Workers, make_vec_env

class Phase(enum.IntEnum):
    FIRST = 1

class Wrapped(gymnasium.Wrapper):
    limit = None

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"phase": Phase.FIRST}

class Unreadable:
    def __reduce__(self):
        return __import__, ("module_that_does_not_exist",)

class Limit:
    def __init__(self, steps):
        self.steps = steps

env = make_vec_env("CartPole-v1", 2, wrapper_class=Wrapped, workers=Workers(1))
env.reset()
assert env.env_is_wrapped(Wrapped) == [True, True]
env.set_attr("limit", Limit(5))
assert [limit.steps for limit in env.get_attr("limit")] == [5, 5]
assert isinstance(env.get_attr("limit")[0], Limit)
env.set_attr("rule", lambda: 7)
assert env.get_attr("rule")[1]() == 7
infos = env.step(np.zeros(2, np.int64))[3]
assert all(info["phase"] is Phase.FIRST for info in infos)
try:
    env.set_attr("limit", Unreadable())
except RuntimeError as error:
    assert "raised in the unpickling of its arguments" in str(error), error
else:
    raise AssertionError("the argument cannot be unpickled")
assert env.restarts == 0
assert env.env_method("get_wrapper_attr", "spec")[0].id == "CartPole-v1"
env.close()
"""


def run_script(folder, text):
    """Run a script in a working directory that does not contain it."""
    script = folder / "scripts" / "program.py"
    script.parent.mkdir()
    script.write_text(text)
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_definitions_of_the_script_in_queries_and_results(tmp_path):
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr


ENVIRON = """
import os
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
from rlxf.envs import Workers, make_vec_env

class Reporting(CartPoleEnv):
    def reset(self, **keywords):
        Path("environ").write_text(str(os.environ.get("PYTHONSAFEPATH")))
        return super().reset(**keywords)

env = make_vec_env(Reporting, 1, workers=Workers(1))
env.reset()
env.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the working directory of a program with workers; it has files with the names of modules.

    The working directory may be the folder of a stranger's run.
    """
    path = tmp_path_factory.mktemp("program")
    for module in ("gymnasium", "socket", "rlxf"):
        (path / f"{module}.py").write_text(f"open('imported {module}', 'w').close()")
    done = run_script(path, ENVIRON)
    assert done.returncode == 0, done.stderr
    return path


def test_files_of_the_working_directory_are_not_imported(folder):
    assert list(folder.glob("imported *")) == []


def test_environments_have_the_variables_of_the_program(folder):
    """A program that an environment starts searches for modules as it does without workers."""
    assert (folder / "environ").read_text() == os.environ.get("PYTHONSAFEPATH", "None")
