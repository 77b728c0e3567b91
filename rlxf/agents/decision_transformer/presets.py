"""Configuration of Decision Transformers: arguments, specs of the transformer, published hyperparameters.

Each preset is a dict of arguments: ``DecisionTransformer("rlxf/hopper/medium-v0", **KZL)``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rlxf.agents.decision_transformer.objectives import (
    MaximumEntropy,
    Objective,
    objective_from_json,
    objective_to_json,
)
from rlxf.agents.offline.config import OfflineConfig
from rlxf.attention import Add, TransformerSpec
from rlxf.attention.residuals.base import Residual


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerConfig(OfflineConfig):
    """Arguments of `DecisionTransformer` that its checkpoints hold."""

    objective: Objective

    def check(self) -> None:
        """Check the core and the numbers.

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if the core is not causal or has cross-attention, or a value is out of range.
        """
        super().check()
        if not self.core.causal or self.core.cross_attention:
            raise ValueError(
                "a Decision Transformer is autoregressive: its core needs causal=True and cross_attention="
                f"False, got causal={self.core.causal}, cross_attention={self.core.cross_attention}"
            )

    def to_json(self) -> dict[str, Any]:
        """See `OfflineConfig`."""
        return super().to_json() | {"objective": objective_to_json(self.objective)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """See `OfflineConfig`."""
        return super().from_json({**stored, "objective": objective_from_json(stored["objective"])})


def decision_transformer(
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 1,
    feed_forward: int | None = None,
    dropout: float = 0.1,
    residual: Residual | None = None,
) -> TransformerSpec:
    """Return the spec of a GPT-2 without positional encoding; tokens carry an embedding of their time step.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3 and appendix A; the sizes are those for
    OpenAI Gym.

    Args:
        width: number of features C of a token.
        layers: number of layers.
        heads: number of attention heads; must divide the width.
        feed_forward: hidden width of the feed-forward sublayer; None for four times the width.
        dropout: dropout probability of attention weights and features in training.
        residual: combination of a sublayer's output with its input; None for ``Add()``.
    """
    return TransformerSpec(
        width=width,
        layers=layers,
        heads=heads,
        feed_forward=feed_forward,
        residual=Add() if residual is None else residual,
        dropout=dropout,
    )


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

ODT: dict[str, Any] = KZL | {
    "batch_size": 256,
    "weight_decay": 5e-4,
    "objective": MaximumEntropy(temperature=0.1),
    "core": decision_transformer(width=512, layers=4, heads=4, dropout=0.1),
}
"""Preset of the Online Decision Transformer paper for Hopper; with AdamW, where the paper uses LAMB.

Source: Zheng et al. 2022, arXiv:2202.05607, appendix C; the return scale is that of their code."""
