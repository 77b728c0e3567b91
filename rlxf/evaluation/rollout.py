"""Rollouts of agents in parallel environments: the loop of all steps, and the count of whole episodes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.batch_checks import check_finite
from rlxf.envs.infos import LOST, is_episode, is_filler, success_of
from rlxf.envs.sb3_vec_env import pause_envs
from rlxf.envs.spaces import rows_of
from rlxf.envs.specs import spec_of
from rlxf.evaluation.agents import has_compiled_step
from rlxf.evaluation.report import Report
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.warnings import warn_user

Info = dict[str, Any]
Score = tuple[float, int]
"""Return and length of an episode."""
FIRST_END = 10_000
"""Steps of each environment after which `play` warns if no episode has ended in any environment."""
LATER_ENDS = 30_000
"""Steps after which it warns of one environment; an episode of Atari has at most 27,000 steps of 4 frames."""
MONITOR_ROUNDING = 6e-7
"""Upper bound on the rounding error of the returns of SB3's ``Monitor``, which have six decimals."""
SMALL_RETURN = 0.01
"""Absolute return below which this rounding error is relevant."""


def play(
    agent: PolicyPredictor,
    env: VecEnv,
    deterministic: bool,
    active: Callable[[], NDArray[np.bool_]] | None = None,
    on_step: Callable[[], object] | None = None,
) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_], Sequence[Info]]]:
    """Reset the environments, and step them with the agent's actions indefinitely.

    Evaluation, videos and recording share this loop. It yields rewards (E,), dones (E,) and infos of each
    step of the E environments.

    Args:
        agent: object with SB3's ``predict``.
        env: the environments.
        deterministic: use the most likely action instead of a sample.
        active: function that returns the mask (E,) of the environments whose steps are still needed; the
            others are paused, and stay inactive. None means all environments.
        on_step: function that is called before each step; an exception that it raises ends the loop.

    Raises:
        FaultyEnvironmentError: if an observation is NaN or infinite.

    Warns:
        UserWarning: once, if no episode ends in `FIRST_END` steps, or that of one environment in
            `LATER_ENDS`, unless the time limit of the environment is longer.
    """
    policy = ActiveEnvPolicy(agent, env.num_envs, deterministic)
    obs = env.reset()
    starts = np.ones(env.num_envs, dtype=bool)
    playing = starts if active is None else active()
    pause_envs(env, np.flatnonzero(~playing).tolist())
    watch = EndWatch(env)
    for step in count():
        check_finite("observation", obs, step)
        if on_step is not None:
            on_step()
        obs, rewards, dones, infos = env.step(policy.act(obs, starts, playing))
        dones = np.asarray(dones).astype(bool, copy=False)
        watch.record(step + 1, dones, playing)
        yield rewards, dones, infos
        # A reset step is part of no episode, so the agent resets its state after it.
        starts = dones | is_filler(infos)
        if active is not None:
            before, playing = playing, active()
            pause_envs(env, np.flatnonzero(before & ~playing).tolist())


class EndWatch:
    """Warning about environments whose episodes may never end, so that a loop that counts episodes waits.

    Args:
        env: environments without a running episode.
    """

    def __init__(self, env: VecEnv):
        self._env = env
        self._ended = np.zeros(env.num_envs, dtype=bool)
        self._next = FIRST_END
        self._warned = False

    def record(self, step: int, dones: NDArray[np.bool_], playing: NDArray[np.bool_]) -> None:
        """Record the ends of a step, counted from 1; warn if it is due.

        Args:
            step: number of steps of each environment.
            dones: environments whose episode ends, bool (E,).
            playing: environments whose steps are needed, bool (E,).
        """
        self._ended |= dones
        if step == self._next:
            self._check(step, playing)

    def _check(self, step: int, playing: NDArray[np.bool_]) -> None:
        endless = playing & ~self._ended
        if step == FIRST_END and self._ended.any():
            endless[:] = False
        limit = getattr(spec_of(self._env), "max_episode_steps", None) or 0
        seen = min(step, LATER_ENDS)  # steps in which an end is remembered
        if endless.any() and not self._warned and limit < seen:
            self._warned = True
            _warn_of_endless_episode(int(np.argmax(endless)), seen)
        self._next = step - step % LATER_ENDS + LATER_ENDS
        if step % LATER_ENDS == 0:
            self._ended[:] = False


def _warn_of_endless_episode(environment: int, steps: int) -> None:
    warn_user(
        f"the episode of environment {environment} has not ended in {steps:,} steps, and whole episodes are "
        f"needed here: if it never ends, add a time limit, gymnasium.make(id, max_episode_steps=N), "
        f"make_vec_env(id, n_envs, env_kwargs={{'max_episode_steps': N}}), "
        f"gymnasium.wrappers.TimeLimit(env, N), or on the command line "
        f"--env-kwargs '{{\"max_episode_steps\": N}}'"
    )


