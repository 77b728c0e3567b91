"""``rlxf train gtrxl``: train a Gated Transformer-XL with PPO, evaluate it, and save it as a run."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter
from tyro.conf import arg

from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.agents.gtrxl.policy import default_policy_name
from rlxf.attention import TransformerSpec
from rlxf.cli.argument_checks import Count, check_counts, check_from_zero
from rlxf.cli.finalize_run import FOLDERS, error_context, tables
from rlxf.cli.options.env_options import EnvOptions, check_env_trust
from rlxf.cli.options.logging_options import EVALUATION, TensorBoardOptions, describe_best, interval
from rlxf.cli.options.normalization import normalize_env, normalize_like
from rlxf.cli.options.ppo_options import PPOOptions, WorkerOptions
from rlxf.cli.output import as_table, print_out
from rlxf.cli.progress import ONLINE, progress
from rlxf.cli.run_loading import load_initial_weights
from rlxf.cli.torchrun_job import create_run, init_distributed, rank_zero_logger, restarted_run
from rlxf.cli.training_session import (
    Start,
    config_errors,
    describe_completion,
    is_complete,
    learn_resumably,
    options_of,
    train_to_completion,
)
from rlxf.evaluation import EvaluationCallback, Report, evaluate
from rlxf.evaluation.environment import preserve_rng_state
from rlxf.training import RunFolder, save_normalizer
from rlxf.training.checkpoints import EVERY_SECONDS, StopRequest
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import replaced_events

COMMAND_OPTIONS = (
    "total_timesteps",
    "seed",
    "pretrained",
    "episodes",
    "evaluate_every",
    "evaluation_episodes",
    "policy",
    "normalize_observations",
    "normalize_rewards",
    "checkpoint_seconds",
)
"""Options of the command itself in ``config.json``, which are needed to resume a run."""


@dataclass(frozen=True, kw_only=True)
class TrainGTrXL:
    """Train a Gated Transformer-XL with PPO, evaluate it, and save it in a new folder.

    The folder contains config.json, checkpoint.zip, progress.csv and TensorBoard events; show them with the
    command "tensorboard --logdir runs". The checkpoint of the best evaluation during training is best.zip; it
    is reported next to the last checkpoint. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its
    progress, and "rlxf resume" continues it, also after a crash. The environments are divided among the
    processes of torchrun: torchrun --nproc-per-node 4 -m rlxf train gtrxl ...

    Each technique of the transformer is chosen by its name, e.g. --core.position alibi; names are not case
    sensitive. With these options, --help shows the options of the chosen techniques. "rlxf techniques" lists
    all techniques.

    Example: rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{"corridor_length":9}' --total-timesteps 20000
    """

    task: Annotated[EnvOptions, arg(name="")]
    total_timesteps: Count = 200_000
    """Number of environment steps, over all environments, e.g. 1e6.
    It is rounded up to whole rollouts of n_envs * n_steps steps.
    The default is sufficient for a T-Maze with a corridor of 50."""
    seed: int = 0
    """Seed of weights, actions, minibatches and environments. Equal seeds give equal runs on one machine."""
    pretrained: Path | None = None
    """Folder of a run with initial weights, e.g. of "rlxf pretrain". None means random weights."""
    run: Path | None = None
    """New folder of the run. None means runs/gtrxl-ENV-SEED. It must not exist."""
    episodes: Count = 100
    """Number of episodes of the final evaluation.
    With 100, the 95% confidence interval of a success rate is at most +-0.1."""
    evaluate_every: Count | None = None
    """Number of environment steps between two evaluations during training.
    None means a tenth of the training. 0 means no evaluation during training."""
    evaluation_episodes: Count = 20
    """Number of episodes of an evaluation during training. The training waits for it."""
    policy: Literal["MlpGTrXLPolicy", "CnnGTrXLPolicy", "MultiInputGTrXLPolicy"] | None = None
    """Policy class, which determines the feature extractor. None selects it by the observation space."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation, which the run saves."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of discounted returns.
    Evaluations report the rewards of the environment."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds between two checkpoints for "rlxf resume". The last three are kept."""
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds, and progress bars."""
    quiet: bool = False
    """Print only warnings, errors and the final result, without settings and progress."""
    processes: Annotated[WorkerOptions, arg(name="")] = WorkerOptions()
    looks: Annotated[TensorBoardOptions, arg(name="")] = TensorBoardOptions()
    learner: Annotated[PPOOptions, arg(name="")] = PPOOptions()
    core: TransformerSpec = gtrxl()
    """Transformer of the agent. The default is a Gated Transformer-XL (Parisotto et al. 2020)."""

    def prepare(self) -> Callable[[], None]:
        """Make the environments, build the agent, create the run, and return the training to run."""
        init_distributed()
        run = restarted_run(self._path)
        if run is not None:
            options = self.of_run(run, self.progress_bar, self.quiet, trust=True)  # this job wrote the run
            return options.prepare_again(run)
        self._check()
        env, agent = self._build()
        load_initial_weights(agent, self.pretrained)
        run = create_run(self._path, self._config(agent))
        with error_context(run):
            agent.set_logger(rank_zero_logger(run.make_logger))
        return partial(self._train, agent, env, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """Return the options that a run was started with.

        Args:
            run: folder of the run.
            progress_bar: show progress bars.
            quiet: print neither settings nor progress.
            trust: use the full description of the environment in ``config.json``, including code.

        Raises:
            ValueError: if an option is missing in its ``config.json``, or its environment needs trust.
        """
        if not trust:
            check_env_trust(run.config)
        with config_errors(run):
            parts = {
                "task": options_of(EnvOptions, run.config),
                "processes": options_of(WorkerOptions, run.config),
                "looks": options_of(TensorBoardOptions, run.config),
                "learner": options_of(PPOOptions, run.config),
                "core": TransformerSpec.from_dict(run.config["core"]),
            }
            own = {name: run.config[name] for name in COMMAND_OPTIONS}
        own["pretrained"] = None if own["pretrained"] is None else Path(own["pretrained"])
        return cls(**own | parts, run=run.path, progress_bar=progress_bar, quiet=quiet)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """Like `prepare`, to resume an interrupted run.

        Raises:
            FileNotFoundError: if it has checkpoints, and none of them is intact.
        """
        init_distributed()
        if is_complete(run, self.total_timesteps):
            return partial(print_out, describe_completion(run, "steps", f"; see: rlxf evaluate {run.path}"))
        start = Start.of(run)
        env, agent = self._build()
        if start.file is None:
            load_initial_weights(agent, self.pretrained)
        agent.set_logger(rank_zero_logger(partial(run.continue_logger, start.log, start.steps)))
        return partial(self._train, agent, env, run, start)

    def _check(self) -> None:
        check_counts(self, "total_timesteps", "episodes", "evaluation_episodes")
        check_from_zero(self, "evaluate_every", "checkpoint_seconds", "seed")
        self.looks.check()
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")

    @property
    def _path(self) -> Path:
        task = re.sub(r"[^\w.-]+", "-", self.task.env)
        return Path("runs", f"gtrxl-{task}-{self.seed}") if self.run is None else self.run

    def _build(self) -> tuple[VecEnv, GTrXLPPO]:
        """Return the environments of this process, and an agent in them."""
        number = process_group().part("n_envs", self.learner.n_envs)
        env = self._envs(number, self.seed + process_group().rows(number).start)
        options = self.normalize_observations, self.normalize_rewards
        return env, self._agent(normalize_env(env, *options, self.learner.gamma))

    def _envs(self, number: int, seed: int | None) -> VecEnv:
        return self.task.make(number, seed, self.processes.to_workers(number))

    def _agent(self, env: VecEnv) -> GTrXLPPO:
        policy = self.policy or default_policy_name(env.observation_space)
        return GTrXLPPO(policy, env, core=self.core, seed=self.seed, **self.learner.arguments())

    def _config(self, agent: GTrXLPPO) -> dict[str, Any]:
        """Return the options of the run, including defaults."""
        own = {name: getattr(self, name) for name in COMMAND_OPTIONS} | {
            "pretrained": None if self.pretrained is None else str(self.pretrained),
            "evaluate_every": self._interval(agent),
            "policy": type(agent.policy).__name__,
        }
        core = {"core": agent.core.to_dict()}
        parts = asdict(self.processes) | asdict(self.looks) | asdict(self.learner)
        parts |= {"n_steps": agent.n_steps, "batch_size": agent.batch_size}
        return {"agent": "gtrxl"} | asdict(self.task) | own | parts | core

    def _train(self, agent: GTrXLPPO, env: VecEnv, run: RunFolder, start: Start) -> None:
        learn, finish = partial(self._learn, agent, run, start), partial(self._evaluate, agent, run)
        with error_context(run), closing(env), closing(agent.logger):
            if not self.quiet:
                print_out(as_table(str(run.path), run.config))
            train_to_completion(agent, run, start, self.total_timesteps, learn, finish)

    def _interval(self, agent: GTrXLPPO) -> int:
        """Return the number of steps between two evaluations; 0 for no evaluation."""
        return interval(self.evaluate_every, self.total_timesteps, agent.n_envs_total * agent.n_steps)

    @property
    def _verbose(self) -> bool:
        """Return whether this process shows progress."""
        return self.progress_bar and not self.quiet and process_group().writes

    def _learn(self, agent: GTrXLPPO, run: RunFolder, start: Start, stop: StopRequest) -> None:
        learn, rollout = partial(agent.learn, self.total_timesteps), agent.n_envs_total * agent.n_steps
        total = -(-self.total_timesteps // rollout) * rollout
        with (
            self._evaluations(agent, run) as evaluations,
            self._tensorboard_callbacks(agent) as tensorboard,
            progress(self._verbose, "steps", total, ONLINE, evaluations.values()) as display,
        ):
            callbacks, seconds = [*evaluations.values(), *tensorboard, *display], self.checkpoint_seconds
            learn_resumably(agent, run, learn, callbacks, evaluations, seconds, start, stop)

    def _tensorboard_callbacks(self, agent: GTrXLPPO) -> AbstractContextManager[list[BaseCallback]]:
        """Return the callbacks of `TensorBoardOptions`; videos are recorded as often as evaluations are
        made.
        """
        if not process_group().writes:
            return nullcontext([])
        return self.looks.callbacks(self.task, self._interval(agent) or self.total_timesteps)

    @contextmanager
    def _evaluations(self, agent: GTrXLPPO, run: RunFolder) -> Iterator[dict[str, EvaluationCallback]]:
        """Yield the evaluation callback of the training by its name; nothing if evaluation is off."""
        every = self._interval(agent)
        if not every or not process_group().writes:
            yield {}
            return
        with self._fresh_env(agent, self.evaluation_episodes) as env:
            yield {
                EVALUATION: EvaluationCallback(
                    env,
                    self.evaluation_episodes,
                    every,
                    best_path=run.best,
                    on_new_best=partial(_keep_statistics, agent, run),
                )
            }

    def _evaluate(self, agent: GTrXLPPO, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and the best one if there is one."""
        if not process_group().writes:
            return
        with self._fresh_env(agent, self.episodes) as env:
            reports, steps = {"last": self._report(agent, env, agent.logger)}, {"last": agent.num_timesteps}
        if run.best.is_file():
            reports["best"], steps["best"] = self._report_best(run)
        for table in tables(reports, steps):
            print_out(table)
        if summary := describe_best(run, "step"):
            print_out(summary)

    def _report(self, agent: GTrXLPPO, env: VecEnv, logger: Logger | SummaryWriter) -> Report:
        return evaluate(agent, env, self.episodes, progress_bar=self._verbose, logger=logger)

    def _report_best(self, run: RunFolder) -> tuple[Report, int]:
        """Evaluate the best checkpoint on the episodes of the last one; return report and training steps."""
        from rlxf.cli.run_loading import load_agent  # imports dataset readers, which training does not need

        with (
            closing(self._envs(min(self.learner.n_envs, self.episodes), None)) as env,
            replaced_events(run.path / FOLDERS["best"]) as writer,
        ):
            best = load_agent(run, env, run.best, self.learner.device)
            assert isinstance(best, GTrXLPPO)
            return self._report(best, env, writer), best.num_timesteps

    @contextmanager
    def _fresh_env(self, agent: GTrXLPPO, episodes: int) -> Iterator[VecEnv]:
        """Yield environments for an evaluation, with the normalization of the training; close them after."""
        with preserve_rng_state():  # without a seed, SB3 draws from NumPy's global generator
            env = self._envs(min(self.learner.n_envs, episodes), None)
        with closing(env):
            yield normalize_like(env, agent.get_vec_normalize_env())


def _keep_statistics(agent: GTrXLPPO, run: RunFolder) -> None:
    """Save the normalization statistics of the best agent, if there are any."""
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.best_normalizer, normalizer)
