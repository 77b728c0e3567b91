"""The sizes at which agents are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer and of the rollouts it learns from.

    Args:
        width: features of a token C.
        layers: number of layers L.
        heads: attention heads.
        feed_forward: features inside the feed-forward sublayer F.
        memory: tokens remembered M.
        gated: GRU gates in place of plain residual sums.
        envs: environments E.
        steps: steps S of each environment between updates.
        segment: steps T through which gradients flow.
        minibatch: environment steps in a minibatch.
        epochs: passes over a rollout.
    """

    width: int
    layers: int
    heads: int
    feed_forward: int
    memory: int
    gated: bool
    envs: int = 32
    steps: int = 128
    segment: int = 64
    minibatch: int = 1024
    epochs: int = 3


SMALL = Shape(width=64, layers=2, heads=4, feed_forward=256, memory=128, gated=True)
"""Beside RecurrentPPO with 64 hidden units."""


def cleanrl_shape(gated: bool) -> Shape:
    """CleanRL's ppo_trxl.py as it comes: its transformer and its minibatches of 512 x 32 / 8 = 2,048 steps.

    A rollout has 128 steps here instead of 512. It must hold a whole episode of 119; what a step costs
    does not depend on it, as the minibatches stay the same.
    """
    return Shape(
        width=384, layers=3, heads=4, feed_forward=384, memory=119, gated=gated, segment=128, minibatch=2048
    )
