"""Agents of Stable-Baselines3, and random actions, as runs to compare with."""

import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

import numpy as np
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from rlxf.cli.env_options import EnvOptions
from rlxf.cli.evaluated_training import MAX_ENVIRONMENTS, chosen_interval
from rlxf.cli.normalization import normalize_env
from rlxf.cli.output import exit_with, print_out
from rlxf.cli.progress import ONLINE_METRICS, progress
from rlxf.cli.reports import save_reports, track_reports
from rlxf.data.spaces import count_values
from rlxf.envs.curriculum import CurriculumCallback
from rlxf.evaluation import EvaluationCallback, evaluate
from rlxf.evaluation.seeding import action_seed
from rlxf.training import RunFolder
from rlxf.training.compat import BUILD_ERRORS
from rlxf.training.json_rules import Rule, rule_of, whole
from rlxf.training.trackers import attach_tracker
from rlxf.utils.names import choose_one_of
from rlxf.utils.run_files import EVALUATION

RESERVED = ("policy", "env", "seed", "device", "tensorboard_log", "verbose", "_init_setup_model")
"""Arguments of an algorithm that have an option of their own, or that this command sets."""
SET_HERE = ", which the command sets: remove it"
"""Advice for an argument in `RESERVED`."""


@dataclass(frozen=True)
class StackedTask:
    """Task whose agent sees the last observations.

    Args:
        options: the environment.
        frame_stack: number of the last observations.
    """

    options: EnvOptions
    frame_stack: int

    def make(self, n_envs: int, seed: int | None) -> VecEnv:
        """Make parallel environments; see `EnvOptions.make`."""
        return self._stacked(self.options.make(n_envs, seed))

    def make_for_training(self, n_envs: int, seed: int) -> VecEnv:
        """Make environments that begin with the easier tasks of the curriculum, if there is one."""
        return self._stacked(self.options.make_for_training(n_envs, seed))

    def make_for_evaluation(self, episodes: int) -> VecEnv:
        """Make environments for an evaluation with this number of episodes."""
        return self.make(min(MAX_ENVIRONMENTS, episodes), None)

    def _stacked(self, env: VecEnv) -> VecEnv:
        if self.frame_stack == 1:
            return env
        try:
            return VecFrameStack(env, self.frame_stack)
        except AssertionError:  # how SB3 refuses a space
            space = env.observation_space
            env.close()
            raise ValueError(
                f"--frame-stack needs observations that are arrays (Box), or a Dict of them, got {space}"
            ) from None


@dataclass(frozen=True)
class BaselineTraining:
    """Training of an agent with evaluations during and after it; see the options of ``rlxf baseline``.

    Args:
        task: the task.
        total_timesteps: number of environment steps.
        episodes: number of episodes of the final evaluation.
        evaluate_every: number of steps between two evaluations. None means a tenth of the training.
        evaluation_episodes: number of episodes of an evaluation during training.
        stop_return: mean return of an evaluation at which the training ends.
        track: name of an experiment tracker.
        verbose: show the progress, and how to read the result.
    """

    task: StackedTask
    total_timesteps: int
    episodes: int
    evaluate_every: int | None
    evaluation_episodes: int
    stop_return: float | None
    track: str | None
    verbose: bool

    def train(self, agent: Any, run: RunFolder) -> None:
        """Train and evaluate an agent, save the run, and print the result."""
        with (
            _discarded_on_failure(agent, run),
            closing(attach_tracker(run.make_logger(), self.track, run.path, run.config)) as logger,
            closing(agent.env),
        ):
            agent.set_logger(logger)
            with _naming_divergence(run.config["agent"]):
                self._learn(agent)
            with closing(self.task.make_for_evaluation(self.episodes)) as env:
                report = evaluate(agent, env, self.episodes, logger=logger)
            track_reports(logger, {"last": report}, agent.num_timesteps)
        save_reports(run, {"last": report})
        ended_early = self.stop_return is not None and 0 < agent.num_timesteps < self.total_timesteps
        run.complete(agent.num_timesteps, ended_early)
        print_out(report.table())
        if self.verbose:
            print_out(f"returns: {run.path / EVALUATION}; compare runs with: rlxf compare {run.path} RUN")

    def _learn(self, agent: Any) -> None:
        callbacks: list[BaseCallback] = [CurriculumCallback()] if self.task.options.curriculum else []
        every = chosen_interval(self.evaluate_every, self.total_timesteps)
        if every == 0:
            self._learn_with(agent, callbacks)
            return
        with closing(self.task.make_for_evaluation(self.evaluation_episodes)) as env:
            evaluation = EvaluationCallback(
                env, self.evaluation_episodes, every, stop_return=self.stop_return
            )
            self._learn_with(agent, [*callbacks, evaluation])

    def _learn_with(self, agent: Any, callbacks: list[BaseCallback]) -> None:
        with progress(self.verbose, "steps", self.total_timesteps, ONLINE_METRICS, callbacks) as shown:
            agent.learn(self.total_timesteps, callback=[*callbacks, *shown])


