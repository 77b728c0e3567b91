"""Tests of checkpoints: round trips, and errors for damaged and incompatible files."""

import copy
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.conditioning import MaxReturn, TargetReturn
from rlxf.agents.offline.objectives import Imitation
from rlxf.data import DatasetError, ReferenceScores
from rlxf.data.sampling import SamplingScheme, UniformSteps
from rlxf.training import CheckpointError, CosineSchedule, read_archive, write_archive
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    OBSERVATIONS,
    shown,
    small_agent,
    some_trajectories,
)

PLAIN = decision_transformer(width=16, layers=1, heads=1, dropout=0.0)


def weights(agent):
    return [parameter.detach() for parameter in agent.policy.parameters()]


@pytest.mark.parametrize("core", CORES)
def test_a_loaded_agent_predicts_the_same_actions(tmp_path, core):
    agent = small_agent(core=CORES[core])
    agent.learn(2)
    agent.save(tmp_path / "agent")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    observation = shown(agent.trajectories, np.array([3, 12]))
    np.testing.assert_array_equal(agent.predict(observation)[0], loaded.predict(observation)[0])


@pytest.mark.parametrize("weight_averaging", [None, 0.9])
def test_an_agent_without_the_optimizer_predicts_the_same_actions(tmp_path, weight_averaging):
    agent = small_agent(weight_averaging=weight_averaging)
    agent.learn(3)
    agent.save(tmp_path / "small", exclude=["policy.optimizer"])
    loaded = DecisionTransformer.load(tmp_path / "small", agent.trajectories, device="cpu")
    observation = shown(agent.trajectories, np.array([3, 12]))
    np.testing.assert_array_equal(agent.predict(observation)[0], loaded.predict(observation)[0])
    assert not loaded.optimizer.state
    with pytest.raises(CheckpointError, match="was saved with exclude"):
        agent.learn(9, resume_from=tmp_path / "small.zip")
    loaded.learn(2)


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_loaded_agent_predicts_the_same_actions_for_all_spaces(tmp_path, observations, actions):
    agent = small_agent(some_trajectories(OBSERVATIONS[observations], ACTIONS[actions]))
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    observation = shown(agent.trajectories, np.array([3, 12]))
    np.testing.assert_array_equal(agent.predict(observation)[0], loaded.predict(observation)[0])


@pytest.mark.parametrize("objective", [None, MaximumEntropy(0.3, -1.0)], ids=["imitation", "maximum entropy"])
def test_training_continues_bitwise_equal_after_loading(tmp_path, objective):
    def fresh():
        return small_agent(core=PLAIN, objective=objective, warmup_updates=2)

    uninterrupted = fresh().learn(4)
    torch.manual_seed(5)  # the entropy of a Gaussian is estimated from torch's global generator
    uninterrupted.learn(4, reset_num_timesteps=False)
    fresh().learn(4).save(tmp_path / "half.zip")
    resumed = DecisionTransformer.load(tmp_path / "half.zip", uninterrupted.trajectories, device="cpu")
    torch.manual_seed(5)
    resumed.learn(4, reset_num_timesteps=False)
    assert resumed.num_timesteps == 8
    assert all(map(torch.equal, weights(uninterrupted), weights(resumed)))


def test_settings_are_restored(tmp_path):
    settings = {
        "learning_rate": CosineSchedule(1e-3, 1e-5),
        "batch_size": 7,
        "weight_decay": 0.01,
        "warmup_updates": 5,
        "max_grad_norm": 0.5,
        "return_scale": 12.0,
        "episode_length": 30,
        "objective": MaximumEntropy(0.2),
        "core": CORES["memory"],
        "tensorboard_log": tmp_path / "runs",
    }
    small_agent(**settings).save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    expected = settings | {"tensorboard_log": None}  # a file does not decide where a log is written
    assert {name: getattr(loaded, name) for name in settings} == expected


def test_load_overrides_settings(tmp_path):
    small_agent().save(tmp_path / "agent.zip")
    assert DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", batch_size=3).batch_size == 3
    with pytest.raises(TypeError, match="batchsize"):
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", batchsize=3)


@dataclass(frozen=True)
class OwnObjective(Imitation):
    scale: float = 0.5


