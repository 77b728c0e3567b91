"""`evaluate`: play whole episodes of an agent in parallel environments and report their returns."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.batches import is_filler, rows_of
from rlxf.envs.sb3_vec_env import pause_envs, watch_processes
from rlxf.envs.step_checks import check_finite
from rlxf.envs.wrappers.return_to_go import ReturnToGo
from rlxf.evaluation.environment import (
    EnvLike,
    is_monitored,
    prepared_env,
    raw_rewards,
    reference_scores_of,
    warn_of_filler_rows,
    warn_of_missing_statistics,
)
from rlxf.evaluation.episode_counter import EpisodeCounter, accumulated_score, monitored_score, quotas
from rlxf.evaluation.report import Report, write_scalars
from rlxf.evaluation.sweep import TargetSweep
from rlxf.evaluation.targets import check_return_conditioned, data_range, validate_targets


class ActiveEnvPolicy:
    """Agent for E environments that predicts only for the active ones.

    Episodes differ in length, so few environments are active at the end of an evaluation. Inactive
    environments repeat their last action without a prediction. This needs an agent without state, or a state
    with ``rows(mask)``, which selects environments. For other agents, all E environments stay active.

    Args:
        agent: object with SB3's ``predict``.
        n_envs: number of environments E.
        deterministic: use the most likely action instead of a sample.
    """

    def __init__(self, agent: PolicyPredictor, n_envs: int, deterministic: bool):
        self._agent, self._deterministic = agent, deterministic
        self._rows = np.arange(n_envs)
        self._state: Any = None
        self._actions: NDArray[Any] | None = None

    def act(self, observation: Any, starts: NDArray[np.bool_], playing: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the actions (E, ...).

        Args:
            observation: observation of all environments.
            starts: mask of the environments at the start of an episode, (E,).
            playing: mask of the active environments, (E,). An inactive environment stays inactive.
        """
        if self._actions is not None:  # the first step predicts for all, so each has an action to repeat
            self._select(playing[self._rows])
        predicted, self._state = self._agent.predict(
            rows_of(observation, self._rows),
            state=self._state,
            episode_start=starts[self._rows],
            deterministic=self._deterministic,
        )
        actions = np.array(predicted) if self._actions is None else self._actions.copy()
        actions[self._rows] = predicted
        self._actions = actions
        return actions

    def _select(self, playing: NDArray[np.bool_]) -> None:
        if playing.all() or not (self._state is None or hasattr(self._state, "rows")):
            return
        self._rows = self._rows[playing]
        if self._state is not None:
            self._state = self._state.rows(torch.from_numpy(playing))


