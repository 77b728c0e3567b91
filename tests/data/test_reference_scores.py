"""Tests of reference scores and their table."""

import minari
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from rlxf.data import ReferenceScores, reference_scores, scores_from_table
from rlxf.data.reference_scores import TABLE
from tests.datasets import record_random

HOPPER = EnvSpec("Hopper-v5")


def test_random_policy_scores_0_and_expert_scores_100():
    np.testing.assert_allclose(
        ReferenceScores(-20, 180, "").normalize([-20, 80, 180, 380]), [0, 50, 100, 200]
    )


def test_scores_are_100_times_those_of_minari(minari_root):
    dataset = record_random(env="CartPole-v1", ref_min_score=9.5, ref_max_score=475.0)
    scores = reference_scores(dataset.storage.metadata, dataset.env_spec)
    returns = np.array([9.5, 100.0, 600.0])
    np.testing.assert_allclose(scores.normalize(returns), 100 * minari.get_normalized_score(dataset, returns))


KITCHEN_TASKS = ["microwave", "kettle", "light switch", "slide cabinet"]
D4RL_ARGUMENTS = {
    "AntMaze": {"continuing_task": False, "reward_type": "sparse", "maze_map": [["r", "g"]]},
    "FrankaKitchen": {"tasks_to_complete": KITCHEN_TASKS},
    "AdroitHandPen": {"reward_type": "dense"},
}


# Random and expert returns of each family, as published in D4RL's normalized results.
@pytest.mark.parametrize(
    ("env_id", "low", "high"),
    [
        ("HalfCheetah-v5", -280.18, 12135.0),
        ("Hopper-v4", -20.27, 3234.3),
        ("Walker2d-v5", 1.63, 4592.3),
        ("Ant-v5", -325.6, 3879.7),
        ("AdroitHandPen-v1", 96.26, 3076.83),
        ("AdroitHandHammer-v1", -274.86, 12794.13),
        ("AdroitHandRelocate-v1", -6.43, 4233.88),
        ("AdroitHandDoor-v1", -56.51, 2880.57),
        ("AntMaze_UMaze-v4", 0, 1),
        ("AntMaze_Large_Diverse_GR-v5", 0, 1),
        ("FrankaKitchen-v1", 0, 4),
    ],
)
def test_the_table_contains_the_scores_of_d4rl(env_id, low, high):
    scores = scores_from_table(env_id, D4RL_ARGUMENTS.get(env_id.partition("_")[0].partition("-")[0]))
    assert (round(scores.minimum, 2), round(scores.maximum, 2)) == (low, high)
    assert "D4RL" in scores.source
    assert "version 2" in scores.source


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPole-v1",
        "AdroitHandPenSparse-v1",
        "AntMaze_UMazeDense-v4",
        "AntMaze_Large_Diverse_GRDense-v5",
        "Humanoid-v5",
        "HopperHard-v1",
    ],
)
def test_unlisted_environments_have_no_scores(env_id):
    assert scores_from_table(env_id) is None


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("AntMaze_UMaze-v4", {}),
        ("AntMaze_UMaze-v4", {"continuing_task": True, "reset_target": True}),
        ("AntMaze_UMaze-v4", {"continuing_task": False, "reward_type": "dense"}),
        ("AntMaze_UMaze-v4", {"continuing_task": False, "frame_skip": 10}),
        ("FrankaKitchen-v1", {}),
        ("FrankaKitchen-v1", {"tasks_to_complete": KITCHEN_TASKS, "remove_task_when_completed": False}),
        ("Hopper-v5", {"forward_reward_weight": 100}),
        ("Hopper-v5", {"terminate_when_unhealthy": False}),
        ("Hopper-v5", {"frame_skip": 8}),
        ("Ant-v5", {"xml_file": "other.xml"}),
        ("AdroitHandPen-v1", {"reward_type": "sparse"}),
    ],
)
def test_arguments_that_change_returns_have_no_scores(env_id, kwargs):
    assert scores_from_table(env_id, kwargs) is None
    assert reference_scores({"dataset_id": "a/b-v0"}, EnvSpec(env_id, kwargs=kwargs)) is None


def test_every_row_has_a_source():
    assert all("arXiv" in row.source and row.maximum > row.minimum for row in TABLE.values())


def test_scores_of_the_dataset_take_precedence():
    own = {"dataset_id": "a/b-v0", "ref_min_score": 1.0, "ref_max_score": 2.0}
    assert reference_scores(own, HOPPER) == ReferenceScores(1.0, 2.0, "metadata of a/b-v0")


def test_the_table_is_the_fallback_for_a_known_environment():
    assert reference_scores({"dataset_id": "a/b-v0"}, HOPPER) == scores_from_table("Hopper-v5")
    assert reference_scores({"dataset_id": "a/b-v0"}, None) is None


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (float("nan"), 1), (0, float("inf")), (0, 1e-310)])
def test_invalid_scores_are_refused(low, high):
    with pytest.raises(ValueError, match=f"got {low} and {high} from here"):
        ReferenceScores(low, high, "here")


@pytest.mark.parametrize("own", [(2.0, 1.0), (float("nan"), 1.0), (1.0, 1.0), ("low", "high"), (0, 10**400)])
def test_invalid_scores_of_a_dataset_are_ignored_with_a_warning(own):
    metadata = {"dataset_id": "a/b-v0", "ref_min_score": own[0], "ref_max_score": own[1]}
    with pytest.warns(UserWarning, match="the reference scores of a/b-v0 are ignored: "):
        assert reference_scores(metadata, HOPPER) == scores_from_table("Hopper-v5")
