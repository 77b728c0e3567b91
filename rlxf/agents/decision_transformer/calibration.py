"""Risk of early exits of a Decision Transformer with a context window."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.common.calibration import calibratable_exit
from rlxf.agents.decision_transformer.model import NEWEST_DECISION_TOKEN, DecisionTransformerModel
from rlxf.data import Windows

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
    rule = calibratable_exit(model.transformer)
    device = next(model.parameters()).device
    inputs = model.steps(windows.starting_at(steps.numpy()).to(device))
    exits = model.exits(inputs, NEWEST_DECISION_TOKEN)
    outputs, states = exits.outputs[:, :, 0], exits.states[:, :, 0]
    actions = model.loss.head.choose(outputs, deterministic=True)
    same = model.tokens.actions.same_action(actions, actions[-1:])
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    confidence = [
        rule.confidence(n, before[n], states[n], partial(model.confidence_margin, outputs[n]))
        for n in range(len(states) - 1)
    ]
    return torch.stack(confidence), same