SEED = 1_000_000
"""Default seed, far from typical training seeds, so generated levels are new to the agent."""


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
    """Play whole episodes in parallel environments and report the returns.

    Each environment contributes an equal share of the episodes (`quotas`), so short episodes are not
    overrepresented. Terminated and truncated episodes count. Returns are sums of raw rewards: they come from
    SB3's ``Monitor`` if there is one, and the scaling of ``VecNormalize`` is undone. Its statistics are not
    updated. If the agent was trained with a ``VecNormalize``, observations are normalized with its
    statistics, unless ``env`` already has a ``VecNormalize``.

    Args:
        agent: object with SB3's ``predict``. Recurrent agents get their state and the episode starts.
        env: a Gymnasium id, an ``Env``, a Gymnasium ``VectorEnv`` or an SB3 ``VecEnv``. None uses the
            agent's environment and resets it, so pass another one if training continues. For an agent
            trained offline, None creates the registered environment of the id in its data. The rest of the
            description is used if the agent has ``trust=True``.
        episodes: number of episodes, for each target. With 100, the error of a success rate is about 0.1,
            with 1000 about 0.03.
        target_returns: target returns, evaluated one after the other with `ReturnToGo`; the result is a
            `TargetSweep`. With a seed, all targets use the same episodes.
        deterministic: use the most likely action instead of a sample from torch's global generator.
        n_envs: number of environments to create if ``env`` is an id or None, at most one per episode.
        seed: seed of the environments; environment i gets ``seed + i``. None does not seed them.
        progress_bar: show a progress bar.
        logger: logger or writer for ``log`` of the report, at step ``agent.num_timesteps``. For an agent with
            adaptive depth, also for ``eval/mean_depth``, the mean number of layer passes per token.

    Raises:
        ValueError: if episodes or n_envs is less than 1, there is no environment, a target is not finite,
            ``target_returns`` is passed for an agent that is not conditioned on a return, or a reward or an
            observation is NaN or infinite (the message has the environment and the step).
        TypeError: if the agent has no ``predict``, or ``env`` is not an environment or an id.

    Warns:
        UserWarning: if a target is outside the range of returns in the agent's data; if ``env`` is another
            version of the environment of the data; if the agent was trained with a ``VecNormalize`` whose
            statistics are missing; if there is a single episode, so there is no interval; if the memory of
            the agent persists across episodes and ``env`` has filler rows (NEXT_STEP).
    """
    _check(agent, episodes, n_envs)
    if target_returns is not None:
        check_return_conditioned(agent)
    warn_of_one_episode(episodes)
    targets = None if target_returns is None else validate_targets(target_returns, data_range(agent))
    with prepared_env(agent, env, min(n_envs, episodes), seed) as vec_env, _bar(progress_bar) as progress:
        warn_of_filler_rows(agent, vec_env)
        warn_of_missing_statistics(agent, vec_env)
        watch_processes(vec_env)
        _depth_of(agent)  # resets the count of passes before the evaluation
        play = partial(_play, agent, episodes=episodes, deterministic=deterministic, progress=progress)
        report = play(vec_env) if targets is None else _sweep(play, vec_env, targets, seed, data_range(agent))
    if logger is not None:
        step = getattr(agent, "num_timesteps", 0)
        if depth := _depth_of(agent):
            write_scalars(depth, logger, step)
        report.log(logger, step)
    return report


def _depth_of(agent: PolicyPredictor) -> dict[str, float]:
    """Return the mean passes per token since the last call, as a scalar; empty without adaptive depth."""
    mean_predict_depth = getattr(agent, "mean_predict_depth", None)
    depth = None if mean_predict_depth is None else mean_predict_depth()
    return {} if depth is None else {"eval/mean_depth": depth}


def _sweep(
    play: Callable[[VecEnv], Report],
    env: VecEnv,
    targets: list[float],
    seed: int | None,
    return_range: tuple[float, float] | None,
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
    return TargetSweep(reports, return_range)


def _play(
    agent: PolicyPredictor, env: VecEnv, episodes: int, deterministic: bool, progress: Progress
) -> Report:
    tally = EpisodeCounter(
        quotas(episodes, env.num_envs), monitored_score if is_monitored(env) else accumulated_score
    )
    task = progress.add_task("evaluate", total=episodes)
    player = ActiveEnvPolicy(agent, env.num_envs, deterministic)
    obs, starts = env.reset(), np.ones(env.num_envs, dtype=bool)
    for step in count():
        check_finite("observation", obs, step)
        playing = tally.missing > 0
        obs, rewards, dones, infos = env.step(player.act(obs, starts, playing))
        tally.add(raw_rewards(env, rewards), dones, infos)
        pause_envs(env, np.flatnonzero(playing & (tally.missing == 0)).tolist())
        # A filler row is part of no episode, so the agent resets its state after it.
        starts = dones | is_filler(infos)
        progress.update(task, completed=tally.count)
        if not tally.missing.any():
            break
    return replace(tally.report(), references=reference_scores_of(agent, env))


def _bar(enabled: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not enabled)


def warn_of_one_episode(episodes: int) -> None:
    """Warn if there is only one episode, whose interval has no meaning."""
    if episodes == 1:
        warnings.warn(
            "episodes=1: a single return has no spread, so the 95% interval of the report has width 0 and no "
            "meaning; evaluate at least 10 episodes, better 100",
            stacklevel=3,
        )


def _check(agent: object, episodes: int, n_envs: int) -> None:
    if not callable(getattr(agent, "predict", None)):
        raise TypeError(f"agent must have predict(obs, state, episode_start, deterministic), got {agent!r}")
    for name, value in (("episodes", episodes), ("n_envs", n_envs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