class ActiveEnvPolicy:
    """Agent for E environments that predicts only for the active ones.

    Episodes differ in length, so few environments are active at the end of an evaluation. Inactive
    environments repeat their last action without a prediction. This needs an agent without state, or a state
    with ``rows(mask)``, which selects environments. For other agents, all E environments stay active, and for
    agents with a compiled or captured step, which would be compiled again for each number of environments.

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
        if playing.all() or not selects_rows(self._agent, self._state):
            return
        self._rows = self._rows[playing]
        if self._state is not None:
            self._state = self._state.rows(torch.from_numpy(playing))


def selects_rows(agent: Any, state: Any) -> bool:
    """Return whether an agent with this state can act for some of its environments only.

    A compiled or captured step would be compiled again for each number of environments.
    """
    return not has_compiled_step(agent) and (state is None or hasattr(state, "rows"))


def uncompiled_steps(agent: Any) -> AbstractContextManager[None]:
    """Return a context in which the steps of an agent on a CPU are not compiled.

    The compilation for another number of environments takes longer than an evaluation, or the recording of an
    episode, during training.
    """
    compiles = has_compiled_step(agent) and agent.policy.device.type == "cpu"
    return agent.policy.uncompiled() if compiles else nullcontext()


def quotas(episodes: int, n_envs: int) -> np.ndarray:
    """Return the number of episodes that each environment contributes, int64 (n_envs,), split evenly.

    Counting the first ``episodes`` that end would be biased to short episodes. SB3 uses the same quotas.
    """
    return (episodes + np.arange(n_envs)) // n_envs


def accumulated_score(info: Info, score: Score) -> Score | None:
    """Return the score accumulated by `EpisodeCounter`."""
    return score


def monitored_score(info: Info, score: Score) -> Score | None:
    """Return the score of SB3's ``Monitor``, which is inside wrappers that change rewards.

    ``Monitor`` rounds returns to six decimals, which matters below `SMALL_RETURN`, and ``VecMonitor`` sums
    rewards in float32. The score is the accumulated one if both agree within these rounding errors.

    If a wrapper outside the monitor ended the episode, the score after a truncation, as by a time limit, is
    the accumulated one, with the rewards of that wrapper. After a termination, as by Atari wrappers when a
    life is lost, it is None.
    """
    episode = info.get("episode")
    if not is_episode(episode):
        return score if info.get("TimeLimit.truncated", False) else None
    accumulated, monitored, length = score[0], float(episode["r"]), int(episode["l"])
    is_rounded = abs(accumulated - monitored) <= _rounding_error(episode["r"], length)
    return accumulated if is_rounded else monitored, length


def _rounding_error(reported: float | np.float32, length: int) -> float:
    """Return a bound on the rounding error of a return that a monitor reports; 0 if it is not relevant."""
    if isinstance(reported, np.float32):  # by VecMonitor
        return length * float(np.finfo(np.float32).eps) * abs(float(reported))
    return MONITOR_ROUNDING if abs(reported) < SMALL_RETURN else 0.0


class EpisodeCounter:
    """Accumulator of rewards and of the scores of the episodes that count.

    Args:
        quota: number of episodes to count for each environment, int64 (n_envs,).
        score: `accumulated_score` or `monitored_score`.

    Attributes:
        remaining: number of episodes still to be counted for each environment, int64 (n_envs,).
    """

    def __init__(self, quota: np.ndarray, score: Callable[[Info, Score], Score | None]):
        self.remaining = quota.copy()
        self._score = score
        self._sums = np.zeros(len(quota))
        self._steps = np.zeros(len(quota), dtype=np.int64)
        self._scores: list[Score] = []
        self._successes: list[bool | None] = []

    @property
    def count(self) -> int:
        """Number of episodes counted so far."""
        return len(self._scores)

    def add(self, rewards: np.ndarray, dones: np.ndarray, infos: Sequence[Info]) -> None:
        """Count one step of every environment.

        Raises:
            FaultyEnvironmentError: if a reward is NaN or infinite, or a success is not a number.
        """
        played = ~is_filler(infos)
        self._steps += played
        self._check_rewards(rewards, played)
        self._sums += np.where(played, rewards, 0.0)
        lost = [i for i, info in enumerate(infos) if info.get(LOST, False)]
        self._sums[lost] = self._steps[lost] = 0  # discards the running episodes of failed environments
        for i in np.flatnonzero(dones & played).tolist():
            self._end(i, infos[i])

    def report(self) -> Report:
        """Return a report of the counted episodes, in the order in which they ended."""
        returns, lengths = zip(*self._scores, strict=True)
        # Some environments report only successes; a missing report is then a failure.
        unreported = all(success is None for success in self._successes)
        successes = None if unreported else np.array(self._successes, np.object_).astype(bool)
        return Report(np.array(returns, dtype=np.float64), np.array(lengths, dtype=np.int64), successes)

    def _end(self, i: int, info: Info) -> None:
        score = self._score(info, (float(self._sums[i]), int(self._steps[i])))
        if score is None:
            return
        self._sums[i] = self._steps[i] = 0
        if self.remaining[i]:
            self.remaining[i] -= 1
            self._scores.append(score)
            self._successes.append(_success_of(info))

    def _check_rewards(self, rewards: np.ndarray, played: np.ndarray) -> None:
        for i in np.flatnonzero(played & ~np.isfinite(rewards)):
            raise FaultyEnvironmentError(
                f"reward must be finite, got {rewards[i]} from environment {i} "
                f"at step {self._steps[i]} of its episode"
            )


def _success_of(info: Info) -> bool | None:
    """Return whether an episode was a success, which NaN is not; None if it is unknown."""
    success = success_of(info)
    return None if success is None else success == success and success != 0
