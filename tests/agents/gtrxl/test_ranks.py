"""Two processes with half of the environments each train like one process with all of them."""

import copy
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import evaluate
from rlxf.agents.common.weights import sync_normalization_statistics
from rlxf.attention import CALM, KNN, Compressive, Full, Performer, RoPE, Window
from rlxf.envs import FaultyEnvironmentError
from rlxf.envs.action_replay import ActionReplay
from rlxf.training import CheckpointFolder, CheckpointWriter, read_archive, stop_on_signals
from rlxf.training.distributed import process_group
from tests.agents.gtrxl.test_resume import Lively
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    GOES_ON,
    MEMORY_CORES,
    RECURRENT_CORES,
    TERMINATED,
    VECTOR,
    scripts,
    small_agent,
    small_core,
)
from tests.ranks import on_ranks

ENVS, STEPS = 4, 8
ROLLOUT = ENVS * STEPS


def lively(action_space=ACTIONS["Discrete"], kind=Lively, observation_space=VECTOR):
    """Return this process's share of four environments with random episode ends."""

    def make():
        return ActionReplay(Monitor(kind((), *copy.deepcopy((observation_space, action_space)))))

    return DummyVecEnv([make] * process_group().split_total("n_envs", ENVS))


def agent(env=None, **changes):
    """Return an agent whose Adam damps gradients below 1e-3, so that rounding errors are not amplified."""
    settings = {"learning_rate": 3e-3, "n_envs": ENVS, "n_steps": STEPS, "n_epochs": 1}
    settings["policy_kwargs"] = {"optimizer_kwargs": {"eps": 1e-3}}
    return small_agent(lively() if env is None else env, **(settings | changes))


def arrays(tensors):
    return {name: x.detach().numpy().copy() for name, x in tensors if x is not None}


def gradients(**changes):
    learner = agent(batch_size=ROLLOUT, **changes).learn(ROLLOUT)
    return arrays((name, x.grad) for name, x in learner.policy.named_parameters())


class Lines(BaseCallback):
    """Record the episode and update metrics that SB3 logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        names = ("train/loss", "train/approx_kl", "train/explained_variance")
        episodes = [(round(info["r"], 4), info["l"]) for info in self.model.ep_info_buffer]
        self.lines.append((episodes, [self.logger.name_to_value[name] for name in names]))


def learned(rollouts=2, callbacks=(), resume_from=None, **changes):
    learner, lines = agent(**changes), Lines()
    learner.learn(rollouts * ROLLOUT, [*callbacks, lines], log_interval=99, resume_from=resume_from)
    return {
        "weights": arrays(learner.policy.state_dict().items()),
        "order": learner.order.get_state().tolist(),
        "drawn": torch.get_rng_state().tolist(),
        "returns": [float(learner.policy.value_net.mean), float(learner.policy.value_net.variance)],
        "done": [learner.num_timesteps, learner._n_updates],
        "lines": lines.lines,
    }


def assert_close(actual, expected, names=("order", "drawn", "done")):
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(actual["weights"][name], values, rtol=0, atol=1e-5, err_msg=name)
    assert actual["returns"] == pytest.approx(expected["returns"], abs=1e-4)
    for name in names:
        assert actual[name] == expected[name], name


def test_environments_by_id_are_divided_among_processes():
    def work():
        learner = agent("CartPole-v1")
        learner.set_env("CartPole-v1")
        return learner.env.reset().tolist()

    expected = work()
    first, second = on_ranks(2, work)
    assert first + second == expected


def test_calibration_is_refused_in_several_processes():
    def work():
        learner = agent(core=replace(small_core(), depth=CALM()))
        with pytest.raises(ValueError, match="calibrate"):
            learner.calibrate("CartPole-v1")

    assert on_ranks(2, work) == [None, None]


def test_two_processes_have_gradients_of_one():
    def work():
        noise = {"use_sde": True, "sde_sample_freq": 3}
        return {name: gradients(env=lively(ACTIONS[name])) for name in ("Discrete", "Box", "MultiBinary")} | {
            "Box with state-dependent noise": gradients(env=lively(ACTIONS["Box"]), **noise)
        }

    expected = work()
    for actual in on_ranks(2, work):
        for actions, of_parameters in expected.items():
            assert actual[actions].keys() == of_parameters.keys()
            for name, values in of_parameters.items():
                np.testing.assert_allclose(actual[actions][name], values, rtol=0, atol=1e-6, err_msg=name)


SETTINGS = {
    "default": {"n_epochs": 3},
    "micro-batches": {"gradient_accumulation_steps": 2},
    "few segments in a minibatch": {"batch_size": 4, "recompute_memory": True},
    "a bound on the KL": {"target_kl": 1e-3, "n_epochs": 9},
    "a memory of neighbors": {"core": replace(small_core(), memory=KNN(2, 12, 4), pattern=Window(3))},
    "recurrence": {"core": RECURRENT_CORES["GatedDeltaNet"]},
    "recurrence below attention": {"core": RECURRENT_CORES["Mamba-2 below attention"]},
    **{name: {"core": core} for name, core in MEMORY_CORES.items()},
    "random features": {"core": replace(small_core(), kernel=Performer(), position=RoPE())},
}


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_two_processes_have_weights_and_logs_of_one(changes):
    expected = learned(**changes)
    one, other = on_ranks(2, lambda: learned(**changes))
    assert_close(one, expected)
    assert all((one["weights"][name] == other["weights"][name]).all() for name in one["weights"])
    for (episodes, logged), (others, expected_lines) in zip(one["lines"], expected["lines"], strict=True):
        assert episodes == others
        assert logged == pytest.approx(expected_lines, rel=1e-3, abs=1e-5)


def half_brief():
    """Return this process's share of four environments; episodes of the last two have one step."""
    numbers = process_group().row_indices(process_group().split_total("n_envs", ENVS))
    return scripts([[TERMINATED if number >= 2 else GOES_ON] for number in numbers])


