"""Specification of the Gated Transformer-XL core, and validation of cores for PPO."""

from typing import Any

from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.calibration import check_exit_confidence
from rlxf.agents.common.cores import check_state, check_token_by_token
from rlxf.agents.gtrxl.config import PPOConfig
from rlxf.attention import XL, GRUGate, TransformerSpec, Window, XLRelative
from rlxf.attention.memory.base import NoMemory
from rlxf.attention.residuals.base import Residual
from rlxf.envs.filler_rows import has_filler_rows, shows_filler_rows
from rlxf.envs.specs import spec_of
from rlxf.utils.checks import as_whole_number
from rlxf.utils.warnings import warn_user

AGENT = "GTrXLPPO"
MEMORY_LENGTH = 128


def gtrxl(
    memory_length: int = MEMORY_LENGTH,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int | None = None,
    residual: Residual | None = None,
) -> TransformerSpec:
    """Return the Gated Transformer-XL: relative positions, memory of M tokens, gates, pre-layer norm.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.

    Args:
        memory_length: tokens M in memory. Every step attends to itself and the M steps before it.
        width: features of a token.
        layers: number of layers. Each layer extends the receptive field by M steps.
        heads: attention heads; must divide the width.
        feed_forward: features inside the feed-forward sublayer; None for four times the width.
        residual: the gating layer; None for ``GRUGate(bias=2.0)``, the best variant in the paper.
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
    """Return the core to build: ``core`` if it is valid for PPO, or `gtrxl` with the memory length.

    Raises:
        ValueError: if the length is less than 1, the two arguments disagree, or acting step by step would
            differ from training on segments.
        TypeError: if ``core`` is not a `TransformerSpec`, or the length is not a number.
    """
    if memory_length is not None:
        memory_length = as_whole_number("memory_length", memory_length, least=1)
    if core is None:
        return gtrxl(MEMORY_LENGTH if memory_length is None else memory_length)
    if not isinstance(core, TransformerSpec):
        raise TypeError(f"core must be a TransformerSpec, got {core!r}")
    _check_core(core)
    if memory_length is not None:
        _check_memory_length(memory_length, core)
    return core


def trained_core(
    core: TransformerSpec | None, memory_length: int | None, config: PPOConfig
) -> TransformerSpec:
    """Return `resolve_core`, after checks of the core with the hyperparameters of its training.

    Raises:
        ValueError: as `resolve_core`, or if a chosen memory across episodes, or the recomputation of the
            memory, is not possible with the core.
        TypeError: as `resolve_core`.
    """
    core = resolve_core(core, memory_length)
    warn_of_untrained_memory(core, config.segment_length)
    if config.persist_memory_across_episodes:
        check_unlimited_positions(core)
    if config.recompute_memory:
        check_recomputable(core)
    return core


def _check_memory_length(length: int, core: TransformerSpec) -> None:
    """Raise ValueError unless the memory of the core has a length."""
    if core.memory is None:
        has_state = f", only the state of {core.recurrence}" if core.has_recurrence else ""
        raise ValueError(
            f"memory_length={length} does not apply: the core has no memory of single steps{has_state}; "
            f"leave memory_length out"
        )
    if length != core.memory.length:
        raise ValueError(
            f"memory_length={length} and the core's {core.memory} disagree; pass only one of them"
        )


def check_unlimited_positions(core: TransformerSpec) -> None:
    """Raise ValueError unless positions are unlimited, as memory across episodes requires."""
    if core.position is not None:
        try:
            core.position.check_unlimited()
        except ValueError as error:
            raise ValueError(
                f"with persist_memory_across_episodes=True positions grow without limit, but {error}; use a "
                f"relative position, e.g. position=XLRelative()"
            ) from error


def check_recomputable(core: TransformerSpec) -> None:
    """Raise ValueError if the memory cannot be recomputed from a fixed number of steps."""
    if core.has_recurrence:
        raise ValueError(
            f"recompute_memory=True needs a memory that depends on a fixed number of steps, but the state of "
            f"{core.recurrence} depends on the whole episode; use recompute_memory=False"
        )
    try:
        (core.memory or NoMemory()).check_recomputable()
    except ValueError as error:
        raise ValueError(
            f"recompute_memory=True needs a memory that depends on a fixed number of steps, but {error}; use "
            f"recompute_memory=False"
        ) from error


def check_filler_rows(core: TransformerSpec, env: VecEnv) -> None:
    """Raise ValueError if the reset steps of environments would damage a memory across episodes."""
    if core.memory is not None and has_filler_rows(env):
        try:
            core.memory.check_gaps()
        except ValueError as error:
            raise ValueError(
                f"autoreset_mode=NEXT_STEP inserts a reset step after each episode, and with "
                f"persist_memory_across_episodes=True {error}; create the environments with "
                f"autoreset_mode=AutoresetMode.SAME_STEP"
            ) from error


def check_exits(core: TransformerSpec, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError unless the core's exit rule can be evaluated step by step for the action space."""
    check_token_by_token(core, AGENT)
    check_exit_confidence(core.depth, action_space)


def check_episode_length(core: TransformerSpec, env: VecEnv) -> None:
    """Raise ValueError if an episode may have more observations than the core has positions.

    An episode truncated by its time limit has one more observation than steps, whose value is bootstrapped.
    Environments without a Gymnasium spec, or without a time limit, are not checked.
    """
    most = core.max_positions
    limit = None if most is None else getattr(spec_of(env), "max_episode_steps", None)
    if most is not None and limit is not None and most <= limit:
        raise ValueError(
            f"an episode has up to max_episode_steps={limit} steps, and so {limit + 1} observations, but "
            f"{core.position} has only {most} positions; use max_length={limit + 1} or a relative position"
        )


def warn_of_untrained_memory(core: TransformerSpec, segment_length: int) -> None:
    """Warn if no gradient reaches what a memory keeps, because a training segment is one of its segments."""
    for technique in (core.memory, core.recurrence):
        length = None if technique is None else technique.segment_length
        if length is not None and length >= segment_length:
            warn_user(
                f"segment_length={segment_length} is not longer than a segment of {technique}, so hardly any "
                f"gradient reaches what its memory keeps; use segment_length={2 * length} or more, or "
                f"segment={max(2, segment_length // 3)} in {type(technique).__name__}"
            )


def warned_of_filler_rows(env: VecEnv, observation: Any) -> bool:
    """Warn if an observation of the agent's environments is from reset steps; return whether it did."""
    if not shows_filler_rows(env, observation):
        return False
    warn_user(
        "with persist_memory_across_episodes=True predict treats reset steps as steps of episodes and stores "
        "them in memory, although training skips them: predict in environments with "
        "autoreset_mode=AutoresetMode.SAME_STEP"
    )
    return True


def _check_core(core: TransformerSpec) -> None:
    """Raise ValueError unless acting step by step gives the same outputs as training on segments."""
    check_state(core, AGENT)
    if core.dropout:
        raise ValueError(
            f"dropout must be 0, got {core.dropout}: PPO compares action probabilities of the rollout with "
            f"those of the update"
        )
    try:
        core.kernel.check_no_redraw()
    except ValueError as error:
        raise ValueError(
            f"{error}: PPO compares action probabilities of the rollout with those of the update"
        ) from error
