"""Playing episodes with an agent."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import overload

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.finite import check_finite
from rlxf.envs.resting import rest
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.watched_processes import watch_processes
from rlxf.evaluation.environment import (
    EnvLike,
    is_monitored,
    opened,
    raw_rewards,
    warn_of_filler_rows,
    warn_of_missing_statistics,
)
from rlxf.evaluation.narrowing import Narrowing
from rlxf.evaluation.references import references_of
from rlxf.evaluation.report import Report
from rlxf.evaluation.scalars import write_scalars
from rlxf.evaluation.sweep import TargetSweep
from rlxf.evaluation.tally import Tally, is_filler, monitored_score, own_score, quotas
from rlxf.evaluation.targets import check_takes_targets, checked_targets, data_range

SEED = 1_000_000
"""Far from the small seeds one trains with, so that generated levels are new to the agent."""


@overload
def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: None = None,
    deterministic: bool = True,
    n_envs: int = 32,
    seed: int | None = SEED,
    progress_bar: bool = False,
    logger: Logger | SummaryWriter | None = None,
) -> Report: ...


@overload
def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: Sequence[float],
    deterministic: bool = True,
    n_envs: int = 32,
    seed: int | None = SEED,
    progress_bar: bool = False,
    logger: Logger | SummaryWriter | None = None,
) -> TargetSweep: ...


def evaluate(
    agent: PolicyPredictor,
    env: EnvLike | None = None,
    episodes: int = 100,
    *,
    target_returns: Sequence[float] | None = None,
    deterministic: bool = True,
    n_envs: int = 32,
    seed: int | None = SEED,
    progress_bar: bool = False,
    logger: Logger | SummaryWriter | None = None,
) -> Report | TargetSweep:
    """Play whole episodes in environments side by side and report the returns.

    Each environment contributes its share of the episodes (`quotas`), so that short episodes are not
    favoured. An episode counts whether it ended by termination or truncation. Returns are sums of raw
    rewards: SB3's ``Monitor`` is believed where there is one, ``VecNormalize`` is undone, and its
    statistics stay as they are. If the agent was trained on observations that a ``VecNormalize`` made, those
    here are normalised likewise, unless ``env`` brings a ``VecNormalize`` of its own.

    Args:
        agent: has SB3's ``predict``. Recurrent agents get their state and the episode starts back.
        env: a Gymnasium id, an ``Env``, a Gymnasium ``VectorEnv`` or an SB3 ``VecEnv``; None for the
            agent's own, which is reset: an agent that goes on learning should get a fresh one. An agent that
            learned from data makes the registered environment of the id that the data name; the rest of
            its description is used if the agent has ``trust=True``.
        episodes: number of episodes, for each target. 100 resolve a success rate to about 0.1, 1000 to
            about 0.03.
        target_returns: returns to ask for, one after the other, by `ReturnToGo`; the answer is a
            `TargetSweep`. With equal seeds each is asked for in the same episodes.
        deterministic: the most likely action instead of a sample, which torch's global generator draws.
        n_envs: environments to make when ``env`` is an id or None, at most one per episode.
        seed: of the environments; environment i gets ``seed + i``. None leaves them as they are.
        progress_bar: show one.
        logger: where the report's ``log`` writes, at step ``agent.num_timesteps``; for an agent whose tokens
            need not take all passes also ``eval/mean_depth``, those that it took on average.

    Raises:
        ValueError: if episodes or n_envs is less than 1, there is no environment, a target is not finite, the
            agent is not conditioned on a return but ``target_returns`` are given, or a reward or an
            observation is NaN or infinite: the message names the environment and the step.
        TypeError: if the agent cannot predict, or ``env`` is nothing to play in.

    Warns:
        UserWarning: if a target lies outside of the returns of the data that the agent learned from; if
            ``env`` is another version of the environment of the data; if the agent learned under a
            ``VecNormalize`` whose statistics are missing; if there is a single episode, so that there is no
            interval; if the agent remembers across episodes and ``env`` has filler rows (NEXT_STEP), which it
            remembers, too.
    """
    _check(agent, episodes, n_envs)
    if target_returns is not None:
        check_takes_targets(agent)
    warn_of_one_episode(episodes)
    targets = None if target_returns is None else checked_targets(target_returns, data_range(agent))
    with opened(agent, env, min(n_envs, episodes), seed) as vec_env, _bar(progress_bar) as progress:
        warn_of_filler_rows(agent, vec_env)
        warn_of_missing_statistics(agent, vec_env)
        watch_processes(vec_env)
        _depth_of(agent)  # what was predicted before is not counted
        play = partial(_play, agent, episodes=episodes, deterministic=deterministic, progress=progress)
        report = play(vec_env) if targets is None else _ask(play, vec_env, targets, seed, data_range(agent))
    if logger is not None:
        step = getattr(agent, "num_timesteps", 0)
        if depth := _depth_of(agent):
            write_scalars(depth, logger, step)
        report.log(logger, step)
    return report


def _depth_of(agent: PolicyPredictor) -> dict[str, float]:
    """Passes that a token took on average since last asked, if it is an agent in which not all take all."""
    asked = getattr(agent, "acting_depth", None)
    depth = None if asked is None else asked()
    return {} if depth is None else {"eval/mean_depth": depth}


def _ask(
    play: Callable[[VecEnv], Report],
    env: VecEnv,
    targets: list[float],
    seed: int | None,
    held: tuple[float, float] | None,
) -> TargetSweep:
    """Play the same episodes once for each target."""
    wrapper = unwrap_vec_wrapper(env, ReturnToGo)
    if wrapper is None:
        env = wrapper = ReturnToGo(env, targets[0])
    reports = {}
    for target in targets:
        wrapper.target_return = target
        if seed is not None:
            env.seed(seed)
        reports[target] = play(env)
    return TargetSweep(reports, held)


def _play(
    agent: PolicyPredictor, env: VecEnv, episodes: int, deterministic: bool, progress: Progress
) -> Report:
    tally = Tally(quotas(episodes, env.num_envs), monitored_score if is_monitored(env) else own_score)
    task = progress.add_task("evaluate", total=episodes)
    player = Narrowing(agent, env.num_envs, deterministic)
    obs, starts = env.reset(), np.ones(env.num_envs, dtype=bool)
    for step in count():
        check_finite("observation", obs, step)
        playing = tally.missing > 0
        obs, rewards, dones, infos = env.step(player.act(obs, starts, playing))
        tally.add(raw_rewards(env, rewards), dones, infos)
        rest(env, np.flatnonzero(playing & (tally.missing == 0)).tolist())
        # What an agent saw between two episodes belongs to neither.
        starts = dones | is_filler(infos)
        progress.update(task, completed=tally.count)
        if not tally.missing.any():
            break
    return replace(tally.report(), references=references_of(agent, env))


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not shown)


def warn_of_one_episode(episodes: int) -> None:
    """Warn if there is only one episode, which gives no interval."""
    if episodes == 1:
        warnings.warn(
            "episodes=1: the return of a single episode says nothing about its spread, so the report's 95% "
            "interval has width 0 and means nothing; evaluate at least 10 episodes, better 100",
            stacklevel=3,
        )


def _check(agent: object, episodes: int, n_envs: int) -> None:
    if not callable(getattr(agent, "predict", None)):
        raise TypeError(f"agent must have predict(obs, state, episode_start, deterministic), got {agent!r}")
    for name, value in (("episodes", episodes), ("n_envs", n_envs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
