"""Tests of registered environments, and of environments that a file describes."""

import re
import subprocess
import sys
import warnings

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from rlxf.envs import TMaze, register_envs
from rlxf.envs.specs import DescribedEnv, find_spec, registered_spec

IDS = ["rlxf/TMaze-v0", "rlxf/TMazeActive-v0"]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"id": "CartPole-v0"}, True),
        ({"max_episode_steps": None}, True),
        ({"kwargs": {"x": [1], "render_mode": "rgb_array"}}, True),
        ({"kwargs": {"x": [2]}}, False),
        ({"kwargs": {}}, False),
        ({"kwargs": {"x": [1], "sutton_barto_reward": True}}, False),
        ({"max_episode_steps": 100}, False),
        ({"id": "Acrobot-v1"}, False),
    ],
)
def test_returns_are_comparable_in_the_same_task_only(changes, same):
    described = DescribedEnv("CartPole-v1", {"x": (1,)}, 500)
    spec = EnvSpec(**{"id": "CartPole-v1", "kwargs": {"x": [1]}, "max_episode_steps": 500} | changes)
    assert described.is_same_task(spec) is same
    assert described.is_same_task(None)


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


def test_errors_of_a_module_of_the_user_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = "import gymnasium\nraise gymnasium.error.DependencyNotInstalled('install the simulator')"
    (tmp_path / "unready.py").write_text(error)
    with pytest.raises(ValueError, match="the import of unready for 'unready:Task-v0' failed: install"):
        find_spec("unready:Task-v0")


def test_registered_environment_needs_no_trust():
    described = DescribedEnv("FrozenLake-v1", {"map_name": "4x4"}, 100)
    assert described.needs_trust() == []
    spec = described.local_spec()
    assert spec.entry_point == gymnasium.spec("FrozenLake-v1").entry_point
    assert (spec.kwargs["map_name"], spec.max_episode_steps) == ("4x4", 100)
    assert DescribedEnv("FrozenLake-v1", {"map_name": "8x8"}).needs_trust() == ["map_name='8x8'"]


@pytest.mark.parametrize(
    ("described", "untrusted"),
    [
        (DescribedEnv("CartPole-v1", {"sutton_barto_reward": True}), "sutton_barto_reward=True"),
        (DescribedEnv("Pendulum-v1", {"g": "/etc/passwd"}), "g='/etc/passwd'"),
        (DescribedEnv("CartPole-v1", {"render_mode": "human"}), "render_mode='human'"),
        (DescribedEnv("CartPole-v1", {}, 501), "max_episode_steps=501"),
        (DescribedEnv("CartPole-v1", {}, True), "max_episode_steps=True"),
        (DescribedEnv("CartPole-v1", {}, "9"), "max_episode_steps='9'"),
        (DescribedEnv("CartPole-v1", {}, None, ("ClipReward",)), "wrapper ClipReward"),
        (DescribedEnv("rlxf/TMaze-v0", {"autoreset_mode": "x"}), "autoreset_mode='x'"),
    ],
    ids=str,
)
def test_other_arguments_limits_and_wrappers_need_trust(described, untrusted):
    assert described.needs_trust() == [untrusted]
    with pytest.raises(ValueError, match=r"not used without trust.*--env .*trust=True") as refusal:
        described.local_spec()
    assert untrusted in str(refusal.value)


def test_shorter_limit_is_used_and_a_missing_one_is_the_registered():
    assert DescribedEnv("CartPole-v1", {}, 17).local_spec().max_episode_steps == 17
    assert DescribedEnv("CartPole-v1").local_spec().max_episode_steps == 500


def test_arguments_of_the_caller_need_no_trust():
    described = DescribedEnv("Pendulum-v1", {"g": 5.0, "mass": 2.0})
    assert described.needs_trust(["g"]) == ["mass=2.0"]


def test_tmaze_arguments_need_no_trust():
    described = DescribedEnv("rlxf/TMaze-v0", {"corridor_length": 7, "active": True, "penalty": -0.5})
    assert described.local_spec().kwargs["corridor_length"] == 7
    with pytest.raises(ValueError, match="corridor_length must be at most 1,000,000"):
        gymnasium.make(DescribedEnv("rlxf/TMaze-v0", {"corridor_length": 10**9}).local_spec())


@pytest.mark.parametrize("env_id", ["no_such_module:CartPole-v1", "rlxf.envs:rlxf/TMaze-v0", ":CartPole-v1"])
def test_module_in_the_id_of_a_file_is_not_imported(env_id):
    with pytest.raises(ValueError, match="a module that a file names is not imported"):
        registered_spec(env_id)


def test_family_is_not_imported_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minigrid").mkdir()
    (tmp_path / "minigrid/__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "minigrid", raising=False)
    with pytest.raises(ValueError, match="minigrid would be imported from the working directory"):
        registered_spec("MiniGrid-MemoryS7-v0")


@pytest.mark.parametrize(("env_id", "kwargs"), [(3, {}), (None, {}), ("CartPole-v1", [1])])
def test_invalid_description_raises(env_id, kwargs):
    with pytest.raises(ValueError, match="an environment is an id and its arguments"):
        DescribedEnv(env_id, kwargs)


@pytest.mark.parametrize(
    ("described", "difference"),
    [
        (DescribedEnv("CartPole-v1", {}, 200), None),
        (DescribedEnv("CartPole-v9"), r"^CartPole-v9 is not registered here, but CartPole-v0, CartPole-v1: "),
        (DescribedEnv("CartPole"), "^CartPole is not registered here, but CartPole-v0"),
        (DescribedEnv("CartPole-v1", {"x": 2}), r"^the data describe CartPole-v1 with x=2, which differs"),
        (DescribedEnv("os:CartPole-v1"), "a module that a file names is not imported"),
        (DescribedEnv("no id!"), "unknown environment id 'no id!'"),
    ],
    ids=repr,
)
def test_registration_describes_the_difference(described, difference):
    text = described.registration()
    if difference is None:
        assert text is None
    else:
        assert re.search(difference, text)
