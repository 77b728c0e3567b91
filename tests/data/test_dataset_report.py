"""Tests of reports of datasets: statistics, table, histogram, plot and JSON."""

import json

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from PIL import Image

from rlxf.data import DatasetError, ReferenceScores, inspect_dataset, load_trajectories
from tests.data.reports import report, trajectories, varied
from tests.datasets import ID, opened, record_cartpole, record_random


def test_statistics_of_the_returns():
    returns = np.random.default_rng(0).normal(size=25)
    statistics = report([[each] for each in returns]).return_statistics
    assert statistics["mean"] == pytest.approx(returns.mean())
    assert statistics["std"] == pytest.approx(returns.std())
    assert statistics["25%"] == pytest.approx(np.quantile(returns, 0.25))
    assert (statistics["min"], statistics["max"]) == pytest.approx((returns.min(), returns.max()))
    assert statistics["mean of best 10%"] == pytest.approx(np.sort(returns)[-2:].mean())
    assert report([[1.0], [5.0]]).return_statistics["mean of best 10%"] == 5


def test_normalized_scores_need_reference_scores():
    scores = ReferenceScores(0.0, 10.0, "a test")
    data = report([[1.0], [5.0]], reference_scores=scores)
    assert data.normalized_scores == {"mean": 30, "mean of best 10%": 50, "max": 50}
    assert report([[1.0], [5.0]]).normalized_scores is None


def test_ends_are_shares_of_the_episodes():
    flags = np.array([[True, True, False, False], [False, True, True, False]])
    data = report([[1.0]] * 4, terminated=flags[0], truncated=flags[1])
    assert data.ends == {"terminated": 0.25, "truncated": 0.25, "both": 0.25, "neither": 0.25}


def test_trajectories_are_validated():
    data = trajectories([[1.0, np.nan], [5.0]])
    with pytest.raises(DatasetError, match=r"the reward of step 1 .* is nan"):
        inspect_dataset(data)
    assert inspect_dataset(trajectories([[1.0], [5.0]])).episodes == 2


def test_a_dataset_is_inspected_by_its_id(minari_root):
    record_cartpole((9, 3, 12, 1))
    data = inspect_dataset(ID)
    assert (data.dataset_ids, data.env_ids, data.eval_env_id) == ((ID,), ("CartPole-v1",), "CartPole-v1")
    assert (data.episodes, data.steps, data.max_episode_steps) == (4, 25, 500)
    assert data.ends["truncated"] == data.ends["terminated"] == 0.5
    np.testing.assert_array_equal(data.returns, load_trajectories(ID).returns)
    assert any("number of episodes is 4" in sentence for sentence in data.findings)
    assert inspect_dataset(load_trajectories(ID)).to_json() == data.to_json()


def test_values_that_training_refuses_are_errors(minari_root):
    with opened(record_random()) as file:
        file["episode_1/rewards"][0] = np.nan
    with pytest.raises(DatasetError, match="episode 1: the reward of step 0 is nan"):
        inspect_dataset(ID)


def test_infinite_returns_are_errors():
    with pytest.raises(DatasetError, match="the return of episode 1 is inf"):
        report([[1.0], [3e38, 3e38]])


def test_json_has_all_statistics():
    data = report(varied(), reference_scores=ReferenceScores(0.0, 10.0, "a test"))
    content = json.loads(data.to_json())
    assert content["returns"] == pytest.approx(data.return_statistics)
    assert content["findings"] == data.findings
    assert content["actions"]["frequencies"] == [[0.5, 0.5]]
    assert content["reference_scores"]["maximum"] == 10


def test_the_table_shows_the_statistics():
    text = str(report(varied(), reference_scores=ReferenceScores(0.0, 10.0, "a test")))
    for part in ("test/small-v0", "12, 54", "100% terminated", "0: 50.0%, 1: 50.0%", "a test"):
        assert part in text


def test_markup_in_a_file_is_printed_as_it_is():
    hostile = spaces.Dict({"[/x]": spaces.Discrete(2), "[bold]": spaces.Discrete(2)})
    scores = ReferenceScores(0.0, 1.0, "[/source]")
    text = str(report(varied(), observation_space=hostile, reference_scores=scores))
    for part in ("[/x]", "[bold]", "[/source]"):
        assert part in text


@pytest.mark.parametrize(
    ("env_ids", "used", "rows"),
    [
        ((), None, ["unknown"]),
        (("A-v1",), EnvSpec("A-v1", max_episode_steps=9), ["A-v1, at most 9 steps"]),
        (("A-v1",), EnvSpec("A-v2"), ["A-v1", "A-v2"]),
        (("A-v1", "A-v2"), None, ["A-v1, A-v2", "unknown"]),
    ],
    ids=["unknown", "same", "other", "joined"],
)
def test_the_environment_for_evaluations_has_a_row_if_it_differs(env_ids, used, rows):
    lines = str(report(varied(), env_ids=env_ids, eval_env_spec=used)).splitlines()
    assert [line.split("│")[2].strip() for line in lines if "environment" in line] == rows


def test_control_characters_of_a_file_are_escaped():
    data = report(varied(), dataset_ids=("test/\x1b[31mred-v0",), env_ids=("\x1b]0;title\x07-v0",))
    text = str(data)
    assert not set(text) & set("\x1b\x07")
    assert "\\x1b[31mred" in text
    assert repr(data).isprintable()


@pytest.mark.parametrize(
    ("returns", "rows"),
    [([3.0] * 4, ["3 4"]), ([1.0, 2.0, 2.0], ["1 to 1.5 1", "1.5 to 2 2"])],
    ids=["equal", "two values"],
)
def test_the_histogram_has_a_row_for_each_bin(returns, rows):
    lines = str(report([[each] for each in returns]).histogram("#")).splitlines()
    assert [" ".join(line.replace("#", "").split()) for line in lines[2:]] == rows
    assert max(line.count("#") for line in lines) == 36


def test_a_histogram_of_many_returns_counts_every_episode():
    returns = np.random.default_rng(0).normal(size=1000) * 1e6
    lines = str(report([[each] for each in returns]).histogram()).splitlines()[2:]
    assert len(lines) == 12
    assert sum(int(line.split()[3].replace(",", "")) for line in lines) == 1000


@pytest.mark.parametrize("returns", [[5.0, 5.0], [0.0, 1e6, -3.0]], ids=["equal", "different"])
def test_the_plot_is_a_png_that_replaces_a_link(tmp_path, returns):
    (tmp_path / "other").write_text("unchanged")
    (tmp_path / "plot.png").symlink_to(tmp_path / "other")
    scores = ReferenceScores(0.0, 10.0, "a test")
    report([[each] for each in returns], reference_scores=scores).plot(tmp_path / "plot.png")
    assert Image.open(tmp_path / "plot.png").size == (840, 540)
    assert (tmp_path / "other").read_text() == "unchanged"