@dataclass(frozen=True)
class OwnSampling(UniformSteps):
    power: float = 2.0


@dataclass(frozen=True)
class OwnConditioning(TargetReturn):
    pass


OWN = {"objective": OwnObjective(), "sampling": OwnSampling(), "conditioning": OwnConditioning()}


@pytest.mark.parametrize("name", OWN)
def test_objects_of_own_classes_are_passed_to_load(tmp_path, name):
    agent = small_agent(**{name: OWN[name]})
    agent.learn(2)
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", **{name: OWN[name]})
    assert getattr(loaded, name) == OWN[name]
    observation = shown(agent.trajectories, np.array([3, 12]))
    np.testing.assert_array_equal(agent.predict(observation)[0], loaded.predict(observation)[0])
    with pytest.raises(CheckpointError, match=f"unknown {name} 'Own.*pass {name}=... to load"):
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", batch_size=3)
    with pytest.raises(TypeError, match=f"{name} must be .* got 3"):
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", **{name: 3})


class Undecorated(SamplingScheme):
    def episode_weights(self, lengths, returns):
        return lengths.astype(np.float64)


@dataclass
class Changeable(Undecorated):
    pass


class Inherited(UniformSteps):
    def __init__(self, power):
        object.__setattr__(self, "power", power)


@dataclass(frozen=True)
class Unstorable(Imitation):
    steps: frozenset = frozenset()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Undecorated()}, r"sampling must be an object of a frozen dataclass.*class Undecorated"),
        ({"sampling": Changeable()}, r"sampling must be an object of a frozen dataclass.*class Changeable"),
        ({"sampling": Inherited(2)}, r"sampling must be an object of a frozen dataclass.*class Inherited"),
        ({"objective": Unstorable()}, r"objective must have fields that are numbers.*got Unstorable"),
    ],
    ids=["no dataclass", "not frozen", "no decorator", "no JSON value"],
)
def test_objects_that_files_cannot_hold_are_refused_before_the_training(settings, message):
    with pytest.raises(TypeError, match=message):
        small_agent(**settings)


@pytest.mark.parametrize("seed", [1, None])
def test_a_seed_passed_to_load_draws_other_windows(tmp_path, seed):
    agent = small_agent()
    agent.learn(2)
    agent.save(tmp_path / "agent.zip")
    stored = agent.generator.get_state()
    loaded = [
        DecisionTransformer.load(tmp_path / "agent.zip", agent.trajectories, device="cpu", **settings)
        for settings in ({}, {"seed": seed}, {"seed": 2})
    ]
    states = [each.generator.get_state() for each in loaded]
    assert torch.equal(states[0], stored)
    assert not torch.equal(states[1], stored)
    assert not torch.equal(states[1], states[2])


def test_load_can_download_the_dataset(tmp_path, monkeypatch):
    agent = small_agent()
    agent.save(tmp_path / "agent.zip")
    asked = []

    def as_trajectories(dataset, download=False):
        asked.append((dataset, download))
        return agent.trajectories

    monkeypatch.setattr("rlxf.agents.offline.algorithm.as_trajectories", as_trajectories)
    DecisionTransformer.load(tmp_path / "agent.zip", "test/id-v0", device="cpu", download=True)
    DecisionTransformer.load(tmp_path / "agent.zip", "test/id-v0", device="cpu")
    assert asked == [("test/id-v0", True), ("test/id-v0", False)]


def test_dataset_information_is_restored(tmp_path, cartpole):
    agent = DecisionTransformer(cartpole, context_length=3, device="cpu")
    agent.save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    assert loaded.dataset_info == agent.dataset_info
    assert loaded.return_range == (cartpole.returns.min(), cartpole.returns.max())
    env = loaded.make_env(2, seed=0)
    assert env.num_envs == 2
    assert env.envs[0].spec.id == "CartPole-v1"


def test_reference_scores_are_restored(tmp_path):
    scores = ReferenceScores(1.0, 2.0, "a test")
    small_agent(some_trajectories(reference_scores=scores)).save(tmp_path / "agent.zip")
    assert DecisionTransformer.load(tmp_path / "agent.zip", device="cpu").reference_scores == scores


