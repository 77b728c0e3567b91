"""Generalized state-dependent exploration: distributions, rollouts, files."""

import copy
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import GTrXLPPO
from rlxf.agents.common import gradient_programs
from rlxf.agents.gtrxl import network_step
from rlxf.agents.gtrxl.policies import MlpGTrXLPolicy
from rlxf.agents.gtrxl.state_dependent_noise import StateDependentNoise, mean_action_std
from rlxf.training import CheckpointError, read_archive, write_archive
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    RECURRENT_CORES,
    VECTOR,
    parameters,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ROWS, FEATURES, SIZE = 5, 8, 3


def parts(rows=ROWS, seed=0):
    """Return means, log deviations and features of random distributions."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, SIZE), (FEATURES, SIZE), (rows, FEATURES)
    mean, log_std, features = (torch.randn(shape, generator=generator) for shape in shapes)
    return mean, log_std - 1, features


def box_agent(**changes):
    env = scripts(shifted(3), action_space=ACTIONS["Box"])
    return small_agent(env, **({"use_sde": True} | changes))


def test_densities_entropies_and_samples_are_those_of_sb3():
    mean, log_std, features = parts()
    own, theirs = StateDependentNoise(SIZE), StateDependentNoiseDistribution(SIZE)
    theirs.proba_distribution_net(FEATURES)
    theirs.sample_weights(log_std, batch_size=ROWS)
    own._noise = theirs.exploration_matrices
    for each in (own, theirs):
        each.proba_distribution(mean, log_std, features)
    actions = own.explore()
    torch.testing.assert_close(actions, theirs.sample())
    torch.testing.assert_close(own.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(own.entropy(), theirs.entropy())
    torch.testing.assert_close(own.mode(), mean)


def test_samples_over_many_noise_matrices_have_the_moments_of_the_distribution():
    mean, log_std, features = (x.double() for x in parts(rows=1))
    many = 40_000
    noise = StateDependentNoise(SIZE)
    noise.proba_distribution(mean.expand(many, -1), log_std, features.expand(many, -1))
    torch.manual_seed(0)
    noise.draw_noise(log_std, many)
    for samples in (noise.explore(), noise.sample()):
        deviation = noise.distribution.stddev[0]
        assert ((samples.mean(0) - mean[0]).abs() < 5 * deviation / many**0.5).all()
        torch.testing.assert_close(samples.std(0), deviation, rtol=0.02, atol=0)


def test_noise_is_a_linear_function_of_the_features_until_it_is_drawn_again():
    mean, log_std, features = parts()
    noise = StateDependentNoise(SIZE)
    noise.draw_noise(log_std, ROWS)

    def noise_of(x):
        return noise.proba_distribution(mean, log_std, x).explore() - mean

    first, other = noise_of(features), noise_of(features.flip(0))
    torch.testing.assert_close(noise_of(2 * features + features.flip(0)), 2 * first + other)
    noise.draw_noise(log_std, ROWS)
    assert (noise_of(features) != first).all()


def test_other_samples_are_independent():
    mean, log_std, features = parts()
    noise = StateDependentNoise(SIZE)
    noise.draw_noise(log_std, ROWS)
    noise.proba_distribution(mean, log_std, features)
    assert (noise.sample() != noise.sample()).all()
    assert torch.equal(noise.explore(), noise.explore())


def test_gradients_reach_the_deviations_and_not_the_features():
    mean, log_std, features = (x.requires_grad_() for x in parts())
    distribution = StateDependentNoise(SIZE).proba_distribution(mean, log_std, features)
    (distribution.log_prob(torch.ones(ROWS, SIZE)) + distribution.entropy()).sum().backward()
    assert log_std.grad.all()
    assert features.grad is None


class Constant(gymnasium.Env):
    """Environment without an end, whose observation never changes."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(-9.0, 9.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), 0.0, False, False, {}


class Actions(BaseCallback):
    """Record the actions of each step."""

    def __init__(self):
        super().__init__()
        self.actions = []

    def _on_step(self):
        self.actions.append(self.locals["actions"].clone())
        return True


