"""Sizes for comparisons of agents."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer and of its rollouts.

    Args:
        width: features per token C.
        layers: number of layers L.
        heads: attention heads.
        feed_forward: features inside the feed-forward sublayer F.
        memory: memory length M, in tokens.
        gated: whether residual connections are GRU gates instead of sums.
        envs: number of environments E.
        steps: steps S per environment and rollout.
        segment: length T of segments for backpropagation through time.
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
"""Sizes for the comparison with RecurrentPPO with 64 hidden units."""


def cleanrl_shape(gated: bool) -> Shape:
    """Return the sizes of CleanRL's ppo_trxl.py, with its minibatches of 512 x 32 / 8 = 2,048 steps.

    A rollout has 128 steps instead of 512; it must contain a whole episode of 119 steps. The cost per step
    does not depend on the rollout length, as the minibatches are equal.
    """
    return Shape(
        width=384, layers=3, heads=4, feed_forward=384, memory=119, gated=gated, segment=128, minibatch=2048
    )