def compressing(rollouts):
    """Return the last gradients, the weights, and the penalty of the last rollout."""
    core = replace(small_core(), memory=Compressive(4, 4, 2), pattern=Full())
    changes = {"core": core, "n_steps": 2 * STEPS, "batch_size": 2 * ROLLOUT, "max_grad_norm": 1e6}
    learner = agent(half_brief(), **changes).learn(rollouts * 2 * ROLLOUT)
    weights = dict(learner.policy.named_parameters())
    gradients = arrays((name, x.grad) for name, x in weights.items())
    return gradients, arrays(weights.items()), learner.logger.name_to_value["train/penalty"]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("rollouts", [1, 3])
def test_process_without_compressed_blocks(rollouts):
    (_, one, penalty), (_, other, other_penalty) = on_ranks(2, lambda: compressing(rollouts))
    assert all((one[name] == other[name]).all() for name in one)
    assert penalty == other_penalty > 0


def test_other_weights_train_as_in_one_process():
    """The compression loss of a process is weighted by its steps, not by the steps that attend to a block."""
    expected, *_ = compressing(1)
    for actual, *_ in on_ranks(2, lambda: compressing(1)):
        assert actual.keys() == expected.keys()
        for name in (name for name in expected if "compression" not in name):
            np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=1e-6, err_msg=name)


PARTS = spaces.Dict({"vector": VECTOR, "number": spaces.Discrete(4)})
NORMALIZED = {
    "all": (VECTOR, {}),
    "observations alone": (VECTOR, {"norm_reward": False}),
    "rewards alone": (VECTOR, {"norm_obs": False}),
    "a part of the observation": (PARTS, {"norm_obs_keys": ["vector"]}),
}


def statistics(env):
    """Return all statistics of a VecNormalize, concatenated."""
    observed = vars(env).get("obs_rms", {})
    kept = [*(observed.values() if isinstance(observed, dict) else [observed]), env.ret_rms]
    return [float(x) for each in kept for x in (*np.ravel(each.mean), *np.ravel(each.var), each.count)]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("space", "settings"), NORMALIZED.values(), ids=NORMALIZED)
def test_normalization_uses_statistics_of_all_processes(space, settings):
    policy = "MlpGTrXLPolicy" if space is VECTOR else "MultiInputGTrXLPolicy"

    def work():
        env = VecNormalize(lively(observation_space=space), **settings)
        return learned(1, env=env, policy=policy) | {"returns": statistics(env)}

    expected = work()
    for actual in on_ranks(2, work):
        assert_close(actual, expected)


def test_statistics_of_each_part_of_an_observation_are_those_of_all_processes():
    def work():
        env = VecNormalize(lively(observation_space=PARTS), norm_obs_keys=["vector"])
        sync_normalization_statistics(env, process_group())
        env.obs_rms["vector"].update(np.full((2, *VECTOR.shape), process_group().rank))
        return env.obs_rms["vector"].mean

    for mean in on_ranks(2, work):
        np.testing.assert_allclose(mean, 0.5, atol=1e-3)


