"""Tests of ``rlxf collect``."""

import re

import minari
import numpy as np
import pytest
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import collection as recording
from rlxf.cli import main
from rlxf.envs import make_vec_env
from tests.cli.running import refused, train

ID = "test/tmaze-v0"
QUIET = ("--no-progress-bar", "--n-envs", "2")


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def collect(*args: str) -> minari.MinariDataset:
    main(["collect", "--dataset", ID, *QUIET, *args])
    return minari.load_dataset(ID)


def test_a_run_is_recorded_in_its_environment(finished, capsys):
    dataset = collect(str(finished), "--episodes", "6", "--mix", "0", "1", "--author", "Ada")
    assert dataset.total_episodes == 6
    assert dataset.total_steps == 6 * 4
    assert dataset.env_spec.kwargs["corridor_length"] == 3
    assert dataset.storage.metadata["author"] == {"Ada"}
    assert "3 episodes of GTrXLPPO; 3 episodes of random actions" in dataset.storage.metadata["description"]
    assert re.search(r" 24 +6 ", capsys.readouterr().out)


@pytest.mark.thorough
def test_several_runs_are_recorded_with_other_arguments(finished):
    dataset = collect(
        str(finished), str(finished), "--episodes", "4", "--env-kwargs", '{"corridor_length": 8}'
    )
    assert dataset.total_steps == 4 * 9
    assert "2 episodes of GTrXLPPO; 2 episodes of GTrXLPPO" in dataset.storage.metadata["description"]


def test_a_random_policy_is_recorded_without_a_run():
    dataset = collect("--env", "CartPole-v1", "--episodes", "3", "--seed", "4")
    assert dataset.env_spec.id == "CartPole-v1"
    assert dataset.storage.metadata["algorithm_name"] == "random"


@pytest.mark.thorough
def test_observations_are_normalized_for_the_agent_and_recorded_raw(tmp_path):
    train("--run", "run", "--normalize-observations")
    dataset = collect("run", "--episodes", "2")
    seen = np.concatenate([episode.observations for episode in dataset.iterate_episodes()])
    assert set(np.unique(seen)) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "pass the folder of a run, or --env"),
        (["nowhere"], "nowhere"),
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--episodes", "2", "--mix", "0", "0.5", "1"], "must be at least 3, one"),
        (["--env", "CartPole-v1", "--mix", "-1"], "from 0 to 1, got -1"),
        (["--env", "CartPole-v1", "--mix"], "mix must have at least one fraction of random actions"),
        (["--env", "CartPole-v1", "--seed", "-1"], "seed must be finite and at least 0, got -1"),
        (
            ["--env", "CartPole-v1", "--target-returns", "5"],
            "apply to return-conditioned agents only, got [5.0]",
        ),
    ],
    ids=["no agent", "no run", "no env", "no episode", "too few", "mix", "no mix", "seed", "targets"],
)
def test_errors_are_one_line_and_no_dataset_is_created(args, message, capsys, minari_root):
    assert message in refused(capsys, "collect", *args, "--dataset", ID)
    assert list(minari_root.iterdir()) == []


MAZE = ("--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}')


@pytest.fixture
def sb3_agents():
    """Two agents of Stable-Baselines3, and the normalizer of the second, which divides observations by 10."""
    env = VecNormalize(make_vec_env("rlxf/TMaze-v0", 1, env_kwargs={"corridor_length": 3}), norm_reward=False)
    PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu", seed=0).save("first.zip")
    env.obs_rms.var[:] = 100
    agent = DQN("MlpPolicy", env, buffer_size=9, device="cpu")
    agent.exploration_rate = 0.5
    agent.save("second.zip")
    env.save("second.pkl")
    return "--sb3.files", "first.zip", "second.zip"


def test_agents_of_stable_baselines3_are_recorded(sb3_agents):
    dataset = collect(*sb3_agents, "--sb3.trust", *MAZE, "--episodes", "6")
    assert "3 episodes of PPO; 3 episodes of DQN" in dataset.storage.metadata["description"]
    assert dataset.storage.metadata["algorithm_name"] == "PPO, DQN"
    assert dataset.total_episodes == 6


def test_recording_of_stable_baselines3_is_reproducible(sb3_agents):
    """DQN draws random actions from NumPy's global generator and from its action space."""
    recorded = []
    for dataset_id in (ID, "test/again-v0"):
        words = ["--sb3.files", "second.zip", "--sb3.trust", *MAZE, "--episodes", "12", *QUIET]
        main(["collect", *words, "--dataset", dataset_id])
        recorded.append([episode.actions.tolist() for episode in minari.load_dataset(dataset_id)])
    assert recorded[0] == recorded[1]


def test_normalizers_of_stable_baselines3_are_applied(sb3_agents, monkeypatch):
    seen, predict = [], DQN.predict
    monkeypatch.setattr(
        DQN,
        "predict",
        lambda agent, obs, *args, **kwargs: seen.append(obs) or predict(agent, obs, *args, **kwargs),
    )
    words = ("--sb3.files", "second.zip", "--sb3.trust", "--sb3.normalizers", "second.pkl", "--episodes", "1")
    episode = next(iter(collect(*words, *MAZE)))
    played = np.concatenate(seen[-len(episode) :])
    np.testing.assert_allclose(played * 10, episode.observations[:-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*MAZE], "first.zip is not opened: loading a file of Stable-Baselines3 executes"),
        (
            [*MAZE, "--sb3.trust", "--sb3.normalizers", "second.pkl"],
            "each of 2 agents, or none, got 1",
        ),
        (["--sb3.trust"], "no environment given: pass the folder of a run, or --env"),
        (
            ["--env", "Acrobot-v1", "--sb3.trust"],
            "first.zip cannot be imported: Observation spaces do not match",
        ),
        ([*MAZE, "--sb3.trust", "--sb3.algorithm", "dt"], "algorithm 'dt' is unknown"),
    ],
    ids=["trust", "normalizers", "no env", "another env", "algorithm"],
)
def test_errors_of_stable_baselines3_files_are_one_line(args, message, sb3_agents, capsys, minari_root):
    assert message in refused(capsys, "collect", *sb3_agents, *args, "--dataset", ID)
    assert list(minari_root.iterdir()) == []


def test_error_for_a_file_instead_of_a_run_names_the_option(sb3_agents, capsys):
    assert "rlxf collect --sb3.files" in refused(capsys, "collect", "first.zip", "--dataset", ID)


def test_error_for_other_spaces_names_the_run(finished, capsys):
    train("--run", "extended", "--previous-reward")
    message = refused(capsys, "collect", str(finished), "extended", "--dataset", ID)
    assert message.startswith("rlxf: extended: the checkpoint was trained on another observation space")


def test_invalid_and_existing_ids_are_rejected(capsys):
    for invalid in ("my data", "tmaze", "test/tmaze"):
        assert "not a Minari id" in refused(capsys, "collect", "--env", "CartPole-v1", "--dataset", invalid)
    collect("--env", "CartPole-v1", "--episodes", "1")
    assert f"{ID} exists" in refused(capsys, "collect", "--env", "CartPole-v1", "--dataset", ID)


def test_the_command_records_the_same_dataset_as_the_function():
    """Both make two environments, as many as each of the three policies has episodes."""
    options = ("--env", "CartPole-v1", "--episodes", "6", "--mix", "0", "0.5", "1", "--n-envs", "5")
    recorded = collect(*options)
    expected = recording.collect(
        None, "CartPole-v1", "test/function-v0", 6, mix=(0, 0.5, 1), n_envs=5, seed=0
    )
    for one, other in zip(recorded.iterate_episodes(), expected.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
