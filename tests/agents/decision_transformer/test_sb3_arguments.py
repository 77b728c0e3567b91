"""Tests of the error messages for arguments of Stable-Baselines3 that are not supported."""

import re

import pytest

from rlxf import DecisionTransformer
from rlxf.agents.common.sb3_arguments import OFFLINE_SB3_ARGUMENTS, SB3_LEARN_ARGUMENTS, SB3_ONLINE_ARGUMENTS
from rlxf.agents.pretraining import MaskedPretraining
from tests.agents.decision_transformer.worlds import small_agent, some_trajectories


@pytest.mark.parametrize("learner", [DecisionTransformer, MaskedPretraining])
@pytest.mark.parametrize("name", OFFLINE_SB3_ARGUMENTS)
def test_refused_arguments_have_a_one_line_message(learner, name):
    with pytest.raises(TypeError, match=rf"^{learner.__name__} takes no argument '{name}': [^\n]*$"):
        learner(some_trajectories(), **{name: object()})


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("buffer_size", "learn_online(replay_episodes=...)"),
        ("train_freq", "learn_online(round_steps=...)"),
        ("policy_kwargs", "core=decision_transformer(...)"),
    ],
)
def test_messages_name_the_alternative(name, use):
    with pytest.raises(TypeError, match=re.escape(use)):
        DecisionTransformer(some_trajectories(), **{name: 1})


def test_a_misspelled_argument_has_a_suggestion():
    with pytest.raises(TypeError, match="takes no argument 'contextlength'; did you mean 'context_length'"):
        DecisionTransformer(some_trajectories(), contextlength=20)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpGTrXLPolicy"])
def test_a_policy_instead_of_the_dataset_is_refused(policy):
    with pytest.raises(TypeError, match=f"the first argument is a dataset, not a policy, got '{policy}'"):
        DecisionTransformer(policy, "CartPole-v1")


def test_an_id_instead_of_the_environment_is_refused():
    with pytest.raises(TypeError, match="'CartPole-v1' is not a return-conditioned VecEnv: make a VecEnv"):
        small_agent(env="CartPole-v1")


@pytest.mark.parametrize("name", SB3_LEARN_ARGUMENTS)
def test_refused_arguments_of_learn(name):
    with pytest.raises(TypeError, match=rf"^DecisionTransformer\.learn takes no argument '{name}': .*steps="):
        small_agent().learn(**{name: 100})


@pytest.mark.parametrize("name", SB3_ONLINE_ARGUMENTS)
def test_refused_arguments_of_learn_online(name):
    with pytest.raises(TypeError, match=rf"\.learn_online takes no argument '{name}': use"):
        small_agent().learn_online(100, 1.0, **{name: 100})


def test_a_missing_gpu_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda' requires a GPU that does not exist"):
        DecisionTransformer(some_trajectories(), device="cuda")
    small_agent().save(tmp_path / "agent")
    with pytest.raises(ValueError, match="device='cuda' requires a GPU that does not exist"):
        DecisionTransformer.load(tmp_path / "agent", device="cuda")


def test_load_accepts_custom_objects(tmp_path):
    small_agent().save(tmp_path / "agent")
    loaded = DecisionTransformer.load(tmp_path / "agent", custom_objects={"learning_rate": 0.5})
    assert loaded.learning_rate == 0.5
