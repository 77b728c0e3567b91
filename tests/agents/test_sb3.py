"""Imported agents of Stable-Baselines3 act as before, and code in files runs only with trust."""

import base64
import json
import subprocess
import sys
import zipfile

import cloudpickle
import gymnasium
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
from gymnasium import spaces
from gymnasium.envs.classic_control import AcrobotEnv
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import collect, evaluate, import_sb3
from rlxf.agents.sb3 import ALGORITHMS
from rlxf.collection.storage import stack
from rlxf.data import ReferenceScores
from rlxf.training import CheckpointError

OFF_POLICY = ("DDPG", "TD3", "SAC", "TQC", "CrossQ")
POLICIES = {"RecurrentPPO": "MlpLstmPolicy", "ARS": "LinearPolicy"}


def small():
    """Return small settings; a copy, since SB3 modifies some of them."""
    return {"policy_kwargs": {"net_arch": [4]}, "device": "cpu", "seed": 0}


def make(cls, **settings):
    """Return a small untrained agent."""
    env = "Pendulum-v1" if cls.__name__ in OFF_POLICY else "CartPole-v1"
    own = {"device": "cpu", "seed": 0} if cls.__name__ == "ARS" else small()
    buffer = {"buffer_size": 10} if cls.__name__ in (*OFF_POLICY, "DQN", "QRDQN") else {}
    return cls(POLICIES.get(cls.__name__, "MlpPolicy"), env, **own, **buffer, **settings)


def acts(agent):
    """Return the agent's actions for ten consecutive observations."""
    agent.observation_space.seed(0)
    state, done = None, []
    for step in range(10):
        seen = agent.observation_space.sample()[None].clip(-1, 1)
        action, state = agent.predict(seen, state, np.array([step == 0]), deterministic=True)
        done.append(action)
    return np.concatenate(done)


def class_named(home):
    package, name = home.split(":")
    return getattr({"stable_baselines3": stable_baselines3, "sb3_contrib": sb3_contrib}[package], name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_is_detected_and_agent_acts_as_before(name, tmp_path):
    agent = make(class_named(ALGORITHMS[name][0]))
    agent.save(tmp_path / "agent")
    imported = import_sb3(tmp_path / "agent", trust=True, device="cpu")
    assert type(imported) is type(agent)
    np.testing.assert_array_equal(acts(imported), acts(agent))


def test_all_algorithms_are_known():
    packages = (stable_baselines3, sb3_contrib)
    offered = {
        name for package in packages for name in package.__all__ if isinstance(getattr(package, name), type)
    }
    offered -= {"HerReplayBuffer"}
    assert offered == {home.split(":")[1] for home, _ in ALGORITHMS.values()}


def test_td3_is_not_detected_as_ddpg(tmp_path):
    """One of its two markers is that of DDPG."""
    make(TD3, policy_delay=1).save(tmp_path / "agent")
    assert type(import_sb3(tmp_path / "agent", trust=True)) is TD3


def test_named_algorithm_is_used(tmp_path):
    make(DDPG).save(tmp_path / "agent")
    assert type(import_sb3(tmp_path / "agent", trust=True, algorithm="td3")) is TD3


# Without trust


class Trap:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def trapped(tmp_path):
    """Return a file that writes another file when it is loaded, and the path of that file."""
    make(PPO).save(tmp_path / "agent.zip")
    with zipfile.ZipFile(tmp_path / "agent.zip") as file:
        members = {name: file.read(name) for name in file.namelist()}
    data = json.loads(members["data"])
    trap = cloudpickle.dumps(Trap(str(tmp_path / "sprung")))
    data["_last_obs"] = {":type:": "", ":serialized:": base64.b64encode(trap).decode()}
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as file:
        for name, content in (members | {"data": json.dumps(data)}).items():
            file.writestr(name, content)
    return tmp_path / "agent.zip", tmp_path / "sprung"


@pytest.mark.faults
def test_code_in_file_runs_only_with_trust(trapped):
    path, sprung = trapped
    with pytest.raises(ValueError, match=r"agent\.zip is not opened.*runs the code.*pass trust=True"):
        import_sb3(path)
    for word in ("no", 1):
        with pytest.raises(ValueError, match="is not opened"):
            import_sb3(path, trust=word)
    assert not sprung.exists()
    import_sb3(path, trust=True)
    assert sprung.exists()


def test_missing_contrib_is_named(tmp_path, monkeypatch):
    make(RecurrentPPO).save(tmp_path / "agent")
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    with pytest.raises(ImportError, match="ppo_lstm requires sb3-contrib: pip install sb3-contrib"):
        import_sb3(tmp_path / "agent", trust=True)


def test_importing_rlxf_does_not_import_sb3_import():
    modules = "import sys, rlxf, rlxf.cli.commands.datasets"
    script = f"{modules}; print({{'torch', 'stable_baselines3'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


# Invalid files


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"file .*nothing\.zip does not exist"):
        import_sb3(tmp_path / "nothing", trust=True)


@pytest.mark.faults
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(99)], ids=["empty", "no zip"])
def test_file_that_is_not_a_zip_is_rejected(tmp_path, content):
    (tmp_path / "agent.zip").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"agent\.zip cannot be imported: File is not a zip file"):
        import_sb3(tmp_path / "agent", trust=True)