def test_environment_spec_is_restored_with_arguments_and_time_limit(tmp_path):
    spec = gymnasium.make("Pendulum-v1", g=5.0, max_episode_steps=17).spec
    data = some_trajectories(eval_env_spec=spec)
    small_agent(data).save(tmp_path / "agent.zip")
    restored = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu").dataset_info.env_spec(
        trust=True
    )
    assert (restored.id, restored.kwargs["g"], restored.max_episode_steps) == ("Pendulum-v1", 5.0, 17)


def test_make_env_refuses_an_unregistered_environment(tmp_path):
    spec = gymnasium.envs.registration.EnvSpec("Missing-v0", entry_point="nowhere:Missing")
    small_agent(some_trajectories(eval_env_spec=spec)).save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    with pytest.raises(
        ValueError, match="the data are from 'Missing-v0', which is not registered in Gymnasium"
    ):
        loaded.make_env(1)


def test_files_contain_no_entry_point(tmp_path):
    spec = gymnasium.envs.registration.EnvSpec("Missing-v0", entry_point="nowhere:Missing")
    small_agent(some_trajectories(eval_env_spec=spec)).save(tmp_path / "agent.zip")
    assert b"nowhere" not in (tmp_path / "agent.zip").read_bytes()


def test_learning_without_a_dataset_is_refused(tmp_path):
    small_agent().save(tmp_path / "agent.zip")
    loaded = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    with pytest.raises(ValueError, match=r"loaded without data: use load\(path, dataset=\.\.\.\)"):
        loaded.learn(1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"core": None}, ValueError, "core must have a value to load a file, got None: leave it out"),
        ({"core": "x"}, TypeError, "core must be an object of class TransformerSpec, got 'x'"),
        ({"conditioning": "MaxReturn"}, TypeError, "class TargetReturn or MaxReturn or .*, got 'MaxReturn'"),
        ({"conditioning": MaxReturn()}, CheckpointError, r"it was saved with conditioning=TargetReturn\(\)"),
        ({"objective": MaximumEntropy()}, CheckpointError, r"it was saved with objective=Imitation\(\)"),
        ({"episode_length": 3}, CheckpointError, "loaded with episode_length=3: it was saved with episode_l"),
        ({"state_loss_weight": 0.1}, CheckpointError, "it was saved with state_loss_weight=0.0"),
        ({"return_scale": None}, ValueError, "return_scale must have a value to load"),
        ({"learning_rate": None}, ValueError, "learning_rate must have a value to load"),
        ({"batch_size": None}, ValueError, "batch_size must have a value to load"),
    ],
)
def test_load_refuses_settings_that_do_not_fit_the_file(tmp_path, change, error, message):
    small_agent(core=PLAIN).save(tmp_path / "agent.zip")
    with pytest.raises(error, match=message):
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", **change)


