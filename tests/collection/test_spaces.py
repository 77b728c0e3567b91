"""What is recorded is what the environment showed, whatever its spaces."""

from itertools import pairwise

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from rlxf.collection import collect
from tests.datasets import stacked
from tests.envs.worlds import ACTIONS, OBSERVATIONS

ID = "test/spaces-v0"
RECORDABLE = [name for name in OBSERVATIONS if name != "other words"]


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


def world(observations="nested Dict", actions="Discrete"):
    return gymnasium.make("rlxf-test/AnySpace-v0", observations=observations, actions=actions)


def played_again(env, episodes, seed):
    """The observations of recorded episodes, when their actions are taken again."""
    for number, episode in enumerate(episodes):
        shown = [env.reset(seed=seed if number == 0 else None)[0]]
        for action in episode.actions:
            shown.append(env.step(action)[0])
        yield shown


@pytest.mark.parametrize("observations", RECORDABLE)
def test_minari_gives_back_the_spaces_and_all_that_was_shown(observations):
    collect(None, world(observations), ID, episodes=3, seed=5)
    dataset, env = minari.load_dataset(ID), world(observations)
    assert dataset.observation_space == env.observation_space
    assert dataset.env_spec.kwargs["observations"] == observations
    episodes = list(dataset.iterate_episodes())
    for episode, shown in zip(episodes, played_again(env, episodes, seed=5), strict=True):
        assert as_rows(env.observation_space, episode.observations, shown)


def as_rows(space, recorded, shown):
    """Whether the recorded arrays hold what was shown; text is a list there, a tuple in a batch."""
    if isinstance(space, gymnasium.spaces.Dict):
        return all(as_rows(part, recorded[key], [o[key] for o in shown]) for key, part in space.items())
    if isinstance(space, gymnasium.spaces.Tuple):
        parts = enumerate(space)
        return all(as_rows(part, recorded[i], [o[i] for o in shown]) for i, part in parts)
    if isinstance(space, gymnasium.spaces.Text):
        return recorded == shown
    return data_equivalence(np.asarray(recorded), np.asarray(stacked(space, shown)), exact=True)


@pytest.mark.parametrize("actions", ACTIONS)
def test_actions_are_recorded_as_they_were_taken(actions):
    dataset = collect(None, "rlxf-test/AnySpace-v0", ID, episodes=4, n_envs=2)
    assert dataset.total_steps == 16
    dataset = collect(None, world(actions=actions), "test/actions-v0", episodes=4)
    assert dataset.action_space == ACTIONS[actions]
    for episode in dataset.iterate_episodes():
        assert all(ACTIONS[actions].contains(action) for action in episode.actions)
        np.testing.assert_array_equal(episode.actions.reshape(4, -1).sum(axis=1), episode.rewards)


def test_episodes_side_by_side_are_whole_and_name_their_environment():
    dataset = collect(None, "rlxf-test/AnySpace-v0", ID, episodes=6, n_envs=3)
    assert dataset.env_spec.id == "rlxf-test/AnySpace-v0"
    assert not dataset.env_spec.additional_wrappers
    ends = [(bool(e.terminations[-1]), bool(e.truncations[-1])) for e in dataset.iterate_episodes()]
    assert ends == [(True, False)] * 3 + [(False, True)] * 3
    positions = [episode.observations["body"]["position"] for episode in dataset.iterate_episodes()]
    assert all(len(rows) == 5 for rows in positions)
    assert all((one[-1] != other[0]).any() for one, other in pairwise(positions))


def test_text_that_minari_cannot_keep_is_refused(minari_root):
    with pytest.raises(TypeError, match=r"Minari keeps no .*FilterObservation"):
        collect(None, world("other words"), ID, episodes=2)
    assert list(minari_root.iterdir()) == []
