"""Tests of the findings about datasets: each is found where it applies, and only there."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rlxf.data.findings import FINDINGS, missing_ends, warn_of_flattened_images, warn_of_returns
from tests.data.reports import report, trajectories, varied

NAMED = {
    "env_ids": ("CartPole-v1",),
    "env_spec": EnvSpec("CartPole-v1", max_episode_steps=500),
    "eval_env_spec": EnvSpec("CartPole-v1", max_episode_steps=500),
}
TEXT = spaces.Dict({"mission": spaces.Text(5), "view": spaces.Box(-1.0, 1.0, (3,))})
UNUSED = {"actions": np.arange(54) % 2, "action_space": spaces.Discrete(3, start=1)}
CONSTANT = {"actions": np.ones((54, 1), np.float32), "action_space": spaces.Box(-1.0, 1.0, (1,))}
ROUNDED = np.stack(
    [np.linspace(0, 1e-9, 54), 9 + np.arange(54) % 2 * 1e-6, np.full(54, 9)], axis=1, dtype="f4"
)
"""Observations of a small scale, of a variation lost in their rounding, and without variation."""
HALF = np.stack([np.linspace(-1, 1, 54), np.full(54, 0.5)], axis=1)


def found(rewards=None, **changes):
    """Return name -> sentence of the findings about data that have none without the changes."""
    data = report(varied() if rewards is None else rewards, **NAMED | changes)
    sentences = {find.__name__: find(data) for find in FINDINGS}
    assert data.findings == [sentence for sentence in sentences.values() if sentence]
    return {name: sentence for name, sentence in sentences.items() if sentence}


def test_usual_data_have_no_findings():
    assert found() == {}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (3, 40, 40), np.uint8),
        spaces.Box(0, 1, (3, 7, 7), np.float32),
        spaces.Box(0, 1, (40, 40), np.float32),
        spaces.Box(0, 1, (40, 3, 40), np.float32),
    ],
    ids=str,
)
def test_images_and_small_arrays_are_not_flattened_images(space):
    assert "flattened_images" not in found(observation_space=space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_flattened_images(trajectories(varied(), observation_space=space))


@pytest.mark.parametrize(
    ("name", "sentence", "changes"),
    [
        ("equal_returns", "all 12 episodes have the return 4.5, so", {"rewards": [[1.5, 3.0], [4.5]] * 6}),
        ("missing_ends", "12 of 12 episodes end neither", {"terminated": np.zeros(12, bool)}),
        ("few_episodes", "the number of episodes is 9:", {"rewards": varied(9)}),
        (
            "no_terminations",
            "no episode is terminated or truncated: a critic refuses",
            {"terminated": np.zeros(12, bool)},
        ),
        (
            "no_terminations",
            "no episode terminates: a critic .* bootstraps",
            {"terminated": np.zeros(12, bool), "truncated": np.ones(12, bool)},
        ),
        (
            "uniform_rewards",
            "the reward is 2 in every step",
            {"rewards": [[2.0] * (1 + n) for n in range(12)]},
        ),
        ("uniform_rewards", "are sparse, nearly all are 0", {"rewards": [[0.0] * 40, [1.0]] * 6}),
        (
            "uniform_rewards",
            "the reward is -1 in nearly every step: .* -1 times the number of remaining steps, so a target",
            {"rewards": [[-1.0] * (39 + n) + [0.0] for n in range(12)]},
        ),
        ("constant_actions", "all actions are equal", CONSTANT),
        (
            "constant_actions",
            r"1 of 2 action components are constant \(1, counted from 0\)",
            {"actions": HALF, "action_space": spaces.Box(-1.0, 1.0, (2,))},
        ),
        (
            "narrow_actions",
            "the action components 0, counted from 0, use less than 5% of .*: component 0 has values from "
            r"-1 to 1, and the bounds -25 and 25\. Agents scale .* of the data\. Give the dataset",
            {"actions": HALF, "action_space": spaces.Box(-25.0, 25.0, (2,))},
        ),
        ("unused_actions", "the actions 3 never occur", UNUSED),
        (
            "unused_actions",
            "some values of the action components 1, counted",
            {"actions": np.arange(108).reshape(54, 2) // 2 % 2, "action_space": spaces.MultiDiscrete([2, 3])},
        ),
        (
            "nearly_constant_features",
            "the observation features 1, counted from 0, vary by no more",
            {"observations": ROUNDED},
        ),
        ("lossy_images", "images are stored as JPEG", {"lossy_images": True}),
        ("text_observations", r"observation\['mission'\] is text", {"observation_space": TEXT}),
        (
            "flattened_images",
            r"shape \(3, 40, 40\) and dtype float32 are flattened to 4,800 numbers",
            {"observation_space": spaces.Box(0, 255, (3, 40, 40), np.float32)},
        ),
        ("no_environment", "do not name their environment", {"env_ids": (), "eval_env_spec": None}),
        (
            "no_environment",
            r"have different descriptions of their environments \(CartPole-v1\): evaluations",
            {"eval_env_spec": None},
        ),
        ("other_versions", "CartPole-v0, CartPole-v1: dynamics", {"env_ids": ("CartPole-v0",)}),
        ("long_episodes", "up to 6 steps, but the time limit of the environment is 5", {"steps": 5}),
        (
            "many_time_steps",
            "the longest episode has 10,001 steps: .* with episode_length=10000",
            {"rewards": [*varied(), np.sin(np.arange(10_001))]},
        ),
    ],
)
def test_findings_name_the_property_of_the_data(name, sentence, changes):
    if steps := changes.pop("steps", None):
        changes["eval_env_spec"] = EnvSpec("CartPole-v1", max_episode_steps=steps)
    rewards = changes.pop("rewards", None)
    findings = found(rewards, **changes)
    assert name in findings
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(findings[name])


def test_a_single_episode_and_rewards_of_zero_are_named():
    assert found([[1.0, 2.0]])["equal_returns"].startswith("the only episode has the return 3, so")
    without_rewards = found([[0.0], [0.0]])["equal_returns"]
    assert "check that the rewards were recorded, since a critic refuses data" in without_rewards


def test_returns_that_differ_by_rounding_are_equal():
    rewards = [[0.7], [0.7 + 1e-7]]
    assert len(set(trajectories(rewards).returns.tolist())) > 1
    assert "equal_returns" in found(rewards)
    assert "equal_returns" not in found([[0.7], [0.7001]])


def test_only_episodes_without_an_end_are_counted():
    flags = np.array([True, False, False]), np.array([False, True, False])
    data = trajectories([[1.0], [2.0], [3.0]], terminated=flags[0], truncated=flags[1])
    assert missing_ends(data).startswith("1 of 3 episodes end neither")


def test_warnings_are_attributed_to_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_returns(trajectories([[1.0], [1.0]], terminated=np.zeros(2, bool)), True)
    assert [each.filename for each in caught] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_returns(trajectories([[1.0], [2.0]]), True)
        warn_of_returns(trajectories([[1.0], [1.0]]), False)
