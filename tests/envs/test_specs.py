"""Tests of registered environments."""

import subprocess
import sys
import warnings

import gymnasium
import pytest

from rlxf.envs import TMaze, register_envs
from rlxf.envs.described_env import DescribedEnv
from rlxf.envs.specs import find_spec, registered_spec

IDS = ["rlxf/TMaze-v0", "rlxf/TMazeActive-v0"]


@pytest.mark.parametrize("env_id", IDS)
def test_registered_id_creates_its_environment(env_id):
    env = gymnasium.make(env_id, corridor_length=7).unwrapped
    assert isinstance(env, TMaze)
    assert (env.rules.corridor_length, env.rules.active) == (7, env_id == IDS[1])


def test_registering_twice_has_no_effect():
    before = {env_id: gymnasium.registry[env_id] for env_id in IDS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_envs()
    assert all(gymnasium.registry[env_id] is spec for env_id, spec in before.items())


def test_registration_does_not_import_torch():
    code = "import sys, rlxf.envs.specs; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


TASK = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("{name}/Task-v0", entry_point=CartPoleEnv)
"""


@pytest.mark.parametrize("use", [find_spec, lambda env_id: DescribedEnv(env_id).trusted_spec()])
def test_a_module_of_the_user_is_found_in_the_working_directory(tmp_path, monkeypatch, request, use):
    name = f"own_tasks_{request.node.callspec.indices['use']}"
    (tmp_path / f"{name}.py").write_text(TASK.format(name=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    with pytest.raises(ValueError, match="a module that a file names is not imported"):
        registered_spec(f"{name}:{name}/Task-v0")
    assert use(f"{name}:{name}/Task-v0").id == f"{name}/Task-v0"
    assert sys.path[-1] == str(tmp_path)  # hides no installed module


def test_a_missing_module_of_the_user_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"No module named 'nowhere'. The module must be in the working dir"):
        find_spec("nowhere:Task-v0")
    (tmp_path / "broken.py").write_text("import missing_package_of_broken")
    with pytest.raises(ValueError, match="No module named 'missing_package_of_broken'"):
        find_spec("broken:Task-v0")


OWN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Task(CartPoleEnv): pass
if "listed/Pole-v0" not in gymnasium.registry:
    gymnasium.register("listed/Pole-v0", entry_point=CartPoleEnv)
    gymnasium.register("listed/Task-v0", entry_point="listed_tasks:Task")
"""


def test_the_ids_of_a_module_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed_tasks.py").write_text(OWN)
    ids = r"the module listed_tasks registers .*listed/Task-v0"
    with pytest.raises(
        ValueError, match=rf"unknown environment id 'listed_tasks:Tsk-v0': {ids}.*listed/Pole-v0"
    ):
        find_spec("listed_tasks:Tsk-v0")
    with pytest.raises(ValueError, match=ids):  # imported before
        find_spec("listed_tasks:Tsk-v0")
    advice = r"Task is a class, not an id. Register it in listed_tasks, .*entry_point='listed_tasks:Task'"
    with pytest.raises(ValueError, match=advice):
        find_spec("listed_tasks:Task")
    (tmp_path / "empty_tasks.py").write_text("")
    with pytest.raises(ValueError, match="the module empty_tasks registers no ids"):
        find_spec("empty_tasks:Task-v0")


def test_errors_of_a_module_of_the_user_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = "import gymnasium\nraise gymnasium.error.DependencyNotInstalled('install the simulator')"
    (tmp_path / "unready.py").write_text(error)
    with pytest.raises(ValueError, match="the import of unready for 'unready:Task-v0' failed: install"):
        find_spec("unready:Task-v0")


@pytest.mark.parametrize("env_id", ["no_such_module:CartPole-v1", "rlxf.envs:rlxf/TMaze-v0", ":CartPole-v1"])
def test_module_in_the_id_of_a_file_is_not_imported(env_id):
    with pytest.raises(ValueError, match="a module that a file names is not imported"):
        registered_spec(env_id)


@pytest.mark.parametrize("env_id", ["x" * 100_000, "module:" + "x" * 100_000, "MiniGrid-" + "x" * 100_000])
def test_a_long_id_of_a_file_is_shortened_in_the_message(env_id):
    with pytest.raises(ValueError, match="environment") as failure:
        registered_spec(env_id)
    assert len(str(failure.value)) < 1000


def test_family_is_not_imported_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minigrid").mkdir()
    (tmp_path / "minigrid/__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "minigrid", raising=False)
    with pytest.raises(ValueError, match="minigrid would be imported from the working directory"):
        registered_spec("MiniGrid-MemoryS7-v0")
