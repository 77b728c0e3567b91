"""``rlxf collect``."""

import re

import minari
import numpy as np
import pytest

from rlxf.cli import main
from tests.cli.running import refused, train

ID = "test/tmaze-v0"
QUIET = ("--no-progress-bar", "--n-envs", "2")


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def collect(*args: str) -> minari.MinariDataset:
    main(["collect", *args, "--dataset", ID, *QUIET])
    return minari.load_dataset(ID)


def test_a_run_is_recorded_on_its_own_task(finished, capsys):
    dataset = collect(str(finished), "--episodes", "6", "--mix", "0", "1", "--author", "Ada")
    assert dataset.total_episodes == 6
    assert dataset.total_steps == 6 * 4
    assert dataset.env_spec.kwargs["corridor_length"] == 3
    assert dataset.storage.metadata["author"] == {"Ada"}
    assert "3 episodes of GTrXLPPO; 3 episodes of random actions" in dataset.storage.metadata["description"]
    assert re.search(r"│ +24 │ +6 │", capsys.readouterr().out)


def test_runs_are_recorded_side_by_side_on_another_task(finished):
    dataset = collect(
        str(finished), str(finished), "--episodes", "4", "--env-kwargs", '{"corridor_length": 8}'
    )
    assert dataset.total_steps == 4 * 9
    assert "2 episodes of GTrXLPPO; 2 episodes of GTrXLPPO" in dataset.storage.metadata["description"]


def test_random_play_is_recorded_without_a_run():
    dataset = collect("--env", "CartPole-v1", "--episodes", "3", "--seed", "4")
    assert dataset.env_spec.id == "CartPole-v1"
    assert dataset.storage.metadata["algorithm_name"] == "random"


def test_the_agent_sees_what_it_was_trained_on(tmp_path):
    """Observations were normalised in training; recorded are raw ones."""
    train("--run", "run", "--normalize-observations")
    dataset = collect("run", "--episodes", "2")
    seen = np.concatenate([episode.observations for episode in dataset.iterate_episodes()])
    assert set(np.unique(seen)) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "give the folder of a run, or --env"),
        (["nowhere"], "nowhere"),
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--episodes", "2", "--mix", "0", "0.5", "1"], "3 skills, got 2"),
        (["--env", "CartPole-v1", "--mix", "-1"], "from 0 to 1, got -1"),
        (["--env", "CartPole-v1", "--target-returns", "5"], "for Decision Transformers alone, got [5.0]"),
    ],
    ids=["nobody", "no run", "no task", "no episode", "too few", "mix", "targets"],
)
def test_a_mistake_is_one_line_and_leaves_nothing(args, named, capsys, minari_root):
    assert named in refused(capsys, "collect", *args, "--dataset", ID)
    assert list(minari_root.iterdir()) == []


def test_what_is_no_id_or_exists_is_refused(capsys):
    assert "no Minari id" in refused(capsys, "collect", "--env", "CartPole-v1", "--dataset", "my data")
    collect("--env", "CartPole-v1", "--episodes", "1")
    assert f"{ID} exists" in refused(capsys, "collect", "--env", "CartPole-v1", "--dataset", ID)
