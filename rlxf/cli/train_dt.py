"""``rlxf train dt``: train on data, evaluate, and keep all of it in a folder."""

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
from rlxf.cli.checkpoints import FOLDERS, draw_targets, tables
from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.keeping import naming
from rlxf.cli.offline_env import check_named, make_offline_env
from rlxf.cli.offline_learner import OfflineLearner
from rlxf.cli.periodic_evaluation import EVALUATION, describe_best, interval
from rlxf.cli.pretrained import begin_with
from rlxf.cli.progress import OFFLINE, progress
from rlxf.cli.resumable import (
    Start,
    config_read,
    describe_completion,
    is_complete,
    learn_resumably,
    options_of,
    train_to_completion,
)
from rlxf.cli.screen import as_table, show
from rlxf.cli.task import Json, check_described
from rlxf.cli.together import join_others, log_of, new_run, started_anew
from rlxf.envs.trajectories import load_trajectories
from rlxf.evaluation import EvaluationCallback, TargetSweep, evaluate
from rlxf.evaluation.isolation import generators_kept
from rlxf.evaluation.targets import checked_targets
from rlxf.training import RunFolder
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.joining import here
from rlxf.training.log_files import replaced_events
from rlxf.training.stopping import Stop

ENVIRONMENTS = 32
OWN = (
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
"""Options of its own that ``config.json`` keeps, by which a run can go on."""


@dataclass(frozen=True, kw_only=True)
class TrainDecisionTransformer:
    """Train a Decision Transformer on Minari datasets, evaluate it, and keep all of it in a new folder.

    The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events; look at them with
    "tensorboard --logdir runs". It also holds best.zip, the agent of the best evaluation during training,
    which is reported next to the last one. Ctrl-C, SIGTERM and SIGUSR1 end the training and keep its
    progress, and "rlxf resume" continues it, also after a crash. Several processes share each batch if
    torchrun starts them: torchrun --nproc-per-node 4 -m rlxf train dt ...

    Every part of the transformer is chosen by name, e.g. --core.position rope; upper and lower case are
    the same. --help then shows the options of what was chosen, "rlxf techniques" what there is to choose.
    With --settings kzl or odt it begins with published settings; options that are given change them.

    Example: rlxf train dt --dataset rlxf/cartpole/mixed-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """Minari id, or several to be joined; "rlxf datasets" lists those on this machine."""
    settings: Literal["kzl", "odt"] | None = None
    """Published settings, which other options change: kzl, those of Decision Transformer, or odt, of its form
    that goes on learning online. "--settings kzl --help" shows them."""
    updates: Count = 100_000
    """Updates of the weights, each on one batch."""
    target_returns: tuple[float, ...] | None = None
    """Returns to ask for in evaluations, one after the other; None is the largest in the data. Of several,
    targets.png in the folder shows what was reached."""
    download: bool = False
    """Download a dataset that is not on this machine."""
    trust_data: bool = False
    """Trust the authors of the data: their full description of the environment (entry point, arguments,
    wrappers) is used, which can run code. Without this flag the registered environment is used."""
    env: str | None = None
    """Gymnasium id to evaluate in; None for that of the data; package:id imports the package first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object; in that of the data they change those of the data."""
    seed: int = 0
    """Of weights, windows and dropout: the same seed gives the same run on one machine."""
    pretrained: Path | None = None
    """Folder of a run whose weights it begins with, e.g. of "rlxf pretrain"; None for fresh ones."""
    run: Path | None = None
    """The new folder; None is runs/dt-DATASET-SEED. An existing one is refused."""
    episodes: Count = 100
    """Episodes of the evaluation at the end, for each target; 0 to train without any evaluation."""
    evaluate_every: Count | None = None
    """Updates from one evaluation during training to the next; None for a tenth of the training, 0 for
    none."""
    evaluation_episodes: Count = 20
    """Episodes of an evaluation during training, for each target: few, as the training waits meanwhile."""
    log_interval: Count = 100
    """Updates from one line of the log to the next."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds from one checkpoint to the next; "rlxf resume" goes on from them, and the last three stay."""
    progress_bar: bool = True
    """Show progress: updates, loss and evaluations every few seconds, and bars."""
    quiet: bool = False
    """Print warnings, errors and the final result only: neither the settings nor progress."""
    learner: Annotated[OfflineLearner, arg(name="")] = OfflineLearner()
    core: TransformerSpec = decision_transformer()
    """The transformer. With the defaults it is the published one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        join_others()
        run = started_anew(self._path)
        if run is not None:
            again = self.of_run(run, self.progress_bar, self.quiet, trust=True)  # this job wrote it
            return replace(again, trust_data=self.trust_data).prepare_again(run)
        self._check()
        agent = self._agent()
        begin_with(agent, self.pretrained)
        self._check_evaluation(agent)
        run = new_run(self._path, self._config(agent))
        with naming(run):
            agent.set_logger(log_of(run.make_logger))
        return partial(self._train, agent, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """The options that a run was started with.

        Args:
            run: the folder.
            progress_bar: show progress bars.
            trust: use the environment of its ``config.json`` and data in full, including code.

        Raises:
            ValueError: if its ``config.json`` lacks one, or its environment needs trust.
        """
        defaults: dict[str, Any] = {"env_kwargs": {}, "trust_data": False}
        config = defaults | run.config  # missing in runs from before the option existed
        if not trust:
            _check_untrusted(run)
        with config_read(run):
            learner = options_of(OfflineLearner, config)
            own = {name: config[name] for name in OWN}
            core = TransformerSpec.from_dict(config["core"])
        pretrained = None if own["pretrained"] is None else Path(own["pretrained"])
        again = own | {name: tuple(own[name]) for name in ("dataset", "target_returns")}
        again |= {"pretrained": pretrained, "run": run.path, "trust_data": trust}
        again |= {"progress_bar": progress_bar, "quiet": quiet}
        return cls(**again, learner=learner, core=core)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """As `prepare`, to go on with a run that was cut off.

        Raises:
            FileNotFoundError: if none of its checkpoints is whole.
        """
        join_others()
        if is_complete(run, self.updates):
            return partial(show, describe_completion(run, "updates", f"; see: rlxf evaluate {run.path}"))
        start = Start.of(run)
        agent = self._agent_at(start)
        self._check_evaluation(agent)
        agent.set_logger(log_of(partial(run.continue_logger, start.log, start.steps)))
        return partial(self._train, agent, run, start)

    def _agent_at(self, start: Start) -> DecisionTransformer:
        """Load the agent to continue. After all updates, only a trusted environment needs the data."""
        if start.file is not None and start.steps >= self.updates and not self.trust_data:
            return DecisionTransformer.load(start.file, device=self.learner.device)
        agent = self._agent()
        if start.file is None:
            begin_with(agent, self.pretrained)
        return agent

    def _check(self) -> None:
        check_counts(self, "updates", "evaluation_episodes", "log_interval")
        check_from_zero(self, "episodes", "evaluate_every", "checkpoint_seconds", "seed")
        if self.evaluate_every and self.episodes == 0:
            raise ValueError(
                f"evaluate_every {self.evaluate_every} needs episodes to play, got episodes 0: leave one out"
            )
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")

    def _check_evaluation(self, agent: DecisionTransformer) -> None:
        """That environments can be made, and what is asked for there, is known before the training."""
        checked_targets(self._targets(agent), agent.return_range)
        if self.episodes == 0:
            return
        check_named(agent, self.env, ", or train without evaluation: --episodes 0")
        with self._fresh_env(agent, 1):
            pass

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"dt-{name}-{self.seed}") if self.run is None else self.run

    def _agent(self) -> DecisionTransformer:
        loading = {"download": self.download, "progress_bar": self._speaks}
        data = here().first_then_all(partial(load_trajectories, self.dataset, **loading))
        options = self.learner.arguments()
        return DecisionTransformer(data, core=self.core, seed=self.seed, trust=self.trust_data, **options)

    def _config(self, agent: DecisionTransformer) -> dict[str, Any]:
        """What the run is started with, defaults included."""
        own = {name: getattr(self, name) for name in OWN} | {
            "dataset": list(self.dataset),
            "target_returns": self._targets(agent),
            "env": self.env or agent.facts.env_id,
            "evaluate_every": self._interval,
            "pretrained": None if self.pretrained is None else str(self.pretrained),
        }
        read_off = {"return_scale": agent.return_scale, "episode_length": agent.episode_length}
        learner = asdict(self.learner) | read_off
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
        with naming(run), closing(agent.logger):
            if not self.quiet:
                show(as_table(str(run.path), run.config))
            train_to_completion(agent, run, start, self.updates, learn, finish)

    @property
    def _interval(self) -> int:
        """Updates from one evaluation to the next."""
        return interval(self.evaluate_every, self.updates) if self.episodes else 0

    @property
    def _speaks(self) -> bool:
        """True if this process shows progress."""
        return self.progress_bar and not self.quiet and here().writes

    def _learn(self, agent: DecisionTransformer, run: RunFolder, start: Start, stop: Stop) -> None:
        learn = partial(agent.learn, self.updates, log_interval=self.log_interval)
        with (
            self._evaluations(agent, run) as evaluations,
            progress(self._speaks, "updates", self.updates, OFFLINE, evaluations.values()) as shown,
        ):
            callbacks, seconds = [*evaluations.values(), *shown], self.checkpoint_seconds
            learn_resumably(agent, run, learn, callbacks, evaluations, seconds, start, stop)

    @contextmanager
    def _evaluations(
        self, agent: DecisionTransformer, run: RunFolder
    ) -> Iterator[dict[str, EvaluationCallback]]:
        """Provide the evaluation callbacks of the training by name; none if evaluation is turned off."""
        if not self._interval or not here().writes:
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
        """Report the last checkpoint, and the best one next to it if evaluations chose one."""
        if not here().writes:
            return
        if self.episodes == 0:
            named = "" if run.config["env"] else " --env ID"
            show(f"not evaluated, as asked for with --episodes 0; see: rlxf evaluate {run.path}{named}")
            return
        agents = {"last": agent}
        reports = {"last": self._report(agent, agent.logger)}
        if run.best.is_file():
            agents["best"] = DecisionTransformer.load(run.best, device=agent.device)
            with replaced_events(run.path / FOLDERS["best"]) as writer:
                reports["best"] = self._report(agents["best"], writer, agent)
        for table in tables(reports, {name: each.num_timesteps for name, each in agents.items()}):
            show(table)
        if summary := describe_best(run, "update"):
            show(summary)
        draw_targets(reports, {"last": run.path, "best": run.path / FOLDERS["best"]})

    def _report(
        self,
        agent: DecisionTransformer,
        logger: Logger | SummaryWriter,
        with_data: DecisionTransformer | None = None,
    ) -> TargetSweep:
        """What an agent reaches in the environments of one that has its data, by default its own."""
        with self._fresh_env(with_data or agent, self.episodes) as env:
            return evaluate(
                agent,
                env,
                self.episodes,
                target_returns=self._targets(agent),
                progress_bar=self._speaks,
                logger=logger,
            )

    @contextmanager
    def _fresh_env(self, agent: DecisionTransformer, episodes: int) -> Iterator[VecEnv]:
        """Environments to evaluate in."""
        number = min(ENVIRONMENTS, episodes)
        with generators_kept():  # without a seed, SB3 draws from numpy's
            env = make_offline_env(agent, self.env, self.env_kwargs, number)
        with closing(env):
            yield env


def _check_untrusted(run: RunFolder) -> None:
    """Raise ValueError if the run goes on in another environment unless it and its data are trusted."""
    check_described(run.config)
    if run.config.get("trust_data"):
        raise ValueError(
            f"{run.path} was trained with --trust-data, in the environment that its data describe: add "
            f"--trust if you trust the author of the run and of {', '.join(map(str, run.config['dataset']))}"
        )
