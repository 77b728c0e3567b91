"""Decision Transformer model: configuration and presets, from steps to actions, and its early exits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlxf.agents.common.calibration import calibratable_exit, check_exit_confidence
from rlxf.agents.decision_transformer.heads import Head, MaximumEntropy, Objective, objective_from_json
from rlxf.agents.offline.config import DatasetInfo, OfflineConfig
from rlxf.agents.offline.trajectory_model import TOKENS, ContextWindow, TrajectoryModel
from rlxf.attention import Add, ExitTargets, State, TokenIndex, TransformerSpec
from rlxf.attention.depth.base import ExitOutputs
from rlxf.attention.depth.calm import probability_margin
from rlxf.attention.registry import technique_to_json
from rlxf.attention.residuals.base import Residual
from rlxf.data import WindowBatch, Windows


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
        return super().to_json() | {"objective": technique_to_json(self.objective)}

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


STATE_TOKENS = slice(1, None, TOKENS)
"""Slice of the state tokens, which predict actions: they attend to return and state, not to the action."""
NEWEST_STATE_TOKEN = slice(1 - TOKENS, 2 - TOKENS)
"""Slice of the last state token."""


class DecisionTransformerModel(TrajectoryModel):
    """Model ``steps -> tokens -> transformer -> head``, causal over all tokens.

    If the core has a memory, the first steps of a window are burn-in: they are processed without gradient,
    and the transformer's state after them is the memory of the K following steps.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the agent.
    """

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        check_exit_confidence(config.core.depth, info.action_space)
        super().__init__(info, normalization, config)
        self.loss = config.objective.build(config.core.width, self.tokens.actions)
        self.init_weights(self.loss)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the "loss" and its parts, averaged over the real (unpadded) steps of B windows.

        The transformer's penalty, such as that of adaptive spans, is added to the loss of the objective.
        """
        steps, first = self.steps(batch), self.burn_in_steps
        exits = self.exits(steps, STATE_TOKENS)
        actions, mask = batch.actions[:, first:], batch.mask[:, first:]
        actions = actions.expand(len(exits.loss_weights), *actions.shape)
        parts = self.loss(exits.outputs, actions, mask * exits.loss_weights[:, None, None])
        return self.add_penalty(self.add_exit_loss(parts, exits, actions, steps.between(first)))

    def add_exit_loss(
        self, parts: dict[str, Tensor], exits: ExitOutputs, actions: Tensor, steps: ContextWindow
    ) -> dict[str, Tensor]:
        """Add the loss of exit prediction, if the depth has one, to the parts of a loss.

        Args:
            parts: "loss" and its parts.
            exits: outputs of N layers at the state tokens of the steps.
            actions: the correct actions, (N, B, K, ...).
            steps: steps (B, K) of the state tokens.
        """
        if exits.auxiliary_loss is None:
            return parts
        extra = exits.auxiliary_loss(self._exit_targets(exits.outputs.detach(), actions, steps))
        return (
            parts if extra is None else parts | {"loss": parts["loss"] + extra, "exit_prediction_loss": extra}
        )

    def loss_count(self, batch: WindowBatch) -> Tensor:
        """Count the real (unpadded) steps in the loss."""
        return batch.mask[:, self.burn_in_steps :].sum()

    @torch.no_grad()
    def _exit_targets(self, outputs: Tensor, actions: Tensor, steps: ContextWindow) -> ExitTargets:
        """Compute the exit targets for the outputs (N, B, K, C) of N layers."""
        head: Head = self.loss.head
        chosen = head.choose(outputs, deterministic=True)
        correct, same = (self.tokens.actions.same_action(chosen, other) for other in (actions, chosen[-1:]))
        index = steps.index.at(STATE_TOKENS)
        index = TokenIndex(index.position // TOKENS, index.episode)
        return ExitTargets(-head.error(outputs, actions), correct, same, index)

    def exits(self, steps: ContextWindow, output_slice: slice) -> ExitOutputs:
        """Return the outputs after each layer at the tokens of the slice ``output_slice``."""
        inputs = self._transformer_inputs(steps)
        exits = self.transformer.exits(**inputs, output_slice=output_slice)
        self.check_outputs(exits.outputs[-1], inputs, output_slice)
        return exits

    def outputs(self, steps: ContextWindow, output_slice: slice = STATE_TOKENS) -> Tensor:
        """Return the outputs at the tokens of the slice ``output_slice``.

        At the state tokens these are the inputs of the head, (B, W - burn_in_steps, C).
        """
        inputs = self._transformer_inputs(steps)
        y = self.transformer.outputs(**inputs, output_slice=output_slice)
        self.check_outputs(y, inputs, output_slice)
        return y

    @torch.no_grad()
    def newest_output(self, steps: ContextWindow) -> Tensor:
        """Return the output at the newest state token of each row, (B, C), to act by.

        Unlike `outputs`, this method exits early where the depth allows it.
        """
        inputs, newest = self._transformer_inputs(steps), NEWEST_STATE_TOKEN
        y = self.transformer.early_outputs(
            **inputs, output_slice=newest, confidence_fn=self.confidence_margin
        )
        self.check_outputs(y, inputs, newest)
        return y[:, 0]

    def confidence_margin(self, y: Tensor) -> Tensor:
        """Compute the margin between the most and the second most likely action for outputs (..., C)."""
        head: Head = self.loss.head
        return probability_margin([logits.softmax(dim=-1) for logits in head.logits(y)])

    def _transformer_inputs(self, steps: ContextWindow) -> dict[str, Any]:
        """Return the arguments of the transformer: tokens, their index and the memory of earlier steps."""
        index, state = steps.index, None
        if self.burn_in_steps:
            state = self._burn_in(steps.between(self._padding(steps), self.burn_in_steps))
            steps = steps.between(self.burn_in_steps)
        tokens = self.tokens(steps)
        return {"x": tokens, "index": index.last(tokens.shape[1]), "state": state}

    def _padding(self, steps: ContextWindow) -> int:
        """Count the burn-in columns that hold no step of any row; episodes may be shorter than the memory."""
        return int((steps.mask[:, : self.burn_in_steps].cumsum(1).sum(0) == 0).sum())

    @torch.no_grad()
    def _burn_in(self, steps: ContextWindow) -> State | None:
        if not steps.mask.shape[1]:
            return None
        return self.transformer.next_state(self.tokens(steps), steps.index)


WINDOWS_PER_PASS = 512
"""Number of windows in one forward pass."""


def measure_exits(
    model: DecisionTransformerModel,
    windows: Windows,
    thresholds: tuple[float, ...],
    steps: int,
    generator: torch.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Measure losses (episodes, R) and mean depth (R,) of R thresholds, at random steps of each episode.

    Episodes are the independent samples. The loss of an episode is the fraction of its sampled steps at which
    the early-exit action differs from the full-depth action. While acting, only the newest token exits early.
    One full-depth forward pass is therefore sufficient for all thresholds.

    Args:
        model: its depth is `CALM`.
        windows: windows of one step, with the whole context before it as burn-in.
        thresholds: the safest first.
        steps: number of steps drawn from each episode, with replacement.
        generator: random generator of the draws, on the CPU.
    """
    chosen = _draw_steps(windows, steps, generator)
    parts = [_exits(model, windows, batch) for batch in chosen.flatten().split(WINDOWS_PER_PASS)]
    confidence, same = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    confident = confidence >= torch.tensor(thresholds, device=confidence.device)[:, None, None]
    exits = torch.cat([confident, torch.ones_like(confident[:, :1])], dim=1).long().argmax(dim=1)
    different = ~same.gather(0, exits).unflatten(1, tuple(chosen.shape))
    losses = different.double().mean(dim=-1).T.cpu().numpy()
    depth = (exits.double() + 1).mean(dim=-1).cpu().numpy()
    return losses, depth


def _draw_steps(windows: Windows, steps: int, generator: torch.Generator) -> Tensor:
    """Draw steps of each episode; return their indices in the whole dataset, (episodes, steps)."""
    offsets, lengths = windows.trajectories.offsets, windows.trajectories.lengths
    uniform = torch.rand(len(lengths), steps, generator=generator)
    within = (uniform * torch.from_numpy(np.array(lengths))[:, None]).long()
    return within + torch.from_numpy(np.array(offsets[:-1]))[:, None]


@torch.no_grad()
def _exits(model: DecisionTransformerModel, windows: Windows, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence after each layer except the last, (N - 1, B), and an agreement mask (N, B).

    The mask is True where the action after a layer equals the action after the last layer.
    """
    rule, device = calibratable_exit(model.transformer), next(model.parameters()).device
    inputs = model.steps(windows.starting_at(steps.numpy()).to(device))
    exits = model.exits(inputs, NEWEST_STATE_TOKEN)
    outputs, states = exits.outputs[:, :, 0], exits.states[:, :, 0]
    actions = model.loss.head.choose(outputs, deterministic=True)
    same = model.tokens.actions.same_action(actions, actions[-1:])
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    confidence = [
        rule.confidence(n, before[n], states[n], partial(model.confidence_margin, outputs[n]))
        for n in range(len(states) - 1)
    ]
    return torch.stack(confidence), same
