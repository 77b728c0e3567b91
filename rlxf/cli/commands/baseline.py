"""``rlxf baseline``: agents of Stable-Baselines3, and random actions, as runs to compare with."""

import inspect
import json
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import field
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from tyro.conf import Positional, arg

from rlxf.cli.env_options import EnvOptions
from rlxf.cli.options import (
    Command,
    Device,
    Json,
    Quiet,
    StopReturn,
    Track,
    check_counts,
    check_new_folder,
    check_not_negative,
    check_stop_return,
    default_run_path,
    json_object,
    options,
)

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.training import RunFolder
    from rlxf.training.json_rules import Rule

RESERVED = ("policy", "env", "seed", "device", "tensorboard_log", "verbose", "_init_setup_model")
"""Arguments of an algorithm that have an option of their own, or that this command sets."""


@options
class Baseline(Command):
    """Train PPO or RecurrentPPO of Stable-Baselines3, or play random actions, and save a run to compare with.

    The folder contains config.json, progress.csv, TensorBoard events and evaluation.json, like that of "rlxf
    train", so that "rlxf plot", "rlxf compare" and "rlxf experiment" read it. It contains no checkpoint: to
    repeat an interrupted run, remove its folder. Settings are the defaults of Stable-Baselines3, unless
    --arguments gives others. RecurrentPPO needs the extra "experiment".

    Example: rlxf baseline ppo --env CartPole-v1 --total-timesteps 2000 --episodes 10
    """

    algorithm: Positional[Literal["ppo", "recurrent-ppo", "random"]]
    """Agent: PPO, RecurrentPPO (an LSTM), or a policy that samples its actions uniformly."""
    task: Annotated[EnvOptions, arg(name="")]
    total_timesteps: int = 200_000
    """Number of environment steps, over all environments. Random actions need no training."""
    seed: int = 0
    """Seed of weights, actions, minibatches and environments."""
    run: Path | None = None
    """New folder of the run. None means runs/ALGORITHM-ENV-SEED. It must not exist."""
    episodes: int = 100
    """Number of episodes of the final evaluation."""
    evaluate_every: int | None = None
    """Number of environment steps between two evaluations during training. None means a tenth of the
    training; 0 means no evaluation during training. Random actions are evaluated at the end only."""
    evaluation_episodes: int = 20
    """Number of episodes of an evaluation during training."""
    stop_return: StopReturn = None
    n_envs: int = 1
    """Number of parallel environments. The default is that of Stable-Baselines3."""
    frame_stack: int = 1
    """Number of the last observations that the agent sees."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of discounted returns."""
    arguments: Json = field(default_factory=dict)
    """Arguments of the algorithm as a JSON object, e.g. '{"n_steps": 128, "batch_size": 256}'.
    Schedules are constant: numbers."""
    quiet: Quiet = False
    track: Track = None
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Check the options, make the agent and the run, and return the training to run."""
        from rlxf.cli.runs import options_to_config
        from rlxf.training import RunFolder
        from rlxf.training.trackers import check_tracker

        check_tracker(self.track)
        check_counts(self, "total_timesteps", "episodes", "evaluation_episodes", "n_envs", "frame_stack")
        check_not_negative(self, "seed", "evaluate_every")
        json_object(self.arguments, "--arguments")
        check_stop_return(self.stop_return, self.evaluate_every, self.episodes)
        path = self.run or default_run_path(f"{self.algorithm}-{self.task.env}", self.seed)
        names = {"program": "rlxf baseline", "agent": self.algorithm}
        check_new_folder(path)
        agent = self._build()
        return partial(self._train, agent, RunFolder.create(path, names | options_to_config(self)))

    def _build(self) -> "BaseAlgorithm | RandomPolicy":
        from rlxf.cli.normalization import normalize_env
        from rlxf.training.compat import BUILD_ERRORS

        if self.algorithm == "random":
            self._check_random()
            return RandomPolicy(self._stacked(self.task.make(self.n_envs, self.seed)), self.seed)
        env = self._stacked(self.task.make_for_training(self.n_envs, self.seed))
        make = algorithm_class(self.algorithm)
        self._check_arguments(make)
        gamma = self.arguments.get("gamma", 0.99)
        env = normalize_env(env, self.normalize_observations, self.normalize_rewards, gamma)
        policy = policy_name(make, env.observation_space)
        try:
            return make(policy, env, seed=self.seed, device=self.device, **self.arguments)
        except BUILD_ERRORS as error:
            raise ValueError(f"{make.__name__} refuses its arguments or the task: {error}") from error

    def _check_random(self) -> None:
        """Raise ValueError if options were given that random actions do not have."""
        names = ("arguments", "normalize_observations", "normalize_rewards")
        options = {name: getattr(self, name) for name in names} | {"curriculum": self.task.curriculum}
        if given := ["--" + name.replace("_", "-") for name, value in options.items() if value]:
            raise ValueError(f"random actions have no {', '.join(given)}; leave it out")

    def _check_arguments(self, make: type) -> None:
        parameters = inspect.signature(make).parameters
        known = {name: each for name, each in parameters.items() if name not in RESERVED}
        if unknown := self.arguments.keys() - known.keys():
            raise ValueError(
                f"--arguments of {make.__name__} must be among {', '.join(sorted(known))}, got "
                f"{', '.join(sorted(unknown))}"
            )
        if texts := [name for name, value in self.arguments.items() if isinstance(value, str)]:
            raise ValueError(
                f"--arguments must be numbers: schedules are constant, got a text for {', '.join(texts)}"
            )
        for name, value in self.arguments.items():
            rule = _json_rule(name, known[name].annotation)
            if not rule.holds(value):
                allowed = rule.allowed
                shown = json.dumps(value)
                raise ValueError(f"{name} in --arguments of {make.__name__} must be {allowed}, got {shown}")

    def _evaluation_envs(self, episodes: int) -> "VecEnv":
        return self._stacked(self.task.make(min(32, episodes), None))

    def _stacked(self, env: "VecEnv") -> "VecEnv":
        if self.frame_stack == 1:
            return env
        from stable_baselines3.common.vec_env import VecFrameStack

        try:
            return VecFrameStack(env, self.frame_stack)
        except AssertionError:  # how SB3 refuses a space
            space = env.observation_space
            env.close()
            raise ValueError(
                f"--frame-stack needs observations that are arrays (Box), or a Dict of them, got {space}"
            ) from None

    def _train(self, agent: Any, run: "RunFolder") -> None:
        from rlxf.cli.output import print_out
        from rlxf.cli.reports import save_reports, track_reports
        from rlxf.cli.settings_table import print_settings
        from rlxf.evaluation import evaluate
        from rlxf.training.trackers import attach_tracker

        if not self.quiet:
            print_settings(run, self, agent)
        with (
            _discarded_on_failure(agent, run),
            closing(attach_tracker(run.make_logger(), self.track, run.path, run.config)) as logger,
            closing(agent.env),
        ):
            agent.set_logger(logger)
            with _naming_divergence(self.algorithm):
                self._learn(agent)
            with closing(self._evaluation_envs(self.episodes)) as env:
                report = evaluate(agent, env, self.episodes, logger=logger)
            track_reports(logger, {"last": report}, agent.num_timesteps)
        save_reports(run, {"last": report})
        ended_early = self.stop_return is not None and 0 < agent.num_timesteps < self.total_timesteps
        run.complete(agent.num_timesteps, ended_early)
        print_out(report.table())

    def _learn(self, agent: Any) -> None:
        from rlxf.cli.evaluated_training import default_interval
        from rlxf.envs.curriculum import CurriculumCallback
        from rlxf.evaluation import EvaluationCallback

        callbacks: list[BaseCallback] = [CurriculumCallback()] if self.task.curriculum else []
        every = default_interval(self.total_timesteps) if self.evaluate_every is None else self.evaluate_every
        if every == 0:
            agent.learn(self.total_timesteps, callback=callbacks)
            return
        with closing(self._evaluation_envs(self.evaluation_episodes)) as env:
            evaluation = EvaluationCallback(
                env, self.evaluation_episodes, every, stop_return=self.stop_return
            )
            agent.learn(self.total_timesteps, callback=[*callbacks, evaluation])


@contextmanager
def _naming_divergence(algorithm: str) -> Iterator[None]:
    """Report the error of a distribution whose parameters are NaN, because the weights are, in one line."""
    from rlxf.cli.output import exit_with

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


def _json_rule(name: str, annotation: Any) -> "Rule":
    """Return the rule for an argument of an algorithm in JSON, which cannot hold a schedule."""
    from rlxf.training.json_rules import rule_of, whole

    if name == "n_epochs":
        return whole(1)  # the algorithms do not check it
    if get_origin(annotation) not in (Union, types.UnionType):
        return rule_of(annotation)
    return rule_of(reduce(or_, [each for each in get_args(annotation) if get_origin(each) is not Callable]))


def algorithm_class(name: str) -> "type[BaseAlgorithm]":
    """Return the class of an algorithm.

    Raises:
        ImportError: if it needs a package that is not installed.
    """
    if name == "ppo":
        from stable_baselines3 import PPO

        return PPO
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError as error:
        raise ImportError(
            f"RecurrentPPO needs sb3-contrib, which is not installed ({error}): pip install "
            f"'rlxf[experiment]'"
        ) from error
    return RecurrentPPO


def policy_name(algorithm: "type[BaseAlgorithm]", space: Any) -> str:
    """Return the name of the policy of an algorithm for an observation space, as Stable-Baselines3 does."""
    from gymnasium import spaces
    from stable_baselines3.common.preprocessing import is_image_space

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

    def __init__(self, env: "VecEnv", seed: int):
        self.env = env
        self.num_timesteps = 0
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self.action_space.seed(seed)

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
        import numpy as np

        from rlxf.envs.spaces import map_parts

        sizes: list[int] = []
        map_parts(observation, lambda part: sizes.append(len(part)))
        return np.stack([self.action_space.sample() for _ in range(sizes[0])]), None
