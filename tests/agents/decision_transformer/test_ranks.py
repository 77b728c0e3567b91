"""Tests of data-parallel training: two processes give the results of a single process."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import Compressive, Routing, TransformerSpec
from rlxf.training import CheckpointFolder, CheckpointWriter, NumericalError, linear, stop_on_signals
from rlxf.training.distributed import process_group
from tests.agents.decision_transformer.worlds import ACTIONS, CORES, SIZES, small_agent, some_trajectories
from tests.ranks import on_ranks

STEPS = 4


def agent(**changes):
    """Return an agent whose Adam epsilon of 1e-3 prevents large steps for gradients of rounding errors."""
    settings = {"learning_rate": linear(0.01, 0.001), "warmup_updates": 0, "core": CORES["memory"]}
    built = small_agent(**(settings | changes))
    for group in built.optimizer.param_groups:
        group["eps"] = 1e-3
    return built


def weights(learner):
    return {name: x.numpy().copy() for name, x in learner.policy.state_dict().items()}


def gradients(learner):
    learner.learn(1)
    return {name: x.grad.numpy() for name, x in learner.policy.named_parameters() if x.grad is not None}


def learned(steps=STEPS, resume_from=None, **changes):
    trained = agent(**changes).learn(steps, resume_from=resume_from)
    return weights(trained), trained.generator.get_state().tolist(), len(trained.logger.output_formats)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "core",
    [
        *("memory", "ALiBi and a window", "Mamba-2 below attention"),
        *("attention sinks", "memory tokens", "retention valve"),
    ],
)
def test_gradients_of_two_ranks_equal_those_of_one(core):
    expected = gradients(agent(core=CORES[core]))
    for actual in on_ranks(2, lambda: gradients(agent(core=CORES[core]))):
        assert_close(actual, expected)


def test_weights_of_two_ranks_equal_those_of_one():
    expected, order, _ = learned()
    one, other = on_ranks(2, lambda: learned(verbose=1))
    assert_close(one[0], expected)
    assert (one[1], other[1]) == (order, order)
    assert (one[2] > 0, other[2]) == (True, 0)  # only rank 0 logs
    assert all((one[0][name] == other[0][name]).all() for name in expected)


def test_micro_batches_of_two_ranks_give_the_gradients_of_one_batch():
    expected = gradients(agent())
    for actual in on_ranks(2, lambda: gradients(agent(gradient_accumulation_steps=3))):
        assert_close(actual, expected)


def test_random_training_agrees_between_ranks():
    changes = {"core": CORES["published with dropout"], "objective": MaximumEntropy()}
    data = some_trajectories(action_space=ACTIONS["Box"])
    one, other = on_ranks(2, lambda: learned(trajectories=data, **changes))
    assert all((one[0][name] == other[0][name]).all() for name in one[0])
    assert any((learned(trajectories=data, **changes)[0][name] != one[0][name]).any() for name in one[0])


def test_ranks_agree_if_one_has_no_compressed_memory():
    """Each rank processes a single window, most of whose episodes are too short for a compressed block."""
    data = some_trajectories(lengths=(14, *[1] * 9))
    changes = {"core": TransformerSpec(**SIZES, memory=Compressive(4, 4, 2)), "batch_size": 2}
    one, other = on_ranks(2, lambda: learned(8, trajectories=data, **changes))
    assert all((one[0][name] == other[0][name]).all() for name in one[0])


class SignalRankOne(BaseCallback):
    """Callback that sends a signal to one of the processes."""

    def _on_step(self):
        if self.num_timesteps == 2 and process_group().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return True


def interrupted(folder):
    with stop_on_signals() as stop:
        saving = CheckpointWriter(CheckpointFolder(folder), every_seconds=0, stop=stop)
        learner = agent().learn(STEPS, [SignalRankOne(), saving])
    process_group().barrier()
    return learner.num_timesteps, saving.stopped, int(stop.signal)


@pytest.mark.thorough
def test_a_signal_to_one_rank_stops_both_and_one_or_two_resume(tmp_path):
    expected, order, _ = learned()
    assert on_ranks(2, lambda: interrupted(tmp_path)) == [(2, True, signal.SIGTERM)] * 2
    assert len(CheckpointFolder(tmp_path).files()) == 2
    alone = learned(resume_from=tmp_path)
    for actual, drawn, _ in [alone, *on_ranks(2, lambda: learned(resume_from=tmp_path))]:
        assert_close(actual, expected)
        assert drawn == order


def test_two_ranks_resume_the_checkpoint_of_one(tmp_path):
    saving = CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0)
    expected = weights(agent().learn(STEPS, saving))
    CheckpointFolder(tmp_path).file(STEPS).unlink()
    for actual, _, _ in on_ranks(2, lambda: learned(resume_from=tmp_path)):
        assert_close(actual, expected)


def refusals():
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    routing = replace(CORES["published"], kernel=Routing(2))
    for call in (
        lambda: agent(batch_size=7),
        lambda: agent(core=routing).learn(1),
        lambda: agent(trajectories=data).learn_online(1, 1.0),
        lambda: agent(trajectories=data).distill(agent(), 1),
        lambda: MaskedPretraining(data),
    ):
        try:
            call()
        except ValueError as error:
            yield str(error)


def test_unsupported_methods_are_refused_under_torchrun():
    for division, kernel, *others in on_ranks(2, lambda: list(refusals())):
        assert "batch_size is 7 in total, which is not divisible by the 2 processes" in division
        assert "updates its centroids from the tokens of one process" in kernel
        names = ("learn_online", "distill", "MaskedPretraining")
        assert others == [
            f"{name} supports a single process, got 2: start it without torchrun" for name in names
        ]


def test_nan_on_one_rank_stops_both():
    data = some_trajectories()
    large_rewards = some_trajectories(
        rewards=np.full_like(data.rewards, 1e30), return_to_go=data.return_to_go
    )

    def work():
        learner = agent(trajectories=large_rewards)
        before = weights(learner)
        if process_group().rank == 1:
            learner.policy.tokens.return_scale = float("nan")
        try:
            learner.learn(1)
        except NumericalError as error:
            same = all((before[name] == x).all() for name, x in weights(learner).items())
            return same, str(error)

    (one_same, one), (other_same, other) = on_ranks(2, work)
    assert one_same
    assert other_same
    assert one == "update 1: a number is not finite in another process; see its message"
    assert other.startswith("update 1: the tokens of the transformer are not finite in row 0 of the batch")
