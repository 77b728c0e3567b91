"""``rlxf baseline``: agents of Stable-Baselines3, and random actions, as runs to compare with."""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    check_options_not_negative,
    check_stop_return,
    default_run_path,
    json_object,
    options,
)

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

    from rlxf.cli.sb3_baselines import RandomPolicy, StackedTask
    from rlxf.training import RunFolder


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
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds."""
    quiet: Quiet = False
    track: Track = None
    device: Device = "auto"

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is out of range, or an argument is invalid."""
        check_counts(self, "total_timesteps", "episodes", "evaluation_episodes", "n_envs", "frame_stack")
        check_options_not_negative(self, "seed", "evaluate_every")
        check_stop_return(self.stop_return, self.evaluate_every, self.episodes)
        self.task.check()
        json_object(self.arguments, "--arguments")
        if self.algorithm == "random":
            self._check_random()
        elif self.arguments:
            self._check_arguments()

    def prepare(self) -> Callable[[], None]:
        """Check the options, make the agent and the run, and return the training to run."""
        from rlxf.cli.run_options import options_to_config
        from rlxf.training import RunFolder
        from rlxf.training.trackers import check_tracker
        from rlxf.utils.run_files import BASELINE, PROGRAM

        check_tracker(self.track)
        self.check()
        path = self.run or default_run_path(f"{self.algorithm}-{self.task.env}", self.seed)
        names = {PROGRAM: BASELINE, "agent": self.algorithm}
        check_new_folder(path)
        agent = self._build()
        return partial(self._train, agent, RunFolder.create(path, names | options_to_config(self)))

    def _build(self) -> "BaseAlgorithm | RandomPolicy":
        from rlxf.cli.sb3_baselines import RandomPolicy, build_agent

        if self.algorithm == "random":
            return RandomPolicy(self._stacked_task().make(self.n_envs, self.seed), self.seed)
        return build_agent(
            self.algorithm,
            self._stacked_task().make_for_training(self.n_envs, self.seed),
            normalize_observations=self.normalize_observations,
            normalize_rewards=self.normalize_rewards,
            seed=self.seed,
            device=self.device,
            arguments=self.arguments,
        )

    def _check_random(self) -> None:
        """Raise ValueError if options were given that random actions do not have."""
        names = ("arguments", "normalize_observations", "normalize_rewards")
        options = {name: getattr(self, name) for name in names} | {"curriculum": self.task.curriculum}
        if given := ["--" + name.replace("_", "-") for name, value in options.items() if value]:
            raise ValueError(f"random actions have no {', '.join(given)}; leave it out")

    def _check_arguments(self) -> None:
        """Raise ValueError if an argument is invalid; do nothing if the package of the algorithm is missing.

        Other runs of an experiment do not need the package. A run without it fails when its agent is built.
        """
        from rlxf.cli.sb3_baselines import algorithm_class, check_arguments

        try:
            algorithm = algorithm_class(self.algorithm)
        except ImportError:
            return
        check_arguments(algorithm, self.arguments)

    def _stacked_task(self) -> "StackedTask":
        from rlxf.cli.sb3_baselines import StackedTask

        return StackedTask(self.task, self.frame_stack)

    def _train(self, agent: Any, run: "RunFolder") -> None:
        from rlxf.cli.sb3_baselines import BaselineTraining
        from rlxf.cli.settings_table import print_settings

        if not self.quiet:
            print_settings(run, self, agent)
        training = BaselineTraining(
            self._stacked_task(),
            self.total_timesteps,
            self.episodes,
            self.evaluate_every,
            self.evaluation_episodes,
            self.stop_return,
            self.track,
            verbose=self.progress_bar and not self.quiet,
        )
        training.train(agent, run)