@pytest.mark.parametrize("frequency", [-1, 1, 3, 16, 40])
def test_rollouts_keep_the_noise_for_the_given_number_of_steps(frequency):
    """Attention over equal tokens gives equal features in all steps of the constant environment."""
    actions, rollouts, steps = Actions(), 2, 16
    agent = small_agent(
        DummyVecEnv([Constant] * 3), previous_action=False, use_sde=True, loud=False,
        sde_sample_freq=frequency, learning_rate=0.0,
    )  # fmt: skip
    agent.learn(rollouts * steps * 3, actions)
    changes = [
        step + 1 for step in range(len(actions.actions) - 1)
        if not torch.allclose(actions.actions[step], actions.actions[step + 1], atol=1e-5)
    ]  # fmt: skip
    every = steps if frequency < 1 else min(frequency, steps)
    drawn = {start + step for start in (0, steps) for step in range(0, steps, every)}
    assert changes == sorted(drawn - {0})
    different = actions.actions[0].unique(dim=0)
    assert len(different) == 3, "each environment has its own noise"


@pytest.mark.parametrize("n_envs", [1, 3])
def test_predictions_in_a_rollout_are_independent_of_its_noise(n_envs):
    """Also for as many observations as there are environments, e.g. in an evaluation by a callback."""
    agent = small_agent(scripts(shifted(n_envs), action_space=ACTIONS["Box"]), use_sde=True)
    obs, different = np.zeros((n_envs, 3), np.float32), []

    class Predict(BaseCallback):
        def _on_step(self):
            first, second = (agent.policy.predict(obs, deterministic=False)[0] for _ in range(2))
            different.append((first != second).any())
            return True

    agent.learn(16 * n_envs, Predict())
    assert all(different)