class Signalled(BaseCallback):
    """Send a signal to one of the processes during a rollout."""

    def _on_step(self):
        if (
            self.num_timesteps == ROLLOUT + ENVS * 3
            and process_group().rank == process_group().world_size - 1
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        return True


def cut(folder, env, **changes):
    with stop_on_signals() as stop:
        saving = CheckpointWriter(CheckpointFolder(folder), every_seconds=99, stop=stop)
        actual = learned(env=env(), rollouts=3, callbacks=[saving, Signalled()], **changes)
    process_group().barrier()
    return len(actual["lines"])


def normalized():
    return VecNormalize(lively())


MOVED = {
    "played again": (normalized, {}),
    "give a state": (lambda: "rlxf/TMaze-v0", {}),
    "recurrence": (lively, {"core": RECURRENT_CORES["LSTM"]}),
    "recurrence below attention": (lively, {"core": RECURRENT_CORES["Mamba-2 below attention"]}),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("env", "changes"), MOVED.values(), ids=MOVED)
def test_episodes_move_between_world_sizes(env, changes, tmp_path):
    """Two processes resume the run of one process, and one or two resume that of two."""
    expected = learned(env=env(), rollouts=3, **changes)
    left = {
        "one": [cut(tmp_path / "one", env, **changes)],
        "two": on_ranks(2, lambda: cut(tmp_path / "two", env, **changes)),
    }
    assert left == {"one": [3], "two": [3, 3]}  # the third rollout begins, and stops
    for name in left:
        assert [file.name for file in CheckpointFolder(tmp_path / name).files()] == [
            f"step-{2 * ROLLOUT:012d}.zip"
        ]

    def by_two():
        return [learned(env=env(), rollouts=3, resume_from=tmp_path / name, **changes) for name in left]

    actual = [learned(env=env(), rollouts=3, resume_from=tmp_path / "two", **changes)]
    for each in [*actual, *(each for both in on_ranks(2, by_two) for each in both)]:
        assert_close(each, expected)


def test_file_is_independent_of_number_of_processes(tmp_path):
    def work(folder):
        learned(rollouts=1, callbacks=[CheckpointWriter(CheckpointFolder(folder))])

    work(tmp_path / "one")
    on_ranks(2, lambda: work(tmp_path / "two"))
    one, two = (CheckpointFolder(tmp_path / name).newest() for name in ("one", "two"))
    first, second = read_archive(one), read_archive(two)
    assert first.documents["agent"]["settings"] == second.documents["agent"]["settings"]
    assert first.documents["run"]["environment"].keys() == second.documents["run"]["environment"].keys()
    for group, tensors in first.tensors.items():
        shapes = {name: x.shape for name, x in tensors.items()}
        assert shapes == {name: x.shape for name, x in second.tensors[group].items()}, group


class Forgetful(Lively):
    """Environment whose replayed episode differs in one of the processes."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation + process_group().rank / 2, info


def test_all_processes_start_new_episodes_if_one_must(tmp_path):
    """`VecNormalize` communicates in every reset: a process alone in it would block or mix up messages."""

    def work():
        learned(rollouts=1, env=normalized(), callbacks=[CheckpointWriter(CheckpointFolder(tmp_path))])
        process_group().barrier()
        with pytest.warns(UserWarning, match=r"start new episodes.*a different episode") as caught:
            actual = learned(env=VecNormalize(lively(kind=Forgetful)), resume_from=tmp_path)
        messages = [str(each.message) for each in caught if each.category is UserWarning]
        return messages, actual["done"]

    one, other = on_ranks(2, work)
    assert one == other
    assert one[1][0] == 2 * ROLLOUT


def test_an_evaluation_in_one_process_resets_the_environments_of_all():
    """The reset of a `VecNormalize` communicates; a process alone in it would read values of a step."""

    def work():
        env = normalized()
        learner = agent(env).learn(ROLLOUT)
        if process_group().is_main:
            evaluate(learner, episodes=1)
        learner.learn(ROLLOUT, reset_num_timesteps=False)
        return learner.num_timesteps, statistics(env)

    one, other = on_ranks(2, work)
    assert one == other
    assert one[0] == 2 * ROLLOUT


class Faulty(Lively):
    """Environment that returns NaN during an episode in one of the processes."""

    def step(self, action):
        observation, reward, *others = super().step(action)
        if process_group().rank and self.life == 3:
            return observation * float("nan"), float("nan"), *others
        return observation, reward, *others


def test_error_in_one_process_ends_all_and_keeps_statistics():
    def work():
        env = VecNormalize(lively(kind=Faulty))
        with pytest.raises((ConnectionError, FaultyEnvironmentError)) as ended:
            learned(env=env)
        return str(ended.value), np.isfinite(statistics(env)).all()

    (one, *finite), (other, *others) = on_ranks(2, work)
    assert one.startswith("another of the 2 processes ended or did not respond")
    assert other.startswith("reward of environment 3 is not finite at its step 3: nan")  # its second
    assert (finite, others) == ([True], [True])


def test_features_for_one_process_are_rejected():
    def work():
        messages = []
        for call in (lambda: agent(env="rlxf/TMaze-v0", n_envs=5), lambda: agent().distill(agent(), 1)):
            try:
                call()
            except ValueError as error:
                messages.append(str(error))
        return messages

    for division, teaching in on_ranks(2, work):
        assert "n_envs is 5 in total, which is not divisible by the 2 processes" in division
        assert teaching == "distill supports a single process, got 2: start it without torchrun"