@pytest.mark.faults
@pytest.mark.parametrize("member", ["data", "policy.pth"])
def test_missing_member_is_named(tmp_path, member):
    make(PPO).save(tmp_path / "agent")
    with zipfile.ZipFile(tmp_path / "agent.zip") as file:
        members = {name: file.read(name) for name in file.namelist() if name != member}
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    with pytest.raises(CheckpointError, match=r"agent\.zip cannot be imported: .+"):
        import_sb3(tmp_path / "agent", trust=True)


@pytest.mark.parametrize("data", [{}, [], {"policy_class": "X"}], ids=str)
def test_unrecognized_settings_are_reported(tmp_path, data):
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as file:
        file.writestr("data", json.dumps(data))
    with pytest.raises(CheckpointError, match=r"agent\.zip cannot be imported"):
        import_sb3(tmp_path / "agent", trust=True)


def test_unknown_algorithm_lists_known_ones(tmp_path):
    make(A2C).save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"algorithm 'PPO2' is unknown; use one of .*a2c.*sac"):
        import_sb3(tmp_path / "agent", trust=True, algorithm="PPO2")


def test_another_environment_is_refused(tmp_path):
    make(DQN).save(tmp_path / "agent")
    with pytest.raises(
        CheckpointError, match=r"agent\.zip cannot be imported: Observation spaces do not match"
    ):
        import_sb3(tmp_path / "agent", trust=True, env="Acrobot-v1")


def test_environments_made_of_ids_are_closed_if_the_agent_is_not_loaded(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(AcrobotEnv, "close", lambda self: closed.append(self))
    make(DQN).save(tmp_path / "agent")
    for env in ("Acrobot-v1", gymnasium.make("Acrobot-v1")):
        with pytest.raises(CheckpointError, match="Observation spaces do not match"):
            import_sb3(tmp_path / "agent", trust=True, env=env)
    assert len(closed) == 1, "only the one that the caller cannot close"


# Normalized observations


class Ladder(gymnasium.Env):
    """Observations count from 100 to 109 for any action; the reward equals the observation."""

    observation_space = spaces.Box(0, 200, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        self.rung = 100
        return self._look(), {}

    def step(self, action):
        self.rung += 1
        return self._look(), float(self.rung), self.rung == 109, False, {}

    def _look(self):
        return np.array([self.rung], np.float32)


@pytest.fixture
def climber(tmp_path):
    """Return an agent trained on normalized observations, its file, and its RL Zoo statistics."""
    env = VecNormalize(DummyVecEnv([Ladder]))
    agent = SAC("MlpPolicy", env, learning_starts=18, buffer_size=99, **small()).learn(20)
    agent.save(tmp_path / "Ladder.zip")
    (tmp_path / "Ladder").mkdir()
    env.save(tmp_path / "Ladder/vecnormalize.pkl")
    return agent, tmp_path / "Ladder.zip", tmp_path / "Ladder/vecnormalize.pkl"


def test_agent_gets_normalized_observations_and_dataset_is_raw(climber, minari_root):
    agent, path, statistics = climber
    imported = import_sb3(path, trust=True, env=DummyVecEnv([Ladder]), normalizer=statistics)
    options = {"episodes": 2, "deterministic": True, "reference_scores": ReferenceScores(0, 1, "here")}
    with pytest.warns(UserWarning, match="the environment has no spec"):
        datasets = [
            collect(each, Ladder(), f"test/{name}-v0", **options)
            for name, each in (("a", agent), ("b", imported))
        ]
    first, second = (next(dataset.iterate_episodes()) for dataset in datasets)
    np.testing.assert_array_equal(first.observations[:, 0], np.arange(100, 110))
    np.testing.assert_array_equal(first.actions, second.actions)
    normalized = agent.get_vec_normalize_env().normalize_obs(stack(list(first.observations[:-1])))
    np.testing.assert_allclose(first.actions, agent.predict(normalized, deterministic=True)[0], rtol=1e-5)


def test_statistics_are_frozen_and_returns_are_raw(climber):
    _, path, statistics = climber
    imported = import_sb3(path, trust=True, env=Ladder(), normalizer=statistics)
    before = imported.get_vec_normalize_env().obs_rms.mean.copy()
    assert evaluate(imported, episodes=3).mean == sum(range(101, 110))
    np.testing.assert_array_equal(imported.get_vec_normalize_env().obs_rms.mean, before)


def test_missing_statistics_are_named(climber):
    _, path, statistics = climber
    with pytest.warns(UserWarning, match=rf"{statistics} exists next to .*pass normalizer="):
        import_sb3(path, trust=True)


def test_statistics_without_an_environment_are_refused(climber):
    _, path, statistics = climber
    with pytest.raises(ValueError, match=r"pass env=\.\.\., too"):
        import_sb3(path, trust=True, normalizer=statistics)


@pytest.mark.faults
def test_invalid_statistics_file_is_named(climber):
    _, path, statistics = climber
    for content in (b"", cloudpickle.dumps("mean 3")):
        statistics.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"vecnormalize\.pkl cannot be imported"):
            import_sb3(path, trust=True, env=Ladder(), normalizer=statistics)
    statistics.unlink()
    with pytest.raises(FileNotFoundError, match=r"file .*vecnormalize\.pkl does not exist"):
        import_sb3(path, trust=True, env=Ladder(), normalizer=statistics)
