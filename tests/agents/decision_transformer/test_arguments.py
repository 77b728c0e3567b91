"""Tests of arguments: presets, configuration, arguments of Stable-Baselines3, errors for invalid values."""

import re
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import BehaviorCloning, DecisionTransformer, TransformerSpec, evaluate
from rlxf.agents.decision_transformer import KZL, ODT, Imitation, MaximumEntropy, MaxReturn
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.offline.sb3_arguments import OFFLINE_SB3_ARGUMENTS, SB3_LEARN_ARGUMENTS, SB3_ONLINE_ARGUMENTS
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import XL, LearnedAbsolute
from rlxf.data import DatasetError
from rlxf.envs import FaultyEnvironmentError, make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.training import linear
from rlxf.training.schedules import CosineSchedule
from rlxf.training.strict_json import dump_json, load_json
from tests.agents.decision_transformer.worlds import SIZES, VECTOR, shown, small_agent, some_trajectories
from tests.agents.mlp.worlds import small_mlp

CHEN_2021 = {
    "context_length": 20,
    "batch_size": 64,
    "learning_rate": 1e-4,
    "weight_decay": 1e-4,
    "max_grad_norm": 0.25,
    "warmup_updates": 10_000,
    "return_scale": 1000.0,
}
"""Appendix A, hyperparameters for OpenAI Gym; warm-up and return scale as in the authors' code."""
CHEN_2021_CORE = {"layers": 3, "heads": 1, "width": 128, "activation": "relu", "dropout": 0.1}

ZHENG_2022 = {
    "context_length": 20,
    "batch_size": 256,
    "learning_rate": 1e-4,
    "weight_decay": 5e-4,
    "max_grad_norm": 0.25,
    "warmup_updates": 10_000,
    "return_scale": 1000.0,
}
"""Appendix C, hyperparameters for Hopper; return scale as in the authors' code."""
ZHENG_2022_CORE = {"layers": 4, "heads": 4, "width": 512, "activation": "relu", "dropout": 0.1}


@pytest.mark.parametrize(
    ("settings", "numbers", "core", "objective"),
    [
        (KZL, CHEN_2021, CHEN_2021_CORE, Imitation()),
        (ODT, ZHENG_2022, ZHENG_2022_CORE, MaximumEntropy(temperature=0.1, target_entropy=None)),
    ],
    ids=["KZL", "ODT"],
)
def test_presets_equal_the_paper(settings, numbers, core, objective):
    assert {name: value for name, value in settings.items() if name not in ("core", "objective")} == numbers
    assert settings["core"] == TransformerSpec(**core)
    assert settings.get("objective", Imitation()) == objective


@pytest.mark.parametrize("settings", [KZL, ODT], ids=["KZL", "ODT"])
def test_presets_can_be_trained(settings, cartpole):
    agent = DecisionTransformer(cartpole, **settings, seed=0, device="cpu")
    agent.batch_size = min(agent.batch_size, 4)  # 256 windows take minutes on a small machine
    before = [parameter.detach().clone() for parameter in agent.policy.parameters()]
    agent.learn(2)
    assert agent.num_timesteps == 2
    pairs = zip(agent.policy.parameters(), before, strict=True)
    changed = [bool((after != initial).any()) for after, initial in pairs]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize("objective", [Imitation(), MaximumEntropy(temperature=0.3)], ids=repr)
def test_the_configuration_survives_json(objective):
    agent = small_agent(objective=objective, learning_rate=linear(3e-4, 1e-5), warmup_updates=7)
    stored = load_json(dump_json(agent.config.to_json()))
    restored = DecisionTransformerConfig.from_json(stored)
    assert restored.to_json() == agent.config.to_json()
    assert (restored.objective, restored.core, restored.seed) == (objective, agent.core, agent.seed)
    assert restored.return_scale == agent.return_scale > 0


