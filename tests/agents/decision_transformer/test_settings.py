"""Tests of the published presets, which equal the papers and can be trained, and of the configuration."""

from dataclasses import FrozenInstanceError, replace

import pytest

from rlxf import DecisionTransformer, TransformerSpec
from rlxf.agents.decision_transformer import KZL, ODT, Imitation, MaximumEntropy
from rlxf.agents.decision_transformer.presets import DecisionTransformerConfig
from rlxf.training import linear
from rlxf.training.serialization import dump_json, load_json
from tests.agents.decision_transformer.worlds import small_agent

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