def test_importance_ratios_of_the_first_minibatch_are_1():
    """The log probabilities of the rollout are those of the segments with the same weights."""
    agent = box_agent(n_epochs=1, batch_size=48, sde_sample_freq=4).learn(48)
    assert agent.logger.name_to_value["train/approx_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("log_std_init", [0.0, -1.0])
def test_the_initial_deviation_of_actions_is_log_std_init(log_std_init):
    independent, dependent = (
        small_agent(
            scripts(shifted(3), action_space=ACTIONS["Box"]), loud=False, use_sde=use_sde,
            policy_kwargs={"log_std_init": log_std_init},
        )
        for use_sde in (False, True)
    )  # fmt: skip
    for agent in (independent, dependent):
        assert mean_action_std(agent.policy.log_std).item() == pytest.approx(np.exp(log_std_init), rel=1e-5)
    tokens = torch.ones(64, 16).normal_(generator=torch.Generator().manual_seed(0))
    actual = dependent.policy.action_distribution(tokens).distribution.stddev.mean().item()
    assert actual == pytest.approx(np.exp(log_std_init), rel=0.1)


def test_files_keep_the_setting_and_the_deviations(tmp_path):
    agent = box_agent(sde_sample_freq=4)
    agent.learn(48)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent")
    assert (loaded.use_sde, loaded.sde_sample_freq, loaded.policy.use_sde) == (True, 4, True)
    assert loaded.policy.log_std.shape == (16, 2)
    assert same(parameters(agent), parameters(loaded))


@pytest.mark.parametrize("name", ACTIONS)
def test_policies_can_be_copied_during_and_after_training(name):
    copies = []

    class Copy(BaseCallback):
        def _on_step(self):
            copies.append(copy.deepcopy(self.model.policy))
            return True

    env = scripts(shifted(3), action_space=ACTIONS[name])
    agent = small_agent(env, use_sde=name.startswith("Box")).learn(48, Copy())
    assert len(copies) == 16
    assert same(list(copy.deepcopy(agent.policy).parameters()), parameters(agent))


@pytest.mark.parametrize(
    "changes",
    [
        {"core": RECURRENT_CORES["CALM"]},
        {"core": RECURRENT_CORES["GatedDeltaNet"], "precision": "bf16-mixed"},
        {"gradient_accumulation_steps": 2, "recompute_memory": True},
    ],
    ids=["CALM", "recurrence", "micro-batches"],
)
def test_trainings_with_other_options(changes):
    agent = box_agent(sde_sample_freq=4, **changes).learn(96)
    assert all(x.isfinite().all() for x in agent.policy.parameters())


def test_training_with_programs_of_steps_and_updates(monkeypatch):
    """The programs are recorded, and not compiled."""
    for module in (gradient_programs, network_step):
        monkeypatch.setattr(module, "CompiledFunction", lambda function, examples: function)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(updates are|the acting step is) not compiled")
        own, other = (box_agent(sde_sample_freq=4, compile=compile).learn(96) for compile in (True, False))
    assert own.has_compiled_step
    for mine, theirs in zip(own.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_box_of_two_axes_and_normalized_observations():
    env = VecNormalize(scripts(shifted(3), action_space=ACTIONS["Box of two axes"]))
    agent = small_agent(env, use_sde=True).learn(48)
    assert agent.policy.log_std.shape == (16, 6)
    assert agent.predict(np.zeros((3, 3), np.float32))[0].shape == (3, 2, 3)


@pytest.mark.parametrize("actor", ["student", "teacher"])
@pytest.mark.parametrize("of_student", [False, True])
@pytest.mark.parametrize("of_teacher", [False, True])
def test_distillation(actor, of_student, of_teacher):
    student, teacher = box_agent(use_sde=of_student), box_agent(use_sde=of_teacher, seed=5)
    student.distill(teacher, 96, actor=actor)
    assert all(x.isfinite().all() for x in student.policy.parameters())


def discrete(documents, _):
    documents["agent"]["action_space"] = {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}


def setting(name, value):
    return lambda documents, _: documents["agent"]["settings"].update({name: value})


def other_shape(_, tensors):
    tensors["policy"]["log_std"] = torch.zeros(2)


@pytest.mark.parametrize(
    "change",
    [
        discrete,
        setting("use_sde", 1),
        setting("sde_sample_freq", 2.5),
        setting("sde_sample_freq", -2),
        other_shape,
    ],
)
def test_altered_files_are_refused(tmp_path, change):
    path = tmp_path / "agent.zip"
    box_agent().save(path)
    archive = read_archive(path)
    documents, tensors = archive.documents, {name: dict(group) for name, group in archive.tensors.items()}
    change(documents, tensors)
    write_archive(path, documents, tensors)
    with pytest.raises(CheckpointError) as error:
        GTrXLPPO.load(path)
    assert "\n" not in str(error.value)


def test_two_trainings_have_the_same_bits():
    first, second = (box_agent(sde_sample_freq=2).learn(96) for _ in range(2))
    assert same(parameters(first), parameters(second))


@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiBinary"])
def test_other_actions_than_box_are_refused(name):
    agent = small_agent(scripts(shifted(3), action_space=ACTIONS[name]))
    message = r"use_sde=True \(--use-sde\) requires Box actions, got .*; leave use_sde out"
    with pytest.raises(ValueError, match=message):
        small_agent(agent.env, use_sde=True)
    with pytest.raises(ValueError, match=message):
        MlpGTrXLPolicy(VECTOR, ACTIONS[name], lambda _: 0.1, core=small_core(), use_sde=True)


@pytest.mark.parametrize("frequency", [0, -2, 2.5])
def test_an_invalid_frequency_is_refused(frequency):
    kind = TypeError if isinstance(frequency, float) else ValueError
    with pytest.raises(kind, match=r"sde_sample_freq must be an integer of at least 1 or -1 for once in"):
        box_agent(sde_sample_freq=frequency)


@pytest.mark.parametrize(
    "wrong", [{"use_sde": "yes"}, {"use_sde": 1}, {"sde_sample_freq": "2"}, {"normalize_advantage": 1}]
)
def test_arguments_of_another_type_are_refused(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        box_agent(**wrong)


def test_the_policy_takes_the_argument_from_the_agent():
    with pytest.raises(TypeError, match="policy_kwargs must not contain 'use_sde', which is set by GTrXLPPO"):
        box_agent(policy_kwargs={"use_sde": True})


def test_a_frequency_without_the_noise_is_refused():
    with pytest.raises(ValueError, match="sde_sample_freq=4 requires use_sde=True"):
        box_agent(use_sde=False, sde_sample_freq=4)
