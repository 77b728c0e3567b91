"""Features extractors and heads of users are checked before the first step."""

import pytest
import torch
from gymnasium.spaces.utils import flatdim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl import MlpGTrXLPolicy
from rlxf.agents.gtrxl.own_modules import depends_on_mode
from rlxf.agents.gtrxl.value_head import PopArtHead
from tests.agents.gtrxl.worlds import ACTIONS, DICT, VECTOR, parameters, same, scripts, small_core

SIZES = {"n_steps": 16, "segment_length": 4, "batch_size": 16, "device": "cpu", "seed": 0}


class Own(BaseFeaturesExtractor):
    """Features of 5 numbers that a function changes."""

    def __init__(self, observation_space, change=lambda features: features, layers=()):
        super().__init__(observation_space, features_dim=5)
        self.layers = nn.Sequential(nn.Linear(flatdim(observation_space), 5), *layers)
        self.change = change

    def forward(self, observations):
        parts = observations.values() if isinstance(observations, dict) else [observations]
        return self.change(self.layers(torch.cat([part.flatten(1) for part in parts], dim=1)))


def agent_of(policy="MlpPolicy", space=VECTOR, actions="Discrete", use_sde=False, **options):
    kwargs = {"features_extractor_class": Own, "features_extractor_kwargs": options} if options else None
    env = scripts([(0,)] * 2, space, ACTIONS[actions])
    return GTrXLPPO(policy, env, core=small_core(), policy_kwargs=kwargs, use_sde=use_sde, **SIZES)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda features: features[:, :4], r"got torch.float32 of shape \(1, 4\)"),
        (lambda features: features[0], r"got torch.float32 of shape \(5,\)"),
        (lambda features: features.double(), r"got torch.float64 of shape \(1, 5\)"),
        (lambda features: (features, features), "got tuple"),
    ],
    ids=["size", "axes", "dtype", "type"],
)
def test_features_of_another_shape_or_dtype_are_refused(change, given):
    with pytest.raises(ValueError, match=rf"Own, whose features_dim is 5, must return a .*\(1, 5\), {given}"):
        agent_of(change=change)


@pytest.mark.parametrize(("policy", "space"), [("MlpPolicy", VECTOR), ("MultiInputPolicy", DICT)])
def test_features_extractors_are_trained_after_the_check(policy, space):
    agent = agent_of(policy, space, layers=[nn.LayerNorm(5)])
    assert all(module.training for module in agent.policy.features_extractor.modules())
    before = parameters(agent)
    agent.learn(64)
    assert not same(before, parameters(agent))


class Heads(MlpGTrXLPolicy):
    """Policy whose heads equal the default ones."""

    def build_heads(self, log_std_init):
        super().build_heads(log_std_init)
        self.replace(self.core.width)

    def replace(self, width):
        """Replace heads."""


def noisy(features):
    return features + 0 * torch.rand(1)


def test_checks_draw_no_random_numbers():
    assert same(*(parameters(agent_of(policy)) for policy in ("MlpPolicy", Heads)))
    assert same(*(parameters(agent_of(change=change)) for change in (torch.relu, noisy)))


class OtherValues(PopArtHead):
    def forward(self, latent):
        return super().forward(latent).squeeze(-1)


def set_value_net(build):
    return lambda policy, width: setattr(policy, "value_net", build(width))


def set_action_net(size):
    return lambda policy, width: setattr(policy, "action_net", nn.Linear(width, size))


def remove_log_std(policy, width):
    policy.register_parameter("log_std", None)


def remove_action_head(policy, width):
    del policy.action_head


REFUSED = {
    "values": ("Discrete", set_value_net(OtherValues), r"value_net of Mine .* \(2, 1\), .* \(2,\)"),
    "first values": ("Discrete", set_value_net(PopArtHead), "must return 0 before the first update"),
    "discrete": ("Discrete", set_action_net(5), r"action_net of Mine .* \(2, 3\), .* \(2, 5\)"),
    "choices": ("MultiDiscrete", set_action_net(2), r"shape \(2, 5\), got .* \(2, 2\)"),
    "log_std": ("Box", remove_log_std, r"log_std of Mine must have the shape \(2,\), got None"),
}


