"""Settings of `DecisionTransformer`, and its presets."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from rlxf.agents.decision_transformer.auxiliary import AuxiliaryWeights
from rlxf.agents.decision_transformer.conditioning import CONDITIONINGS, Conditioning, TargetReturn
from rlxf.agents.offline.config import Converter, technique_converter
from rlxf.agents.offline.objectives import OBJECTIVES, Imitation, MaximumEntropy, Objective
from rlxf.agents.offline.trajectory_model import (
    TrajectoryConfig,
)
from rlxf.attention import Add, TransformerSpec
from rlxf.attention.residuals.base import Residual
from rlxf.training.json_rules import Rule, choice, number

ContextKind = Literal["window", "episode"]
"""Steps that an action depends on: those of a window, or all those of the episode."""
CONTEXT_RULE = choice(*get_args(ContextKind))
"""Rule of the context."""


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerConfig(TrajectoryConfig):
    """Arguments of `DecisionTransformer` that its checkpoints hold."""

    BOUNDS: ClassVar[dict[str, Rule]] = TrajectoryConfig.BOUNDS | {
        "context": CONTEXT_RULE,
        "state_loss_weight": number(0),
        "return_loss_weight": number(0),
    }
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = TrajectoryConfig.JSON | {
        "objective": technique_converter("objective", OBJECTIVES),
        "conditioning": technique_converter("conditioning", CONDITIONINGS),
    }
    TYPES: ClassVar[dict[str, tuple[type, ...]]] = TrajectoryConfig.TYPES | {
        "objective": tuple(OBJECTIVES.values()),
        "conditioning": tuple(CONDITIONINGS.values()),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = TrajectoryConfig.DEFAULTS | {
        "objective": Imitation(),
        "conditioning": TargetReturn(),
    }
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = (
        *TrajectoryConfig.MODEL_SETTINGS,
        "objective",
        "conditioning",
        "context",
        "state_loss_weight",
        "return_loss_weight",
    )
    context: ContextKind
    objective: Objective
    conditioning: Conditioning
    state_loss_weight: float = 0.0
    return_loss_weight: float = 0.0

    @property
    def acting_windows(self) -> int:
        """See `TrajectoryConfig`."""
        return self.conditioning.acting_windows(self.context_length)

    @property
    def auxiliary(self) -> AuxiliaryWeights:
        """Weights of the auxiliary losses."""
        return AuxiliaryWeights(self.state_loss_weight, self.return_loss_weight)

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
        self.auxiliary.check(self.core, self.context_length, self.conditioning)
        self.objective.check_core(self.core, self.context)
        self.objective.check_windows(self.context_length)
        self.objective.check_accumulation(self.gradient_accumulation_steps)
        if self.context == "episode" and not self.conditioning.needs_target:
            raise ValueError(
                f"conditioning={self.conditioning} predicts returns from a window of steps, got "
                f"context='episode'; use context='window' or conditioning=TargetReturn()"
            )


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
    residual = Add() if residual is None else residual
    return TransformerSpec(
        width=width, layers=layers, heads=heads, feed_forward=feed_forward, residual=residual, dropout=dropout
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

Source: Chen et al. 2021, arXiv:2106.01345, appendix A; warm-up and return scale are those of their code.
Named after the authors' GitHub account, kzl."""

ODT: dict[str, Any] = KZL | {
    "batch_size": 256,
    "weight_decay": 5e-4,
    "objective": MaximumEntropy(temperature=0.1),
    "core": decision_transformer(width=512, layers=4, heads=4, dropout=0.1),
}
"""Preset of the Online Decision Transformer paper for Hopper; with AdamW, where the paper uses LAMB.

Source: Zheng et al. 2022, arXiv:2202.05607, appendix C; the return scale is that of their code."""