@contextmanager
def _naming_divergence(algorithm: str) -> Iterator[None]:
    """Report the error of a distribution whose parameters are NaN, because the weights are, in one line."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected parameter"):
            raise
        exit_with(f"the weights of {algorithm} are NaN or infinite; use a smaller learning_rate", 2)


@contextmanager
def _discarded_on_failure(agent: Any, run: "RunFolder") -> Iterator[None]:
    """Remove the folder of a run that fails before its first update, so that the command can be corrected."""
    try:
        yield
    except BaseException:
        if getattr(agent, "_n_updates", 0) == 0:
            run.discard()
        raise


def build_agent(
    algorithm: str,
    env: VecEnv,
    *,
    normalize_observations: bool,
    normalize_rewards: bool,
    seed: int,
    device: str,
    arguments: Mapping[str, Any],
) -> BaseAlgorithm:
    """Return an untrained agent.

    Args:
        algorithm: "ppo" or "recurrent-ppo".
        env: the environments.
        normalize_observations: observations are normalized by their running statistics.
        normalize_rewards: rewards are divided by the running deviation of discounted returns.
        seed: seed of weights, actions and minibatches.
        device: device of the tensors.
        arguments: other arguments of the algorithm.

    Raises:
        ImportError: if the algorithm needs a package that is not installed.
        ValueError: if an argument is invalid, or the algorithm refuses the task.
    """
    make = algorithm_class(algorithm)
    check_arguments(make, arguments)
    env = normalize_env(env, normalize_observations, normalize_rewards, arguments.get("gamma", 0.99))
    policy = policy_name(make, env.observation_space)
    try:
        return make(policy, env, seed=seed, device=device, **arguments)
    except BUILD_ERRORS as error:
        raise ValueError(f"{make.__name__} refuses its arguments or the task: {error}") from error


def check_arguments(make: type, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if an algorithm does not have an argument, or its value has another type.

    Args:
        make: class of the algorithm.
        arguments: name -> value, as in ``--arguments``.
    """
    parameters = inspect.signature(make).parameters
    known = {name: each for name, each in parameters.items() if name not in RESERVED}
    if unknown := sorted(arguments.keys() - known.keys()):
        first = unknown[0]
        advice = SET_HERE if first in RESERVED else choose_one_of(first, sorted(known))
        raise ValueError(f"--arguments of {make.__name__}: unknown argument {first}{advice}")
    if texts := [name for name, value in arguments.items() if isinstance(value, str)]:
        raise ValueError(
            f"--arguments must be numbers: schedules are constant, got a text for {', '.join(texts)}"
        )
    for name, value in arguments.items():
        rule = _json_rule(name, known[name].annotation)
        if not rule.holds(value):
            allowed = rule.allowed
            shown = json.dumps(value)
            raise ValueError(f"{name} in --arguments of {make.__name__} must be {allowed}, got {shown}")


def _json_rule(name: str, annotation: Any) -> Rule:
    """Return the rule for an argument of an algorithm in JSON, which cannot hold a schedule."""
    if name == "n_epochs":
        return whole(1)  # the algorithms do not check it
    if get_origin(annotation) not in (Union, types.UnionType):
        return rule_of(annotation)
    return rule_of(reduce(or_, [each for each in get_args(annotation) if get_origin(each) is not Callable]))


def algorithm_class(name: str) -> type[BaseAlgorithm]:
    """Return the class of an algorithm.

    Raises:
        ImportError: if it needs a package that is not installed.
    """
    if name == "ppo":
        return PPO
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError as error:
        raise ImportError(
            f"RecurrentPPO needs sb3-contrib, which is not installed ({error}): pip install "
            f"'rlxf[experiment]'"
        ) from error
    return RecurrentPPO


def policy_name(algorithm: type[BaseAlgorithm], space: Any) -> str:
    """Return the name of the policy of an algorithm for an observation space, as Stable-Baselines3 does."""
    recurrent = "Lstm" if algorithm.__name__ == "RecurrentPPO" else ""
    if isinstance(space, spaces.Dict):
        return f"MultiInput{recurrent}Policy"
    return f"{'Cnn' if is_image_space(space) else 'Mlp'}{recurrent}Policy"


class RandomPolicy:
    """Agent that samples actions uniformly, with the methods of an algorithm that a run needs.

    Args:
        env: environments, for their action space.
        seed: seed of the actions.
    """

    def __init__(self, env: VecEnv, seed: int):
        self.env = env
        self.num_timesteps = 0
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self.action_space.seed(action_seed(seed))

    def set_logger(self, logger: Any) -> None:
        """Do nothing: there is nothing to log."""

    def learn(self, total_timesteps: int, callback: Any = None) -> "RandomPolicy":
        """Do nothing: there is nothing to learn."""
        return self

    def get_vec_normalize_env(self) -> None:
        """Return None: observations are not normalized."""

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, None]:
        """Return random actions, one for each environment."""
        return np.stack([self.action_space.sample() for _ in range(count_values(observation))]), None