def test_an_altered_file_is_not_blamed_on_other_settings(tmp_path):
    small_agent(core=PLAIN).save(tmp_path / "agent.zip")
    archive = read_archive(tmp_path / "agent.zip")
    archive.tensors["policy"].popitem()
    write_archive(tmp_path / "agent.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError) as caught:
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu", batch_size=3)
    assert "batch_size" not in str(caught.value)


def test_load_refuses_a_dataset_of_other_spaces(tmp_path):
    small_agent().save(tmp_path / "agent.zip")
    with pytest.raises(DatasetError, match="the agent does not fit dataset test/small-v0: action space"):
        DecisionTransformer.load(
            tmp_path / "agent.zip", some_trajectories(action_space=ACTIONS["Discrete"]), device="cpu"
        )


def test_equal_agents_have_bitwise_equal_files(tmp_path):
    for name in ("a.zip", "b.zip"):
        small_agent().learn(2).save(tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


@pytest.mark.faults
@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_an_altered_file_is_refused(tmp_path, at):
    path = tmp_path / "agent.zip"
    small_agent().save(path)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        DecisionTransformer.load(path)


@pytest.mark.faults
def test_files_of_another_algorithm_are_refused(tmp_path):
    sizes = {"memory_length": 8, "n_steps": 8, "segment_length": 8, "batch_size": 8, "n_envs": 2}
    GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", **sizes).save(tmp_path / "gtrxl.zip")
    small_agent().save(tmp_path / "dt.zip")
    with pytest.raises(CheckpointError, match="contains no DecisionTransformer agent"):
        DecisionTransformer.load(tmp_path / "gtrxl.zip")
    with pytest.raises(CheckpointError, match="contains no GTrXLPPO agent"):
        GTrXLPPO.load(tmp_path / "dt.zip")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda agent: agent["settings"].pop("core"), "core"),
        (lambda agent: agent["settings"].update(magic=1), "magic"),
        (lambda agent: agent["settings"]["objective"].update(name="Magic"), "unknown objective 'Magic'"),
        (lambda agent: agent["settings"].update(context_length=0), "context_length"),
        (lambda agent: agent["dataset_info"].pop("env_id"), "env_id"),
        (lambda agent: agent["dataset_info"].update(magic=1), "magic"),
        (lambda agent: agent["dataset_info"].update(dataset_ids="abc"), "must be a list of strings"),
        (lambda agent: agent["dataset_info"].update(return_range=["a", "b"]), "'return_range' = .*, which"),
        (lambda agent: agent["dataset_info"].update(return_range=[1]), "smallest and the largest return"),
        (lambda agent: agent["dataset_info"].update(return_range=[5, 1]), "smallest and the largest return"),
        (lambda agent: agent["dataset_info"].update(env_id=5), "'env_id' = 5, which must be a string"),
        (
            lambda agent: agent["dataset_info"].update(env_kwargs=[1]),
            "'env_kwargs' = .*, which must be an object",
        ),
        (
            lambda agent: agent["dataset_info"].update(reference_scores={"minimum": "a"}),
            "'minimum' = 'a', which",
        ),
        (lambda agent: agent["dataset_info"]["action_space"].update(type="Magic"), "its type must be one of"),
        (lambda agent: agent["progress"].pop("num_timesteps"), "num_timesteps"),
    ],
)
def test_invalid_descriptions_are_refused(tmp_path, change, message):
    path = tmp_path / "agent.zip"
    small_agent().save(path)
    archive = read_archive(path)
    change(archive.documents["agent"])
    write_archive(path, archive.documents, archive.tensors)
    with pytest.raises((CheckpointError, ValueError), match=message):
        DecisionTransformer.load(path)


@pytest.mark.faults
def test_weights_of_another_shape_are_refused(tmp_path):
    small_agent().save(tmp_path / "agent.zip")
    with pytest.raises(
        CheckpointError,
        match=r"core that was passed: the core in the file has \w+=\S+, the one passed \w+=\S+; load",
    ):
        DecisionTransformer.load(tmp_path / "agent.zip", core=PLAIN, device="cpu")


@pytest.mark.faults
def test_an_invalid_generator_state_is_refused(tmp_path):
    path = tmp_path / "agent.zip"
    small_agent().save(path)
    archive = read_archive(path)
    archive.tensors["window_generator"]["state"] = torch.zeros(3, dtype=torch.uint8)
    write_archive(path, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="not a generator state"):
        DecisionTransformer.load(path, device="cpu")


def test_arguments_of_the_environment_that_no_file_can_hold_are_refused():
    spec = copy.deepcopy(gymnasium.spec("FrozenLake-v1"))
    spec.kwargs["desc"] = np.eye(2)
    with pytest.raises(
        DatasetError, match=r"test/small-v0: .*ndarray.*; use numbers, .*eval_env_spec.kwargs"
    ):
        small_agent(some_trajectories(eval_env_spec=spec))


def test_an_environment_with_wrappers_is_not_made_without_them(tmp_path):
    wrapped = gymnasium.wrappers.ClipReward(gymnasium.make("Pendulum-v1"), -1, 1)
    data = some_trajectories(eval_env_spec=wrapped.spec)
    small_agent(data).save(tmp_path / "agent.zip")
    path = tmp_path / "agent.zip"
    with pytest.raises(
        ValueError, match="describes 'Pendulum-v1' with wrapper ClipReward, which is not used"
    ):
        DecisionTransformer.load(path, device="cpu").make_env(1)
    with pytest.raises(ValueError, match="'Pendulum-v1' with the wrappers ClipReward"):
        DecisionTransformer.load(path, device="cpu", trust=True).make_env(1)