def test_the_configuration_holds_attributes_that_were_changed():
    agent = small_agent()
    before = agent.config
    agent.batch_size = 3
    assert agent.config == replace(before, batch_size=3) != before
    with pytest.raises(FrozenInstanceError):
        before.batch_size = 3


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
    with pytest.raises(TypeError, match="takes no argument 'contextlength'; did you mean context_length"):
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 0}, "context_length must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"episode_length": -3}, "episode_length must be an integer of at least 1 or None, got -3"),
        ({"learning_rate": -1e-4}, "learning_rate must be finite and at least 0, got -0.0001"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite and at least 0, got nan"),
        ({"learning_rate": linear(1e-3, -1e-3)}, "learning_rate must be .* got -0.001 at progress 0"),
        ({"learning_rate": CosineSchedule(1e-3, -1e-3)}, "learning_rate must be .* got -0.001 at progress 0"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number of at least 0, got inf"),
        ({"warmup_updates": -1}, "warmup_updates must be an integer of at least 0 or None, got -1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number of more than 0, got 0.0"),
        ({"return_scale": 0.0}, "return_scale must be a finite number of more than 0 or None, got 0.0"),
        ({"return_scale": 1e40}, "return_scale must be 0 or from 1.2e-38 to 3.4e"),
        ({"verbose": -1}, "verbose must be an integer of at least 0, got -1"),
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295 or None, got -1"),
        ({"seed": 2**40}, "seed must be an integer from 0 to 4294967295 or None, got"),
        ({"core": TransformerSpec(causal=False)}, "its core needs causal=True"),
        ({"core": TransformerSpec(cross_attention=True)}, "cross_attention=False"),
        (
            {"core": TransformerSpec(**SIZES, position=LearnedAbsolute(14))},
            "a window has 5 steps, .* and so 15 tokens, but .* has only 14 positions; use max_length=15",
        ),
        (
            {"core": TransformerSpec(**SIZES, position=LearnedAbsolute(26), memory=XL(12))},
            "a window has 9 steps, including those that fill the memory, and so 27 tokens",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecisionTransformer(some_trajectories(), **({"context_length": 5} | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 2.5}, r"context_length must be an integer of at least 1, got 2\.5"),
        ({"warmup_updates": 10.5}, r"warmup_updates must be an integer of at least 0 or None, got 10\.5"),
        ({"weight_decay": True}, "weight_decay must be a finite number of at least 0, got True"),
        ({"weight_decay": "x"}, "weight_decay must be a finite number of at least 0, got 'x'"),
        ({"max_grad_norm": None}, "max_grad_norm must be a finite number of more than 0, got None"),
        ({"return_scale": "x"}, "return_scale must be a finite number of more than 0 or None, got 'x'"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a number or a function .* got '1e-3'"),
        ({"learning_rate": True}, "learning_rate must be a number or a function .* got True"),
        ({"verbose": True}, "verbose must be an integer of at least 0, got True"),
        ({"context": None}, "context must be 'window' or 'episode', got None"),
        ({"seed": "x"}, "seed must be an integer from 0 to 4294967295 or None, got 'x'"),
    ],
)
def test_settings_of_other_types_are_refused(settings, message):
    with pytest.raises(TypeError, match=message):
        DecisionTransformer(some_trajectories(), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": np.float32(0.1), "weight_decay": np.float32(0.1), "max_grad_norm": np.float64(0.5)},
        {"context_length": np.int64(4), "episode_length": np.int32(20), "seed": np.int64(3)},
        {
            "state_loss_weight": np.float32(0.5),
            "return_scale": np.float32(2),
            "validation_fraction": np.float16(0.3),
        },
    ],
)
def test_scalars_of_numpy_can_be_saved_and_loaded(settings, tmp_path):
    agent = small_agent(**settings)
    agent.learn(1)
    agent.save(tmp_path / "agent")
    loaded = DecisionTransformer.load(tmp_path / "agent", device="cpu")
    assert {name: getattr(loaded, name) for name in settings} == settings


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="contextlength"):
        DecisionTransformer(some_trajectories(), contextlength=20)


