"""Tests of training in environments of tensors on an accelerator: waits, results and errors."""

from functools import partial

import pytest
from gymnasium.vector import AutoresetMode

from tests.devices.tensor_envs import deferring, equal_trainings, fault, fault_of_outputs, tmaze_waits


@pytest.mark.parametrize("n_envs", [2, 64])
def test_a_step_in_which_no_episode_ends_does_not_wait(n_envs, on_device):
    steps, minibatches = on_device(tmaze_waits, AutoresetMode.SAME_STEP, n_envs)
    assert {count for ends, count in steps if not ends} == {0}
    assert {count for ends, count in steps if ends} == {1}
    assert set(minibatches) == {1}


def test_steps_with_a_later_reset_wait_for_the_ends_of_episodes(on_device):
    steps, _ = on_device(tmaze_waits, AutoresetMode.NEXT_STEP, 2)
    assert {count for ends, count in steps if not ends} == {1}
    assert {count for ends, count in steps if ends} == {2}


@pytest.mark.parametrize("name", ["T-Maze", "scripts"])
def test_weights_statistics_and_callbacks_equal_those_with_checks_in_each_step(name, on_device):
    """The agents, episodes, infos and done flags are compared bit for bit."""
    assert on_device(equal_trainings, name)


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_invalid_numbers_are_reported_before_the_rollout_is_used(what, on_device):
    message, rollouts, learned = on_device(fault, what)
    assert f"FaultyEnvironmentError: {what} of environment 1 is not finite at its step 3" in message
    assert (rollouts, learned) == (0, False)


@pytest.mark.parametrize("end", [{"fails_at": 6}, {"stops_at": 5}])
def test_invalid_numbers_are_reported_if_the_rollout_ends_early(end, on_device):
    """An error of a later step does not replace theirs, and a callback that stops does not hide them."""
    message, *_ = on_device(partial(fault, "observation", **end))
    assert "FaultyEnvironmentError: observation of environment 1 is not finite at its step 3" in message


def test_an_end_without_last_observations_is_reported(on_device):
    message, rollouts, learned = on_device(fault, "final_obs")
    assert "SAME_STEP but no infos['final_obs']" in message
    assert (rollouts, learned) == (0, False)


def test_outputs_that_are_not_finite_are_reported_with_their_first_step(on_device):
    message = on_device(fault_of_outputs)
    assert message.startswith("NumericalError: step 2 of the rollout: ")
    assert "the memory before the step contains NaN" in message


def test_choices_are_checked_in_each_step(on_device):
    assert on_device(deferring) == {"Box": True, "Dict of Box": True, "Discrete": False, "Dict": False}
