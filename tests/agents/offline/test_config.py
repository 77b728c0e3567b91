"""Files of offline agents hold only settings that the constructors accept."""

import pytest

from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.mlp.behavior_cloning import BehaviorCloningConfig
from rlxf.agents.pretraining import PretrainingConfig


@pytest.mark.parametrize(
    ("config", "name", "refused", "accepted"),
    [
        (DecisionTransformerConfig, "weight_averaging", (0, 1), (0.5, None)),
        (DecisionTransformerConfig, "validation_fraction", (0.0, 1.0), (0.1, None)),
        (DecisionTransformerConfig, "batch_size", (0, 2**63), (1,)),
        (BehaviorCloningConfig, "dropout", (1.0,), (0, 0.5)),
        (BehaviorCloningConfig, "best", (0,), (1,)),
        (PretrainingConfig, "mask_probability", (0,), (1,)),
    ],
)
def test_ranges_of_files_are_those_of_the_constructor(config, name, refused, accepted):
    rule = config.rules()[name]
    assert not any(map(rule.holds, refused))
    assert all(map(rule.holds, accepted))
