"""Arguments of SB3's PPO and RecurrentPPO are supported, or rejected with an alternative."""

import inspect
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.policies import ActorCriticPolicy

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.losses import clipped_values
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.sb3_arguments import PPO_SB3_ARGUMENTS, SB3_POLICY_ARGUMENTS
from tests.agents.gtrxl.worlds import ACTIONS, OBSERVATIONS, rollouts, scripts, shifted, small_agent

SB3_NAMES = {
    name: policy
    for kind, policy in zip(("Mlp", "Cnn", "MultiInput"), OBSERVATIONS, strict=True)
    for name in (f"{kind}Policy", f"{kind}LstmPolicy")
}


def parameters(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("algorithm", [PPO, RecurrentPPO])
def test_every_argument_of_sb3_is_supported_or_rejected(algorithm):
    known = parameters(GTrXLPPO.__init__).keys() | PPO_SB3_ARGUMENTS.keys()
    assert parameters(algorithm.__init__).keys() <= known


@pytest.mark.parametrize("policy", [ActorCriticPolicy, RecurrentActorCriticPolicy])
def test_every_argument_of_sb3_policies_is_supported_or_rejected(policy):
    known = parameters(GTrXLPolicy.__init__).keys() | SB3_POLICY_ARGUMENTS.keys()
    assert parameters(policy.__init__).keys() <= known


def test_positional_arguments_have_order_of_sb3():
    names = [
        name
        for name, each in parameters(GTrXLPPO.__init__).items()
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert names == list(parameters(PPO.__init__))[: len(names)]


@pytest.mark.parametrize("name", PPO_SB3_ARGUMENTS)
def test_rejected_argument_names_alternative(name):
    with pytest.raises(TypeError, match=f"^GTrXLPPO takes no argument '{name}': [^\n]*$"):
        small_agent("CartPole-v1", **{name: object()})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("buffer_size", r"no replay buffer; n_steps and n_envs set the size of a rollout"),
        ("learning_starts", "no replay buffer"),
        ("replay_buffer_class", "no replay buffer"),
        ("tau", "no target network"),
        ("train_freq", "use n_steps"),
        ("gradient_steps", "use n_epochs"),
    ],
)
def test_arguments_of_off_policy_agents_are_rejected_with_a_reason(name, advice):
    with pytest.raises(TypeError, match=f"^GTrXLPPO takes no argument '{name}': .*{advice}"):
        GTrXLPPO("MlpPolicy", "CartPole-v1", **{name: 1})


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_every_argument_of_off_policy_agents_is_known_or_has_no_counterpart(algorithm):
    known = parameters(GTrXLPPO.__init__).keys() | PPO_SB3_ARGUMENTS.keys()
    special = {"target_entropy", "use_sde_at_warmup"}
    assert parameters(algorithm.__init__).keys() <= known | special


@pytest.mark.parametrize("name", SB3_POLICY_ARGUMENTS)
def test_rejected_policy_argument_names_alternative(name):
    with pytest.raises(TypeError, match=f"^MlpGTrXLPolicy takes no argument '{name}': [^\n]*$"):
        small_agent("CartPole-v1", policy_kwargs={name: object()})


def test_net_arch_names_the_core():
    with pytest.raises(TypeError, match=r"use core=gtrxl\(width=..., layers=..., feed_forward=...\)"):
        small_agent("CartPole-v1", policy_kwargs={"net_arch": [64, 64]})


def test_defaults_of_sb3_are_accepted():
    defaults = {name: each.default for name, each in parameters(PPO.__init__).items()}
    refused = {name: defaults[name] for name in PPO_SB3_ARGUMENTS.keys() & defaults}
    assert refused.keys() == {"rollout_buffer_class", "rollout_buffer_kwargs"}
    small_agent("CartPole-v1", **refused, policy_kwargs={"net_arch": None, "ortho_init": True})


@pytest.mark.parametrize("name", SB3_NAMES)
def test_policy_names_of_sb3(name, tmp_path):
    env = scripts(shifted(2), OBSERVATIONS[SB3_NAMES[name]])
    agent = small_agent(env, SB3_NAMES[name], loud=False)
    extractor = agent.policy_kwargs
    agent = GTrXLPPO(name, env, n_steps=16, segment_length=4, batch_size=16, policy_kwargs=extractor)
    assert type(agent.policy).__name__ == SB3_NAMES[name]
    agent.save(tmp_path / "agent")
    assert type(GTrXLPPO.load(tmp_path / "agent").policy) is type(agent.policy)


def test_a_policy_of_sb3_is_refused():
    with pytest.raises(TypeError, match=r"policy must be one of MlpGTrXLPolicy.*got .*ActorCriticPolicy"):
        GTrXLPPO(ActorCriticPolicy, "CartPole-v1", n_envs=8)


def test_custom_objects_replace_what_the_file_holds(tmp_path):
    small_agent("CartPole-v1").save(tmp_path / "agent")
    replaced = {"learning_rate": 0.5, "lr_schedule": lambda _: 0.4, "clip_range": lambda _: 0.3}
    agent = GTrXLPPO.load(tmp_path / "agent", custom_objects=replaced, clip_range=0.1, force_reset=True)
    assert (agent.learning_rate, agent.clip_range) == (0.5, 0.1)
    with pytest.raises(TypeError, match=r"takes no argument 'lr_schedule': use learning_rate"):
        GTrXLPPO.load(tmp_path / "agent", lr_schedule=lambda _: 0.0)


