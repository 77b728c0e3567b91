"""Published hyperparameters and the validation of settings.

Each preset is a dict of arguments: ``DecisionTransformer("rlxf/hopper/medium-v0", **KZL)``.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.type_aliases import Schedule

from rlxf.agents.decision_transformer.core import decision_transformer
from rlxf.agents.decision_transformer.objectives import MaximumEntropy
from rlxf.data import DatasetError, Trajectories
from rlxf.data.spaces import action_mismatch, observation_mismatch

if TYPE_CHECKING:
    from rlxf.agents.offline.algorithm import OfflineAlgorithm


KZL: dict[str, Any] = {
    "context_length": 20,
    "batch_size": 64,
    "learning_rate": 1e-4,
    "weight_decay": 1e-4,
    "warmup_updates": 10_000,
    "max_grad_norm": 0.25,
    "return_scale": 1000.0,
    "core": decision_transformer(width=128, layers=3, heads=1, dropout=0.1),
}
"""Preset of the Decision Transformer paper for Hopper, HalfCheetah and Walker2d, for 100,000 updates.

Source: Chen et al. 2021, arXiv:2106.01345, appendix A; warm-up and return scale are those of their code."""

ODT: dict[str, Any] = {
    "context_length": 20,
    "batch_size": 256,
    "learning_rate": 1e-4,
    "weight_decay": 5e-4,
    "warmup_updates": 10_000,
    "max_grad_norm": 0.25,
    "return_scale": 1000.0,
    "objective": MaximumEntropy(temperature=0.1),
    "core": decision_transformer(width=512, layers=4, heads=4, dropout=0.1),
}
"""Preset of the Online Decision Transformer paper for Hopper; with AdamW, where the paper uses LAMB.

Source: Zheng et al. 2022, arXiv:2202.05607, appendix C; the return scale is that of their code."""


def check_sizes(**sizes: int | None) -> None:
    """Check that each size is None or an integer of at least 1.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is less than 1.
    """
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_no_policy(dataset: Any) -> None:
    """Raise TypeError if a policy of Stable-Baselines3 is given instead of the dataset."""
    if isinstance(dataset, str) and dataset.endswith("Policy"):
        raise TypeError(
            f"the first argument is a dataset, not a policy, got {dataset!r}: pass a Minari id, e.g. "
            f"'mujoco/hopper/medium-v0', and the network as core=decision_transformer(...)"
        )


def check_returns(trajectories: Trajectories) -> None:
    """Raise DatasetError unless all returns-to-go are finite; those of Minari datasets always are."""
    finite = np.isfinite(trajectories.return_to_go)
    if not finite.all():
        step = int(np.argmin(finite))
        raise DatasetError(
            f"the return to go of step {step} is {trajectories.return_to_go[step]}; correct the rewards of "
            f"that episode"
        )


def check_coefficients(
    learning_rate: float | Schedule,
    weight_decay: float,
    warmup_updates: int | None,
    max_grad_norm: float,
    return_scale: float | None,
) -> None:
    """Raise ValueError unless each coefficient is finite and in its range."""
    start = learning_rate(1.0) if callable(learning_rate) else learning_rate
    nonnegative = {"learning_rate": start, "weight_decay": weight_decay, "warmup_updates": warmup_updates}
    for name, value in nonnegative.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    for name, value in {"max_grad_norm": max_grad_norm, "return_scale": return_scale}.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be finite and more than 0, got {value}")


def space_mismatches(one: "OfflineAlgorithm", other: "OfflineAlgorithm") -> Iterator[tuple[str, str]]:
    """Yield the differences between the spaces of two agents: "observations" or "actions", and a description.

    Nothing is yielded if the spaces are equal.
    """
    pairs = {
        "observations": observation_mismatch(one.observation_space, other.observation_space),
        "actions": action_mismatch(one.action_space, other.action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            yield kind, mismatch


def check_weight_compatibility(source: "OfflineAlgorithm", agent: "OfflineAlgorithm") -> None:
    """Raise ValueError unless both agents have equal spaces and the same ``episode_length``."""
    for kind, mismatch in space_mismatches(source, agent):
        raise ValueError(f"the weights do not fit, their {kind} differ from those of the agent: {mismatch}")
    if source.episode_length != agent.episode_length:
        raise ValueError(
            f"the weights do not fit: they have {source.episode_length} time-step embeddings, the agent "
            f"{agent.episode_length}; build it with episode_length={source.episode_length}"
        )
