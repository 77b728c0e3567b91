"""Where a Decision Transformer would have done something else, had it left early."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlxf.agents.calibration import Calibration, confidence_of
from rlxf.agents.decision_transformer.model import NEWEST_STATE_TOKEN, DecisionTransformerModel
from rlxf.envs.trajectories import Windows

BATCH = 512
"""Windows that are read at a time."""


def calibrated(
    model: DecisionTransformerModel,
    windows: Windows,
    thresholds: tuple[float, ...],
    alpha: float,
    delta: float,
    steps: int,
    generator: torch.Generator,
    device: torch.device,
) -> Calibration:
    """What came of each threshold, at some steps of each episode.

    Episodes are the independent samples: the loss of one is the share of its steps at which the action is
    another one than with all passes. While acting the newest token leaves, and nothing else: so one reading
    with all passes tells of every threshold.

    Args:
        model: its depth is `CALM`.
        windows: of one step, with all that is read before it.
        thresholds: the safest first.
        alpha: promised risk: the mean of these losses.
        delta: probability with which the promise may be broken.
        steps: of an episode, drawn with replacement.
        generator: of the draw, on the CPU.
        device: of the model.
    """
    chosen = _drawn(windows, steps, generator)
    parts = [_exits(model, windows, some, device) for some in chosen.flatten().split(BATCH)]
    confidence, same = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    sure = confidence >= torch.tensor(thresholds, device=device)[:, None, None]
    leaves = torch.cat([sure, torch.ones_like(sure[:, :1])], dim=1).long().argmax(dim=1)
    other = ~same.gather(0, leaves).unflatten(1, tuple(chosen.shape))
    losses = other.double().mean(dim=-1).T.cpu().numpy()
    depth = (leaves.double() + 1).mean(dim=-1).cpu().numpy()
    return Calibration.of(thresholds, losses, depth, alpha, delta)


def _drawn(windows: Windows, steps: int, generator: torch.Generator) -> Tensor:
    """Some steps of each episode, counted over all the data, (episodes, steps)."""
    offsets, lengths = windows.trajectories.offsets, windows.trajectories.lengths
    share = torch.rand(len(lengths), steps, generator=generator)
    within = (share * torch.from_numpy(np.array(lengths))[:, None]).long()
    return within + torch.from_numpy(np.array(offsets[:-1]))[:, None]


@torch.no_grad()
def _exits(
    model: DecisionTransformerModel, windows: Windows, steps: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Confidence behind each pass but the last (N - 1, B); whether the action is that of the last, (N, B)."""
    depth = confidence_of(model.transformer)
    read = model.steps(windows.starting_at(steps.numpy()).to(device))
    exits = model.exits(read, NEWEST_STATE_TOKEN)
    outputs, states = exits.outputs[:, :, 0], exits.states[:, :, 0]
    actions = model.loss.head.choose(outputs, deterministic=True)
    same = model.tokens.actions.alike(actions, actions[-1:])
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    found = [
        depth.confidence(n, before[n], states[n], partial(model.lead, outputs[n]))
        for n in range(len(states) - 1)
    ]
    return torch.stack(found), same