def test_dataset_none_is_refused():
    with pytest.raises(ValueError, match="dataset is None: give a Minari id"):
        DecisionTransformer(None)


def test_an_unknown_dataset_is_refused(minari_root):
    with pytest.raises(DatasetError, match="'test/missing-v0' is not in"):
        DecisionTransformer("test/missing-v0")


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"target_entropy": float("nan")}])
def test_objective_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=r"got 0\.0|got nan"):
        MaximumEntropy(**options)


@pytest.mark.parametrize(
    "options", [{"temperature": True}, {"temperature": np.True_}, {"target_entropy": "x"}]
)
def test_objective_settings_of_other_types_are_refused(options):
    with pytest.raises(TypeError, match=r"MaximumEntropy .* must be a number, got"):
        MaximumEntropy(**options)


@pytest.mark.parametrize("number", [0, -5])
def test_a_number_of_steps_less_than_1_is_refused(number):
    with pytest.raises(ValueError, match=f"steps must be at least 1, got {number}"):
        small_agent().learn(number)


@pytest.mark.parametrize("observation", [np.zeros((2, 3)), {"observation": np.zeros((2, 3))}])
def test_observations_without_target_return_name_the_wrapper(observation):
    with pytest.raises(TypeError, match=r"ReturnToGo\(make_vec_env\(id, n_envs\), target_return\)"):
        small_agent().predict(observation)


def test_an_observation_of_another_shape_is_refused():
    agent = small_agent()
    observation = shown(agent.trajectories, np.array([0, 1])) | {"observation": np.zeros((2, 4), np.float32)}
    with pytest.raises(ValueError, match=r"the shape of the dataset, \(3,\), got \(4,\)"):
        agent.predict(observation)


def test_nan_errors_name_the_environment():
    agent = small_agent()
    observation = shown(agent.trajectories, np.array([0, 1]))
    observation["observation"][1, 2] = np.nan
    with pytest.raises(FaultyEnvironmentError, match="observation of environment 1 is nan at index 2"):
        agent.predict(observation)
    observation = shown(agent.trajectories, np.array([0, 1]))
    observation["return_to_go"][0] = np.inf
    with pytest.raises(FaultyEnvironmentError, match="return-to-go of environment 0 is inf"):
        agent.predict(observation)
    observation = shown(agent.trajectories, np.array([0, 1]))
    observation["previous_action"][1, 0] = np.nan
    with pytest.raises(FaultyEnvironmentError, match="previous action of environment 1 is nan at index 0"):
        agent.predict(observation)


def test_state_and_episode_start_of_another_batch_size_are_refused():
    agent = small_agent()
    _, state = agent.predict(shown(agent.trajectories, np.array([0, 1])))
    three = shown(agent.trajectories, np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="state is of 2 environments, the observation of 3"):
        agent.predict(three, state)
    with pytest.raises(ValueError, match=r"episode_start must have shape \(3,\), .* got \(2,\)"):
        agent.predict(three, None, np.array([True, False]))


def test_make_env_without_environment_names_the_alternative():
    with pytest.raises(ValueError, match=r"test/small-v0 do not name their environment: pass one"):
        small_agent().make_env(2)


def test_learn_online_without_environment_names_its_argument():
    agent = small_agent(objective=MaximumEntropy())
    with pytest.raises(ValueError, match=r"pass one, for example learn_online\(\.\.\., env='CartPole-v1'\)"):
        agent.learn_online(9, target_return=1.0)


def test_set_env_requires_return_to_go(cartpole):
    agent = DecisionTransformer(cartpole, context_length=3, device="cpu")
    with pytest.raises(TypeError, match="is not a return-conditioned VecEnv: make a VecEnv"):
        agent.set_env(agent.make_env(1))


def test_make_env_refuses_other_spaces(cartpole):
    agent = DecisionTransformer(cartpole, context_length=3, device="cpu")
    other = DecisionTransformer(some_trajectories(VECTOR), context_length=3, device="cpu")
    other.trajectories = None
    other.dataset_info = other.dataset_info.__class__(
        **vars(other.dataset_info) | {"env_id": agent.dataset_info.env_id}
    )
    with pytest.raises(DatasetError, match="the environment does not fit dataset test/small-v0"):
        other.make_env(1)