def test_learning_after_loading_needs_an_environment(tmp_path):
    small_agent("CartPole-v1").save(tmp_path / "agent")
    agent = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    with pytest.raises(ValueError, match=r"without an environment to train in.*load\(path, env=.*set_env"):
        agent.learn(48)
    agent.set_env("CartPole-v1")
    assert agent.learn(48).num_timesteps == 48


def test_normalize_advantage_false_keeps_advantages():
    """Without normalization the policy gradient grows with the scale of the rewards."""

    def objective_of(normalize):
        agent = small_agent(scripts(shifted(3)), normalize_advantage=normalize)
        buffer = next(iter(rollouts(agent, 1)))
        seen = []
        buffer.minibatches = lambda segments, advantages, *others: seen.append(advantages) or iter(())
        agent._update_policy(buffer.weight)
        return buffer.advantages, seen[0]

    raw, used = objective_of(False)
    assert torch.equal(raw, used)
    raw, used = objective_of(True)
    assert not torch.allclose(raw, used)


def test_values_are_clipped_as_in_sb3():
    before = torch.tensor([0.0, 1.0, -2.0, 5.0])
    values = torch.tensor([0.3, 0.2, -2.1, 5.0], requires_grad=True)
    clipped = clipped_values(values, before, 0.25)
    assert torch.allclose(clipped, torch.tensor([0.25, 0.75, -2.1, 5.0]))
    clipped.sum().backward()
    assert values.grad.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert clipped_values(values, before, None) is values


def test_value_clipping_is_in_units_of_the_deviation_of_returns():
    agent = small_agent(scripts(shifted(3)), clip_range_vf=lambda progress: 0.2 * progress)
    assert small_agent(scripts(shifted(3))).objective().clip_range_vf is None
    agent.policy.value_net.variance.fill_(25.0)
    agent._current_progress_remaining = 0.5
    assert agent.objective().clip_range_vf == pytest.approx(0.1 * 5)


@pytest.mark.thorough
def test_a_tight_bound_keeps_values_near_those_of_the_rollout():
    def weight(bound, learning_rate):
        agent = small_agent(
            scripts(shifted(3)),
            clip_range_vf=bound,
            n_epochs=20,
            learning_rate=learning_rate,
            policy_kwargs={"optimizer_class": torch.optim.SGD},  # no momentum
        )
        for _ in rollouts(agent, 1):
            agent.train()
        return agent.policy.value_net.weight.detach()

    rescaled = weight(None, 1e-12)  # by the statistics of the returns alone
    moved = {bound: (weight(bound, 0.1) - rescaled).abs().max() for bound in (1e-4, None)}
    assert moved[1e-4] < 0.5 * moved[None]


@pytest.mark.parametrize("bound", [0, -0.1, float("nan")])
def test_invalid_value_clipping_is_rejected(bound):
    with pytest.raises(ValueError, match=r"clip_range_vf must be"):
        small_agent("CartPole-v1", clip_range_vf=bound)


def test_flattened_images_warn():
    env = scripts(shifted(2), OBSERVATIONS["CnnGTrXLPolicy"])
    with pytest.warns(UserWarning, match=r"flattens images of shape .*use 'CnnGTrXLPolicy'"):
        small_agent(env, "MlpGTrXLPolicy")


@pytest.mark.parametrize(
    "space",
    [spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(0.0, 1.0, (3, 40, 40), np.float32)],
    ids=["too small for NatureCNN", "no image"],
)
def test_no_warning_if_flattening_is_needed(space):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(scripts(shifted(2), space), "MlpGTrXLPolicy")


@pytest.mark.parametrize("kind", ACTIONS)
def test_forward_equals_rollout(kind):
    """Stepwise actions, values and log probabilities of an episode equal those of the rollout."""
    agent = small_agent(scripts(shifted(3), action_space=ACTIONS[kind]))
    buffer = next(iter(rollouts(agent, 1)))
    agent = small_agent(scripts(shifted(3), action_space=ACTIONS[kind]))
    agent.policy.set_training_mode(False)
    state, starts = None, torch.ones(3)
    torch.manual_seed(0)
    for step in range(buffer.n_steps):
        obs = buffer.obs[:, step]
        distribution, _ = agent.policy.get_distribution(obs, state, starts)
        values = agent.policy.predict_values(obs, state, starts)
        torch.testing.assert_close(values, buffer.values[:, step])
        log_probs = distribution.log_prob(buffer.actions[:, step])
        torch.testing.assert_close(log_probs, buffer.log_probs[:, step])
        _, again, _, following = agent.policy(obs, state, starts)
        assert torch.equal(values, again)
        state = agent.policy.observe_action(following, buffer.actions[:, step])
        starts = buffer.dones[:, step]


def test_forward_of_first_steps():
    env = scripts(shifted(3), action_space=ACTIONS["Box of two axes"])
    agent = small_agent(env)
    obs, _ = agent.policy.obs_to_tensor(env.reset())
    actions, values, log_probs, state = agent.policy.forward(obs, deterministic=True)
    assert actions.shape == (3, 2, 3)
    assert values.shape == log_probs.shape == (3,)
    assert not values.requires_grad
    chosen, _ = agent.predict(obs.numpy(), deterministic=True)
    np.testing.assert_array_equal(np.clip(actions.numpy(), -1, 2), chosen)
    with pytest.raises(ValueError, match=r"the state is of 3 environments, the observation of 2"):
        agent.policy.forward(obs[:2], state)
