"""Base classes of the commands that train an agent on Minari datasets."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import Any, Self

import gymnasium
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from rlxf.cli.env_options import EnvOptions
from rlxf.cli.evaluated_training import MAX_ENVIRONMENTS, EvaluatedTrainingCommand, default_interval
from rlxf.cli.options import check_counts, check_options_not_negative, json_object
from rlxf.cli.output import print_out
from rlxf.cli.runs import AGENTS, acts_in_env_of_data, check_env_named, make_offline_env
from rlxf.cli.training_command import TrainingCommand
from rlxf.cli.training_session import StartPoint
from rlxf.cli.videos import make_rendering_env, make_video_callbacks
from rlxf.data import Trajectories, load_trajectories
from rlxf.envs.sb3_vec_env import make_sync_vec_env
from rlxf.evaluation import BestValidationCallback
from rlxf.evaluation.episodes import validate_targets
from rlxf.evaluation.video import MAX_STEPS, RENDER_MODE
from rlxf.training import RunFolder
from rlxf.training.distributed import process_group


class OfflineTraining(TrainingCommand):
    """Training on Minari datasets, whose progress is counted in updates."""

    dataset: tuple[str, ...]
    updates: int
    download: bool
    folder_prefix: str
    """Start of the default name of the run folder."""

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"{self.folder_prefix}-{'+'.join(self.dataset)}"

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        check_counts(self, "updates", "log_interval")
        if not self.dataset or "" in self.dataset:
            raise ValueError("--dataset is empty: name one or more Minari datasets; rlxf datasets lists them")
        super().check()

    @property
    def validation_interval(self) -> int:
        """Number of updates between two measurements of the validation loss."""
        return default_interval(self.total)

    @contextmanager
    def callbacks(self, agent: Any, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """Context manager for the callbacks of the training, one of which measures the validation loss."""
        with super().callbacks(agent, run) as others:
            if agent.validation_fraction is None:
                yield others
            else:
                yield [*others, BestValidationCallback(self.validation_interval, run.best_validation)]

    def finish(self, agent: Any, run: RunFolder) -> None:
        """Print the lowest validation loss during training, if it was measured; then the other stages."""
        self.print_lowest_validation_loss(run)
        super().finish(agent, run)

    def print_lowest_validation_loss(self, run: RunFolder) -> None:
        """Print the lowest validation loss and the path of its checkpoint, if there is one."""
        name = BestValidationCallback.__name__
        title = "lowest validation loss during training:"
        if summary := self.describe_selection(run, name, run.best_validation, title):
            print_out(summary)

    def load_data(self) -> Trajectories:
        """Load the datasets; of several processes, the first one loads and downloads before the others."""
        loading = {"download": self.download, "progress_bar": self.verbose}
        return process_group().main_first(partial(load_trajectories, self.dataset, **loading))

    def build_for_resume(self, start: StartPoint) -> Any:
        """Return the agent to continue. If no update is left, the datasets are not loaded."""
        if not start.needs_training(self.updates):
            assert start.file is not None
            return AGENTS[self.agent_name].load(start.file, device=self.learner.device)
        return self.build()


class EvaluatedOfflineTraining(OfflineTraining, EvaluatedTrainingCommand):
    """Training on Minari datasets of an agent that acts, with evaluations in the environment of the data."""

    env: str | None
    env_kwargs: dict[str, Any]
    trust_data: bool
    target_returns: tuple[float, ...] | None = None
    videos: bool
    video_budget: float
    """Default largest number of recorded steps for each update."""

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        check_options_not_negative(self, "episodes")
        json_object(self.env_kwargs)
        if self.evaluate_every and self.episodes == 0:
            raise ValueError(
                f"--evaluate-every must be 0 or None if --episodes is 0, got {self.evaluate_every}: "
                f"leave one out"
            )
        super().check()

    def check_agent(self, agent: Any) -> None:
        """Raise ValueError or TypeError if environments or target returns are invalid.

        The warning about another version of the environment does not depend on whether the run evaluates.
        """
        if agent.return_conditioned:
            validate_targets(self._targets(agent), agent.return_range)
        elif self.target_returns is not None:
            raise ValueError(
                "--target-returns has no effect, because the agent acts without a target return: leave it out"
            )
        agent.check_env_id(self.env)
        if self.episodes == 0:
            return
        check_env_named(agent, self.env, ", or train without evaluation: --episodes 0")
        with self.fresh_env(agent, 1):
            pass

    @classmethod
    def check_trust(cls, run: RunFolder) -> None:
        """Raise ValueError if the environment of a run needs trust."""
        super().check_trust(run)
        if run.config.get("trust_data"):
            raise ValueError(
                f"{run.path} was trained with --trust-data, in the environment described by its data: add "
                f"--trust if you trust the authors of the run and of "
                f"{', '.join(map(str, run.config['dataset']))}"
            )

    def with_trust(self) -> Self:
        """Return these options with trust in the descriptions of the environment in the datasets."""
        return replace(self, trust_data=True)  # type: ignore[type-var]  # subclasses are dataclasses

    def build_for_resume(self, start: StartPoint) -> Any:
        """Return the agent to continue. If no update is left, only trusted data are loaded."""
        return self.build() if self.trust_data else super().build_for_resume(start)

    def resolved_options(self, agent: Any) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        targets = {"target_returns": self._targets(agent)} if agent.return_conditioned else {}
        return targets | {"env": self.env or agent.dataset_info.env_id}

    def make_env(self, agent: Any, episodes: int) -> VecEnv:
        """Make environments for an evaluation."""
        return make_offline_env(agent, self.env, self.env_kwargs, min(MAX_ENVIRONMENTS, episodes))

    @property
    def validation_interval(self) -> int:
        """Number of updates between two measurements of the validation loss: that of evaluations, if set."""
        return self.evaluate_every or super().validation_interval

    def evaluation_interval(self, agent: Any) -> int:
        """Return the number of updates between two evaluations; 0 for no evaluation."""
        return super().evaluation_interval(agent) if self.episodes else 0

    @contextmanager
    def callbacks(self, agent: Any, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """Context manager for the callbacks of the training, one of which records videos."""
        with super().callbacks(agent, run) as others, ExitStack() as stack:
            yield [*others, *self._video_callbacks(agent, stack)]

    def _video_callbacks(self, agent: Any, stack: ExitStack) -> list[BaseCallback]:
        """Return the callback that records a video as often as evaluations are made.

        There is none without evaluations, and none if no episode fits into the budget of the training.
        """
        every = self.evaluation_interval(agent)
        length = self.callback_options(agent)["episode_length"]
        budget = self.video_budget if self.evaluate_every is None else math.inf
        if not self.videos or not every or budget * self.total < min(length, MAX_STEPS):
            return []
        return make_video_callbacks(
            self.env or agent.dataset_info.env_id,
            partial(self._make_rendering_env, agent),
            stack,
            every,
            budget=budget,
            target_return=self._targets(agent)[0] if agent.return_conditioned else None,
            episode_length=length,
        )

    def _make_rendering_env(self, agent: Any) -> gymnasium.Env | None:
        """Make one environment of the evaluations that renders; return None if it declares no such mode."""
        if not acts_in_env_of_data(agent, self.env, self.env_kwargs):
            env = make_rendering_env(EnvOptions(env=str(self.env), env_kwargs=self.env_kwargs))
            if env is not None:
                agent.check_env(make_sync_vec_env([lambda: env]))
            return env
        with self.fresh_env(agent, 1) as probe:
            modes = probe.get_attr("metadata", 0)[0].get("render_modes") or ()
        if RENDER_MODE not in modes:
            return None
        made: list[gymnasium.Env] = []
        kwargs = self.env_kwargs | {"render_mode": RENDER_MODE}
        agent.make_env(1, env_kwargs=kwargs, view=partial(_keep, made))
        return made[0]

    def evaluation_options(self, agent: Any) -> dict[str, Any]:
        """Return the target returns, if the agent has one, as arguments of `evaluate`."""
        return {"target_returns": self._targets(agent)} if agent.return_conditioned else {}

    def callback_options(self, agent: Any) -> dict[str, Any]:
        """Return the target returns, and the mean length of the episodes in the data."""
        assert agent.trajectories is not None  # it has the data to train on
        return super().callback_options(agent) | {"episode_length": float(agent.trajectories.lengths.mean())}

    def finish(self, agent: Any, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and those that the training selected.

        With ``--episodes 0``, nothing is evaluated; the command that evaluates the run is printed.
        """
        if self.episodes:
            super().finish(agent, run)
            return
        self.print_lowest_validation_loss(run)
        words = f"rlxf evaluate {quote(str(run.path))}" + ("" if run.config["env"] else " --env ID")
        print_out(f"not evaluated because of --episodes 0; run: {words}")

    def _targets(self, agent: Any) -> list[float]:
        return [agent.return_range[1]] if self.target_returns is None else list(self.target_returns)


def _keep(made: list[gymnasium.Env], env: gymnasium.Env) -> gymnasium.Env:
    """Append an environment to a list, and return it."""
    made.append(env)
    return env