@pytest.mark.parametrize(("actions", "replace", "message"), REFUSED.values(), ids=REFUSED)
def test_heads_of_another_size_are_refused(actions, replace, message):
    with pytest.raises(ValueError, match=message):
        agent_of(type("Mine", (Heads,), {"replace": replace}), actions=actions)


def test_heads_for_state_dependent_noise_are_checked():
    mine = type("Mine", (Heads,), {"replace": set_action_net(4)})
    with pytest.raises(ValueError, match=r"shape \(2, 2\), got .* \(2, 4\)"):
        agent_of(mine, actions="Box", use_sde=True)


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (set_value_net(lambda width: nn.Linear(width, 1)), "Mine must be a PopArtHead, .* got Linear"),
        (remove_action_head, "build_heads of Mine must set action_head"),
    ],
)
def test_heads_of_another_type_are_refused(replace, message):
    with pytest.raises(TypeError, match=message):
        agent_of(type("Mine", (Heads,), {"replace": replace}))


def set_log_std(*shape):
    return lambda policy, width: setattr(policy, "log_std", nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("shape", [(1,), (1, 2), ()], ids=str)
def test_actions_may_share_a_standard_deviation(shape):
    mine = type("Mine", (Heads,), {"replace": set_log_std(*shape)})
    agent = agent_of(mine, actions="Box")
    assert agent.policy.mean_std().item() == 1
    agent.learn(64)
    assert agent.policy.log_std.shape == shape
    assert agent.policy.log_std.any()


@pytest.mark.parametrize(
    ("use_sde", "shape"), [(False, (3,)), (False, (2, 2)), (True, (1,)), (True, (16, 1))]
)
def test_standard_deviations_of_another_shape_are_refused(use_sde, shape):
    mine = type("Mine", (Heads,), {"replace": set_log_std(*shape)})
    with pytest.raises(ValueError, match="log_std of Mine must have the shape"):
        agent_of(mine, actions="Box", use_sde=use_sde)


def test_first_values_do_not_matter_for_a_file(tmp_path):
    agent = agent_of(type("Mine", (Heads,), {}))
    agent.learn(64).save(tmp_path / "agent.zip")
    other = type("Mine", (Heads,), {"replace": set_value_net(PopArtHead)})
    assert same(parameters(agent), parameters(GTrXLPPO.load(tmp_path / "agent.zip", policy=other)))


@pytest.mark.parametrize("actions", ACTIONS)
def test_heads_of_the_right_size_are_accepted(actions):
    assert agent_of(Heads, actions=actions).policy.value_net.training


MODES = [nn.Dropout(0.1), nn.BatchNorm1d(5), nn.RReLU(), nn.InstanceNorm1d(5, track_running_stats=True)]
NO_MODES = [nn.Dropout(0.0), nn.LayerNorm(5), nn.InstanceNorm1d(5), nn.GRU(5, 5), nn.Tanh()]


def test_modules_that_depend_on_the_mode():
    assert all(map(depends_on_mode, [*MODES, nn.GRU(5, 5, 2, dropout=0.1)]))
    assert not any(map(depends_on_mode, NO_MODES))


@pytest.mark.parametrize("layer", MODES[:2], ids=str)
def test_layers_that_depend_on_the_mode_give_a_warning(layer):
    with pytest.warns(
        UserWarning, match=rf"features_extractor.layers.1 is {type(layer).__name__}.*ratio of PPO"
    ):
        agent_of(layers=[layer])


class Frozen(nn.BatchNorm1d):
    """Layer that remains in evaluation mode."""

    def train(self, mode=True):
        return super().train(False)


def test_frozen_layers_give_no_warning(recwarn):
    agent = agent_of(layers=[Frozen(5)])
    assert not [each for each in recwarn if "ratio of PPO" in str(each.message)]
    assert all(module.training for module in agent.policy.modules())