def test_online_fine_tuning_requires_a_stochastic_policy():
    with pytest.raises(ValueError, match=r"train the agent with objective=MaximumEntropy\(\)"):
        small_agent().learn_online(10, 1.0)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCar-v0"])
def test_environments_of_other_spaces_are_refused(cartpole, env_id):
    agent = DecisionTransformer(cartpole, context_length=3, device="cpu")
    with pytest.raises(DatasetError, match="space"):
        evaluate(agent, env_id, episodes=1, target_returns=[1.0])
    with pytest.raises(DatasetError, match="space"):
        agent.set_env(ReturnToGo(make_vec_env(env_id, 1), 1.0))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("return_to_go", np.zeros((2, 2)), r"return_to_go .* must have shape \(2, 1\), got \(2, 2\)"),
        ("previous_action", np.zeros((3, 2)), r"previous_action .* shape \(2, 2\), got \(3, 2\)"),
        ("previous_action", np.zeros((2, 1)), r"previous_action .* shape \(2, 2\), got \(2, 1\)"),
        (
            "time_step",
            np.zeros((3, 1)),
            r"time_step of 2 environments must have shape \(2, 1\), got \(3, 1\)",
        ),
        ("observation", np.zeros((1, 3)), r"observation of 2 environments must .*\(2, 3\), got \(1, 3\)"),
        ("time_step", np.array([[0], [-1]]), "the time step of environment 1 is -1; it must be at least 0"),
        ("time_step", np.array([[np.nan], [0]]), "the time step of environment 0 is nan; it must be"),
    ],
)
@pytest.mark.parametrize("agent", [small_agent, lambda: small_mlp("ReturnConditionedMLP")], ids=["DT", "MLP"])
def test_inconsistent_parts_of_observations_are_refused(agent, part, value, message):
    agent = agent()
    with pytest.raises(ValueError, match=message):
        agent.predict(shown(agent.trajectories, np.array([0, 1])) | {part: value})


@pytest.mark.parametrize("norm_reward", [True, False])
def test_normalized_observations_are_refused(cartpole, norm_reward):
    """The agents normalize observations themselves, with the statistics of their data."""
    normalized = VecNormalize(make_vec_env("CartPole-v1", 1), norm_reward=norm_reward)
    agent = DecisionTransformer(
        cartpole, 3, objective=MaximumEntropy(), conditioning=MaxReturn(), device="cpu"
    )
    calls = [
        lambda: agent.learn_online(10, env=normalized),
        lambda: evaluate(agent, normalized, episodes=1),
        lambda: evaluate(BehaviorCloning(cartpole, device="cpu"), normalized, episodes=1),
        lambda: BehaviorCloning(cartpole, device="cpu", env=normalized),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"a VecNormalize around .* set its norm_obs=False"):
            call()


def test_scaled_rewards_are_refused_without_a_target(cartpole):
    agent = DecisionTransformer(
        cartpole, 3, objective=MaximumEntropy(), conditioning=MaxReturn(), device="cpu"
    )
    with pytest.raises(ValueError, match=r"compares returns .* set its norm_reward=False"):
        agent.learn_online(10, env=VecNormalize(make_vec_env("CartPole-v1", 1), norm_obs=False))


def test_scaled_rewards_are_refused(cartpole):
    agent = DecisionTransformer(cartpole, 3, objective=MaximumEntropy(), device="cpu")
    scaled = VecNormalize(make_vec_env("CartPole-v1", 1), norm_obs=False)
    with pytest.raises(ValueError, match="set its norm_reward=False"):
        agent.learn_online(10, 20.0, env=scaled)
    with pytest.raises(ValueError, match="set its norm_reward=False"):
        evaluate(agent, scaled, episodes=1, target_returns=[1.0])
