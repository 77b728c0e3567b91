"""`evaluate`: play whole episodes of an agent in parallel environments and report their returns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, TypedDict, Unpack, overload

import torch
from rich.progress import Progress
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.gymnasium_wrappers import warn_of_changed_rewards
from rlxf.envs.make import EnvLike
from rlxf.envs.return_to_go import ReturnToGo, is_return_conditioned
from rlxf.envs.sb3_vec_env import watch_processes
from rlxf.evaluation.agents import (
    check_has_predict,
    is_return_conditioned_agent,
    mean_depth,
    return_range,
)
from rlxf.evaluation.environment import (
    is_monitored,
    prepared_env,
    raw_rewards,
    reference_scores_of,
    warn_of_filler_rows,
    warn_of_missing_statistics,
)
from rlxf.evaluation.report import Report, TargetSweep, write_scalars
from rlxf.evaluation.rollout import EpisodeCounter, accumulated_score, monitored_score, play, quotas
from rlxf.utils.checks import check_int
from rlxf.utils.tables import counting_bar
from rlxf.utils.warnings import warn_user

FLOAT32_MAX = float(torch.finfo(torch.float32).max)

DEFAULT_SEED = 1_000_000
"""Default seed, far from typical training seeds, so generated levels are new to the agent."""


class _Options(TypedDict, total=False):
    deterministic: bool
    n_envs: int
    seed: int | None
    progress_bar: bool | str
    logger: Logger | SummaryWriter | None
    on_step: Callable[[], object] | None


@overload
def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: None = None,
    **options: Unpack[_Options],
) -> Report: ...


@overload
def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: Sequence[float],
    **options: Unpack[_Options],
) -> TargetSweep: ...


def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: Sequence[float] | None = None,
    deterministic: bool = True,
    n_envs: int = 32,
    seed: int | None = DEFAULT_SEED,
    progress_bar: bool | str = False,
    logger: Logger | SummaryWriter | None = None,
    on_step: Callable[[], object] | None = None,
) -> Report | TargetSweep:
    """Play whole episodes in parallel environments and report the returns.

    Each environment contributes an equal share of the episodes (`quotas`), so short episodes are not
    overrepresented. Terminated and truncated episodes count. Returns are sums of raw rewards: they come from
    SB3's ``Monitor`` if there is one, and the scaling of ``VecNormalize`` is undone. Its statistics are not
    updated. If the agent was trained with a ``VecNormalize``, observations are normalized with its
    statistics, unless ``env`` already has a ``VecNormalize``.

    Args:
        agent: object with SB3's ``predict``. Recurrent agents get their state and the episode starts.
        env: a Gymnasium id, an ``Env``, a Gymnasium ``VectorEnv`` or an SB3 ``VecEnv``. None uses the
            agent's environment and ends its episodes, so pass another one in a callback; a later `learn`
            begins new episodes. For an agent trained offline, None creates the registered environment of the
            id in its data. The rest of the description is used if the agent has ``trust=True``.
        episodes: number of episodes, for each target. With 100, the error of a success rate is about 0.1,
            with 1000 about 0.03.
        target_returns: target returns, evaluated one after the other with `ReturnToGo`; the result is a
            `TargetSweep`. With a seed, the environments begin with the same episodes for all targets.
        deterministic: use the most likely action instead of a sample from torch's global generator.
        n_envs: number of environments to create if ``env`` is an id or None, at most one per episode.
        seed: seed of the environments; environment i gets ``seed + i``. None does not seed them.
        progress_bar: show a progress bar; a string is its label. Labels also name the target return.
        logger: logger or writer for ``log`` of the report, at step ``agent.num_timesteps``. For an agent with
            adaptive depth, including ``eval/mean_depth``, the mean number of layer passes per token.
        on_step: function that is called before each step of the environments; an exception that it raises
            ends the evaluation.

    Raises:
        ValueError: if episodes or n_envs is less than 1, there is no environment, a target is not finite,
            ``target_returns`` is passed for an agent that is not conditioned on a return, or a reward or an
            observation is NaN or infinite (the message has the environment and the step).
        TypeError: if episodes or n_envs is not an int, the agent has no ``predict``, ``env`` is not an
            environment or an id, or an agent that is conditioned on a return gets no target, neither by
            ``target_returns`` nor by `ReturnToGo`.

    Warns:
        UserWarning: if a target is outside the range of returns in the agent's data; if ``env`` is a
            different version of the environment of the data; if the agent was trained with a ``VecNormalize``
            whose statistics are missing; if a wrapper of Gymnasium changes the rewards of which returns are
            sums; if there is a single episode, so there is no interval; if the memory
            of the agent persists across episodes and ``env`` has reset steps (NEXT_STEP); if episodes may
            never end (`play`).
    """
    _check(agent, episodes, n_envs)
    seed = None if seed is None else index(seed)  # Gymnasium refuses NumPy's integers
    if target_returns is not None:
        check_return_conditioned(agent)
    warn_of_one_episode(episodes)
    targets = None if target_returns is None else validate_targets(target_returns, return_range(agent))
    with (
        prepared_env(agent, env, min(n_envs, episodes), seed) as vec_env,
        counting_bar(bool(progress_bar)) as progress,
    ):
        if targets is None:
            check_target_is_given(agent, vec_env)
        warn_of_filler_rows(agent, vec_env)
        warn_of_missing_statistics(agent, vec_env)
        warn_of_changed_rewards(vec_env)
        watch_processes(vec_env)
        _depth_of(agent)  # resets the count of passes before the evaluation
        run = partial(_run, agent, episodes, deterministic, progress, on_step)
        label = progress_bar if isinstance(progress_bar, str) else "evaluate"
        report: Report | TargetSweep
        if targets is None:
            report = run(label, vec_env)
        else:
            report = TargetSweep(_sweep(run, label, vec_env, targets, seed), return_range(agent))
    if logger is not None:
        step = getattr(agent, "num_timesteps", 0)
        if depth := _depth_of(agent):
            write_scalars(depth, logger, step)
        report.log(logger, step)
    return report


def _depth_of(agent: PolicyPredictor) -> dict[str, float]:
    """Return the mean passes per token since the last call, as a scalar; empty without adaptive depth."""
    depth = mean_depth(agent)
    return {} if depth is None else {"eval/mean_depth": depth}


def _sweep(
    run: Callable[[str, VecEnv], Report], label: str, env: VecEnv, targets: list[float], seed: int | None
) -> dict[float, Report]:
    """Play the same episodes once for each target, and return the report of each target.

    The target return of an environment that the caller has wrapped is restored at the end.
    """
    wrapper = unwrap_vec_wrapper(env, ReturnToGo)
    if wrapper is None:
        env = wrapper = ReturnToGo(env, targets[0])
    before = wrapper.target_return
    reports = {}
    try:
        for target in targets:
            wrapper.target_return = target
            if seed is not None:
                env.seed(seed)
            reports[target] = run(f"{label}, target return {target:g}", env)
    finally:
        wrapper.target_return = before
    return reports


def _run(
    agent: PolicyPredictor,
    episodes: int,
    deterministic: bool,
    progress: Progress,
    on_step: Callable[[], object] | None,
    label: str,
    env: VecEnv,
) -> Report:
    """Play the episodes, and return their report."""
    score = monitored_score if is_monitored(env) else accumulated_score
    counter = EpisodeCounter(quotas(episodes, env.num_envs), score)
    task = progress.add_task(label, total=episodes)
    for rewards, dones, infos in play(agent, env, deterministic, lambda: counter.remaining > 0, on_step):
        counter.add(raw_rewards(env, rewards), dones, infos)
        progress.update(task, completed=counter.count)
        if not counter.remaining.any():
            break
    return replace(counter.report(), references=reference_scores_of(agent, env))


def warn_of_one_episode(episodes: int) -> None:
    """Warn if there is only one episode, whose interval has no meaning."""
    if episodes == 1:
        warn_user(
            "episodes=1: a single return has no spread, so the 95% interval of the report has width 0 and no "
            "meaning; evaluate at least 10 episodes, better 100"
        )


def _check(agent: object, episodes: int, n_envs: int) -> None:
    check_has_predict(agent)
    for name, value in (("episodes", episodes), ("n_envs", n_envs)):
        check_int(name, value)


def validate_targets(targets: Sequence[float], data_range: tuple[float, float] | None) -> list[float]:
    """Return the targets as floats; warn about those outside the range of returns in the data.

    Raises:
        TypeError: if ``targets`` is not a sequence.
        ValueError: if there is no target, or a target is not finite or a duplicate.
    """
    if not isinstance(targets, Iterable):
        raise TypeError(f"target_returns must be a sequence of numbers, such as [{targets}], got {targets!r}")
    values = [float(target) + 0.0 for target in targets]  # 0 in place of -0
    are_finite = all(abs(value) <= FLOAT32_MAX for value in values)
    if not values or not are_finite or len(set(values)) < len(values):
        raise ValueError(
            f"target_returns must be one or more finite numbers without duplicates, got {list(targets)}"
            + ("" if are_finite else f"; the largest number of float32 observations is {FLOAT32_MAX:.3g}")
        )
    if data_range is not None:
        _warn_outside(values, *data_range)
    return values


def check_return_conditioned(agent: Any, argument: str = "target_returns") -> None:
    """Raise ValueError if the agent is known not to be conditioned on a return.

    Args:
        agent: the agent.
        argument: name of the argument with the target return, for the message.
    """
    if is_return_conditioned_agent(agent) is False:
        raise ValueError(unconditioned_message(argument, agent))


def check_target_is_given(agent: Any, env: EnvLike) -> None:
    """Raise if the agent is conditioned on a return, and ``env`` has no `ReturnToGo` with a target.

    Raises:
        TypeError: with an example of ``target_returns``.
    """
    space = None if isinstance(env, str) else env.observation_space
    if is_return_conditioned_agent(agent) and (space is None or not is_return_conditioned(space)):
        known = return_range(agent)
        example = "" if known is None else f", such as [{known[1]:g}], the largest return in its data"
        raise TypeError(f"{type(agent).__name__} is conditioned on a return: pass target_returns{example}")


def unconditioned_message(argument: str, agent: Any) -> str:
    """Return the error message for a target return of an agent that is not conditioned on one.

    Args:
        argument: name of the argument with the target return.
        agent: the agent; the message names its ``conditioning``, if it has one.
    """
    conditioning = getattr(agent, "conditioning", None)
    given = type(agent).__name__
    if conditioning is not None:
        given = f"{given} with conditioning={conditioning}, which predicts the return"
    return (
        f"{argument} needs an agent that is conditioned on a return, such as DecisionTransformer with "
        f"conditioning=TargetReturn(), got {given}: leave {argument} out"
    )


def _warn_outside(targets: list[float], low: float, high: float) -> None:
    outside = [target for target in targets if not low <= target <= high]
    if outside:
        warn_user(
            f"target returns {', '.join(f'{target:g}' for target in outside)} are outside the range of "
            f"returns in the data, {low:g} to {high:g}: the agent must extrapolate"
        )
