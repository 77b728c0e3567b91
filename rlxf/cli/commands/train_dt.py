"""``rlxf train dt``: train a Decision Transformer on datasets, evaluate it, and save it as a run."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter
from tyro.conf import arg

from rlxf.agents.decision_transformer import DecisionTransformer, decision_transformer
from rlxf.attention import TransformerSpec
from rlxf.cli.argument_checks import Count, check_counts, check_from_zero
from rlxf.cli.finalize_run import FOLDERS, error_context, plot_targets, tables
from rlxf.cli.options.env_options import Json, check_env_trust
from rlxf.cli.options.logging_options import EVALUATION, describe_best, interval
from rlxf.cli.options.offline_options import OfflineOptions, check_env_named, make_offline_env
from rlxf.cli.output import as_table, print_out
from rlxf.cli.progress import OFFLINE, progress
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
from rlxf.data import load_trajectories
from rlxf.evaluation import EvaluationCallback, TargetSweep, evaluate
from rlxf.evaluation.environment import preserve_rng_state
from rlxf.evaluation.targets import validate_targets
from rlxf.training import RunFolder
from rlxf.training.checkpoints import EVERY_SECONDS, StopRequest
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import replaced_events

ENVIRONMENTS = 32
"""Maximum number of parallel environments of an evaluation."""
COMMAND_OPTIONS = (
    "dataset",
    "updates",
    "target_returns",
    "env",
    "env_kwargs",
    "seed",
    "pretrained",
    "episodes",
    "evaluate_every",
    "evaluation_episodes",
    "log_interval",
    "checkpoint_seconds",
    "trust_data",
)
"""Options of the command itself in ``config.json``, which are needed to resume a run."""


@dataclass(frozen=True, kw_only=True)
class TrainDecisionTransformer:
    """Train a Decision Transformer on Minari datasets, evaluate it, and save it in a new folder.

    The folder contains config.json, checkpoint.zip, progress.csv and TensorBoard events; show them with the
    command "tensorboard --logdir runs". The checkpoint of the best evaluation during training is best.zip; it
    is reported next to the last checkpoint. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its
    progress, and "rlxf resume" continues it, also after a crash. Each batch is divided among the processes
    of torchrun: torchrun --nproc-per-node 4 -m rlxf train dt ...

    Each technique of the transformer is chosen by its name, e.g. --core.position rope; names are not case
    sensitive. With these options, --help shows the options of the chosen techniques. "rlxf techniques" lists
    all techniques. --settings kzl and --settings odt select published settings, which other options override.

    Example: rlxf train dt --dataset rlxf/cartpole/mixed-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine."""
    settings: Literal["kzl", "odt"] | None = None
    """Published settings, which other options override.
    They are those of Decision Transformer (kzl) or of Online Decision Transformer (odt).
    Add --help to show them."""
    updates: Count = 100_000
    """Number of weight updates, each on one batch."""
    target_returns: tuple[float, ...] | None = None
    """Target returns of the evaluations. None means the largest return in the data.
    With several targets, targets.png in the folder plots the achieved returns."""
    download: bool = False
    """Download datasets that are not on this machine."""
    trust_data: bool = False
    """Trust the authors of the data.
    Their full description of the environment (entry point, arguments, wrappers) is used, which can run code.
    Without this flag, the registered environment is used."""
    env: str | None = None
    """Gymnasium id of the environment for evaluations. None means that of the data.
    With package:id, the package is imported first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object. In the environment of the data, they update its own."""
    seed: int = 0
    """Seed of weights, windows and dropout. Equal seeds give equal runs on one machine."""
    pretrained: Path | None = None
    """Folder of a run with initial weights, e.g. of "rlxf pretrain". None means random weights."""
    run: Path | None = None
    """New folder of the run. None means runs/dt-DATASET-SEED. It must not exist."""
    episodes: Count = 100
    """Number of episodes of the final evaluation, per target return. 0 turns off all evaluations."""
    evaluate_every: Count | None = None
    """Number of updates between two evaluations during training.
    None means a tenth of the training. 0 means no evaluation during training."""
    evaluation_episodes: Count = 20
    """Number of episodes of an evaluation during training, per target return. The training waits for it."""
    log_interval: Count = 100
    """Number of updates between two log entries."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds between two checkpoints for "rlxf resume". The last three are kept."""
    progress_bar: bool = True
    """Show updates, loss and evaluations every few seconds, and progress bars."""
    quiet: bool = False
    """Print only warnings, errors and the final result, without settings and progress."""
    learner: Annotated[OfflineOptions, arg(name="")] = OfflineOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. The default is that of Chen et al. 2021 (Decision Transformer)."""

    def prepare(self) -> Callable[[], None]:
        """Load the datasets, build the agent, create the run, and return the training to run."""
        init_distributed()
        run = restarted_run(self._path)
        if run is not None:
            options = self.of_run(run, self.progress_bar, self.quiet, trust=True)  # this job wrote the run
            return replace(options, trust_data=self.trust_data).prepare_again(run)
        self._check()
        agent = self._agent()
        load_initial_weights(agent, self.pretrained)
        self._check_evaluation(agent)
        run = create_run(self._path, self._config(agent))
        with error_context(run):
            agent.set_logger(rank_zero_logger(run.make_logger))
        return partial(self._train, agent, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """Return the options that a run was started with.

        Args:
            run: folder of the run.
            progress_bar: show progress bars.
            quiet: print neither settings nor progress.
            trust: use the full description of the environment in ``config.json`` and datasets, including
                code.

        Raises:
            ValueError: if an option is missing in its ``config.json``, or its environment needs trust.
        """
        defaults: dict[str, Any] = {"env_kwargs": {}, "trust_data": False}
        config = defaults | run.config  # runs of older versions lack these options
        if not trust:
            _check_untrusted(run)
        with config_errors(run):
            learner = options_of(OfflineOptions, config)
            own = {name: config[name] for name in COMMAND_OPTIONS}
            core = TransformerSpec.from_dict(config["core"])
        pretrained = None if own["pretrained"] is None else Path(own["pretrained"])
        options = own | {name: tuple(own[name]) for name in ("dataset", "target_returns")}
        options |= {"pretrained": pretrained, "run": run.path, "trust_data": trust}
        options |= {"progress_bar": progress_bar, "quiet": quiet}
        return cls(**options, learner=learner, core=core)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """Like `prepare`, to resume an interrupted run.

        Raises:
            FileNotFoundError: if it has checkpoints, and none of them is intact.
        """
        init_distributed()
        if is_complete(run, self.updates):
            return partial(print_out, describe_completion(run, "updates", f"; see: rlxf evaluate {run.path}"))
        start = Start.of(run)
        agent = self._agent_at(start)
        self._check_evaluation(agent)
        agent.set_logger(rank_zero_logger(partial(run.continue_logger, start.log, start.steps)))
        return partial(self._train, agent, run, start)

    def _agent_at(self, start: Start) -> DecisionTransformer:
        """Load the agent to continue. After the last update it needs the data only if they are trusted."""
        if start.file is not None and start.steps >= self.updates and not self.trust_data:
            return DecisionTransformer.load(start.file, device=self.learner.device)
        agent = self._agent()
        if start.file is None:
            load_initial_weights(agent, self.pretrained)
        return agent

    def _check(self) -> None:
        check_counts(self, "updates", "evaluation_episodes", "log_interval")
        check_from_zero(self, "episodes", "evaluate_every", "checkpoint_seconds", "seed")
        if self.evaluate_every and self.episodes == 0:
            raise ValueError(
                f"evaluate_every must be 0 or None if episodes is 0, got {self.evaluate_every}: leave one out"
            )
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")

    def _check_evaluation(self, agent: DecisionTransformer) -> None:
        """Raise ValueError or TypeError if environments or target returns are invalid."""
        validate_targets(self._targets(agent), agent.return_range)
        if self.episodes == 0:
            return
        check_env_named(agent, self.env, ", or train without evaluation: --episodes 0")
        with self._fresh_env(agent, 1):
            pass

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"dt-{name}-{self.seed}") if self.run is None else self.run

    def _agent(self) -> DecisionTransformer:
        loading = {"download": self.download, "progress_bar": self._verbose}
        data = process_group().main_first(partial(load_trajectories, self.dataset, **loading))
        options = self.learner.arguments()
        return DecisionTransformer(data, core=self.core, seed=self.seed, trust=self.trust_data, **options)

    def _config(self, agent: DecisionTransformer) -> dict[str, Any]:
        """Return the options of the run, including defaults."""
        own = {name: getattr(self, name) for name in COMMAND_OPTIONS} | {
            "dataset": list(self.dataset),
            "target_returns": self._targets(agent),
            "env": self.env or agent.dataset_info.env_id,
            "evaluate_every": self._interval,
            "pretrained": None if self.pretrained is None else str(self.pretrained),
        }
        from_data = {"return_scale": agent.return_scale, "episode_length": agent.episode_length}
        learner = asdict(self.learner) | from_data
        return (
            {"agent": "decision_transformer", "settings": self.settings}
            | own
            | learner
            | {"core": agent.core.to_dict()}
        )

    def _targets(self, agent: DecisionTransformer) -> list[float]:
        return [agent.return_range[1]] if self.target_returns is None else list(self.target_returns)

    def _train(self, agent: DecisionTransformer, run: RunFolder, start: Start) -> None:
        learn, finish = partial(self._learn, agent, run, start), partial(self._evaluate, agent, run)
        with error_context(run), closing(agent.logger):
            if not self.quiet:
                print_out(as_table(str(run.path), run.config))
            train_to_completion(agent, run, start, self.updates, learn, finish)

    @property
    def _interval(self) -> int:
        """Number of updates between two evaluations; 0 for no evaluation."""
        return interval(self.evaluate_every, self.updates) if self.episodes else 0

    @property
    def _verbose(self) -> bool:
        """Return whether this process shows progress."""
        return self.progress_bar and not self.quiet and process_group().writes

    def _learn(self, agent: DecisionTransformer, run: RunFolder, start: Start, stop: StopRequest) -> None:
        learn = partial(agent.learn, self.updates, log_interval=self.log_interval)
        with (
            self._evaluations(agent, run) as evaluations,
            progress(self._verbose, "updates", self.updates, OFFLINE, evaluations.values()) as display,
        ):
            callbacks, seconds = [*evaluations.values(), *display], self.checkpoint_seconds
            learn_resumably(agent, run, learn, callbacks, evaluations, seconds, start, stop)

    @contextmanager
    def _evaluations(
        self, agent: DecisionTransformer, run: RunFolder
    ) -> Iterator[dict[str, EvaluationCallback]]:
        """Yield the evaluation callback of the training by its name; nothing if evaluation is off."""
        if not self._interval or not process_group().writes:
            yield {}
            return
        with self._fresh_env(agent, self.evaluation_episodes) as env:
            yield {
                EVALUATION: EvaluationCallback(
                    env,
                    self.evaluation_episodes,
                    self._interval,
                    target_returns=self._targets(agent),
                    best_path=run.best,
                )
            }

    def _evaluate(self, agent: DecisionTransformer, run: RunFolder) -> None:
        """Evaluate and report the last checkpoint, and the best one if there is one."""
        if not process_group().writes:
            return
        if self.episodes == 0:
            env_option = "" if run.config["env"] else " --env ID"
            print_out(f"not evaluated because of --episodes 0; run: rlxf evaluate {run.path}{env_option}")
            return
        agents = {"last": agent}
        reports = {"last": self._report(agent, agent.logger)}
        if run.best.is_file():
            agents["best"] = DecisionTransformer.load(run.best, device=agent.device)
            with replaced_events(run.path / FOLDERS["best"]) as writer:
                reports["best"] = self._report(agents["best"], writer, agent)
        for table in tables(reports, {name: each.num_timesteps for name, each in agents.items()}):
            print_out(table)
        if summary := describe_best(run, "update"):
            print_out(summary)
        plot_targets(reports, {"last": run.path, "best": run.path / FOLDERS["best"]})

    def _report(
        self,
        agent: DecisionTransformer,
        logger: Logger | SummaryWriter,
        with_data: DecisionTransformer | None = None,
    ) -> TargetSweep:
        """Evaluate an agent in the environments of ``with_data``, which has datasets; None for ``agent``."""
        with self._fresh_env(with_data or agent, self.episodes) as env:
            return evaluate(
                agent,
                env,
                self.episodes,
                target_returns=self._targets(agent),
                progress_bar=self._verbose,
                logger=logger,
            )

    @contextmanager
    def _fresh_env(self, agent: DecisionTransformer, episodes: int) -> Iterator[VecEnv]:
        """Yield environments for an evaluation, and close them afterwards."""
        number = min(ENVIRONMENTS, episodes)
        with preserve_rng_state():  # without a seed, SB3 draws from NumPy's global generator
            env = make_offline_env(agent, self.env, self.env_kwargs, number)
        with closing(env):
            yield env


def _check_untrusted(run: RunFolder) -> None:
    """Raise ValueError if the environment of the run needs trust."""
    check_env_trust(run.config)
    if run.config.get("trust_data"):
        raise ValueError(
            f"{run.path} was trained with --trust-data, in the environment described by its data: add "
            f"--trust if you trust the authors of the run and of {', '.join(map(str, run.config['dataset']))}"
        )
