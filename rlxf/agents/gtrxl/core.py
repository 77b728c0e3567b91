"""The core that a Gated Transformer-XL is, and what PPO asks of any core."""

from stable_baselines3.common.vec_env import VecEnv

from rlxf.attention import (
    XL,
    Floater,
    GRUGate,
    LearnedAbsolute,
    Multiplicative,
    Performer,
    TransformerSpec,
    Tupe,
    Window,
    XLRelative,
)
from rlxf.attention.patterns.window import bounded
from rlxf.attention.residuals.base import Residual
from rlxf.envs.ids import spec_of

MEMORY_LENGTH = 128
ENDING = (LearnedAbsolute, Multiplicative, Tupe, Floater)
"""Positions that have a vector for so many tokens, or take all of them to reach the last one."""


def gtrxl(
    memory_length: int = MEMORY_LENGTH,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int | None = None,
    residual: Residual | None = None,
) -> TransformerSpec:
    """The Gated Transformer-XL: relative positions, memory of M tokens, gates, layer norm first.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.

    Args:
        memory_length: tokens remembered M. Every step sees itself and the M steps before it.
        width: features of a token.
        layers: number of layers. With each, what is remembered reaches M steps farther back.
        heads: attention heads; must divide the width.
        feed_forward: features inside the feed-forward sublayer; None for four times the width.
        residual: the gate; None for ``GRUGate(bias=2.0)``, the paper's best.
    """
    return TransformerSpec(
        width=width,
        layers=layers,
        heads=heads,
        feed_forward=feed_forward,
        position=XLRelative(),
        pattern=Window(memory_length + 1),
        memory=XL(memory_length),
        residual=GRUGate(bias=2.0) if residual is None else residual,
    )


def resolve_core(core: TransformerSpec | None, memory_length: int | None) -> TransformerSpec:
    """The core to build: the given one if it suits PPO, else `gtrxl` of the memory length.

    Raises:
        ValueError: if the length is less than 1, if both are given and disagree, or if the core
            cannot act as it learns.
        TypeError: if ``core`` is no `TransformerSpec`.
    """
    if memory_length is not None and memory_length < 1:
        raise ValueError(f"memory_length must be at least 1, got {memory_length}")
    if core is None:
        return gtrxl(MEMORY_LENGTH if memory_length is None else memory_length)
    if not isinstance(core, TransformerSpec):
        raise TypeError(f"core must be a TransformerSpec, got {core!r}")
    _check_core(core)
    assert core.memory is not None
    if memory_length not in (None, core.memory.length):
        raise ValueError(
            f"memory_length={memory_length} and the core's {core.memory} disagree; give only one of them"
        )
    return core


def check_endless(core: TransformerSpec) -> None:
    """Raise ValueError unless positions may go on counting, at the same cost: across episodes they do."""
    if isinstance(core.position, ENDING):
        raise ValueError(
            f"across_episodes=True counts positions on without end, and {core.position} ends or gets slower "
            f"with them; use a relative position, e.g. position=XLRelative()"
        )


def check_episode_length(core: TransformerSpec, env: VecEnv) -> None:
    """Raise ValueError if an episode may be longer than the core has positions.

    An episode that is truncated by its time limit has one observation more than steps: the value of the
    last one is bootstrapped. Environments that are not Gymnasium's, or have no limit, are not checked.
    """
    most = None if core.position is None else core.position.max_positions
    limit = None if most is None else getattr(spec_of(env), "max_episode_steps", None)
    if most is not None and limit is not None and most <= limit:
        raise ValueError(
            f"an episode has up to max_episode_steps={limit} steps, and so {limit + 1} observations, but "
            f"{core.position} has only {most} positions; use max_length={limit + 1} or a relative position"
        )


def _check_core(core: TransformerSpec) -> None:
    """Raise ValueError unless a step sees what a segment sees."""
    if not core.causal or core.cross_attention:
        raise ValueError("GTrXLPPO acts step by step: its core needs causal=True and cross_attention=False")
    if core.memory is None:
        raise ValueError("GTrXLPPO needs a core with memory, e.g. memory=XL(128), pattern=Window(129)")
    if core.memory.shows(core.pattern).reach > core.memory.length:
        raise ValueError(
            f"{core.pattern} sees farther than {core.memory} remembers, so steps and segments would "
            f"differ; use pattern={bounded(core.pattern, core.memory.length)}"
        )
    if core.dropout:
        raise ValueError(
            f"PPO compares what it did with what it would do: dropout must be 0, got {core.dropout}"
        )
    if isinstance(core.kernel, Performer) and core.kernel.redraw is not None:
        raise ValueError(
            f"PPO compares what it did with what it would do, and {core.kernel} draws its features anew in "
            f"between: set redraw=None"
        )
