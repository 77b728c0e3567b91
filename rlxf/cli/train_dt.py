"""``rlxf train dt``: train on data, evaluate, and keep all of it in a folder."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter
from tyro.conf import arg

from rlxf.agents.decision_transformer import DecisionTransformer, decision_transformer
from rlxf.attention import TransformerSpec
from rlxf.cli.checkpoints import FOLDERS, tables
from rlxf.cli.counts import check_counts
from rlxf.cli.keeping import keep
from rlxf.cli.offline_learner import OfflineLearner
from rlxf.cli.pretrained import begin_with
from rlxf.cli.screen import as_table, show
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback, TargetSweep, evaluate
from rlxf.training import RunFolder

ENVIRONMENTS = 32


@dataclass(frozen=True, kw_only=True)
class TrainDecisionTransformer:
    """Train a Decision Transformer on Minari datasets, evaluate it, and keep all of it in a new folder.

    The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events; look at them with
    "tensorboard --logdir runs". Ctrl-C ends the training and keeps what was learned. With --evaluate-every
    there is also best.zip, the agent at its best evaluation; it is reported beside the last one.

    Every part of the transformer is chosen by name, e.g. --core.position rope; upper and lower case are
    the same. --help then shows the options of what was chosen, "rlxf techniques" what there is to choose.

    Example: rlxf train dt --dataset rlxf/cartpole/mixed-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """Minari id, or several to be joined; "rlxf datasets" lists those on this machine."""
    updates: int = 100_000
    """Updates of the weights, each on one batch."""
    target_returns: tuple[float, ...] | None = None
    """Returns to ask for in evaluations; None is the largest in the data."""
    download: bool = False
    """Download a dataset that is not on this machine."""
    env: str | None = None
    """Gymnasium id to evaluate in; None is what the data name."""
    seed: int = 0
    """Of weights, windows and dropout: the same seed gives the same run on one machine."""
    pretrained: Path | None = None
    """Folder of a run whose weights it begins with, e.g. of "rlxf pretrain"; None for fresh ones."""
    run: Path | None = None
    """The new folder; None is runs/dt-DATASET-SEED. An existing one is refused."""
    episodes: int = 100
    """Episodes of an evaluation, for each target."""
    evaluate_every: int | None = None
    """Also evaluate each time so many updates are done; None: at the end alone."""
    log_interval: int = 100
    """Updates from one line of the log to the next."""
    progress_bar: bool = True
    """Show progress bars."""
    learner: Annotated[OfflineLearner, arg(name="")] = OfflineLearner()
    core: TransformerSpec = decision_transformer()
    """The transformer. With the defaults it is the published one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        self._check()
        agent = self._agent()
        begin_with(agent, self.pretrained)
        with self._fresh_env(agent):  # that it can be made is known before the training
            pass
        run = RunFolder.create(self._path, self._config(agent))
        agent.set_logger(run.make_logger())
        return partial(self._train, agent, run)

    def _check(self) -> None:
        check_counts(self, "updates", "episodes", "evaluate_every", "log_interval")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"dt-{name}-{self.seed}") if self.run is None else self.run

    def _agent(self) -> DecisionTransformer:
        return DecisionTransformer(
            self.dataset, core=self.core, seed=self.seed, download=self.download, **self.learner.arguments()
        )

    def _config(self, agent: DecisionTransformer) -> dict[str, Any]:
        """What the run is started with, defaults included."""
        own = {
            "dataset": list(self.dataset),
            "updates": self.updates,
            "target_returns": self._targets(agent),
            "env": self.env or agent.facts.env_id,
            "seed": self.seed,
            "pretrained": None if self.pretrained is None else str(self.pretrained),
            "episodes": self.episodes,
            "evaluate_every": self.evaluate_every,
        }
        read_off = {"return_scale": agent.return_scale, "episode_length": agent.episode_length}
        learner = asdict(self.learner) | read_off
        return {"agent": "decision_transformer"} | own | learner | {"core": agent.core.to_dict()}

    def _targets(self, agent: DecisionTransformer) -> list[float]:
        return [agent.return_range[1]] if self.target_returns is None else list(self.target_returns)

    def _train(self, agent: DecisionTransformer, run: RunFolder) -> None:
        show(as_table(str(run.path), run.config))
        with closing(agent.logger):
            self._learn(agent, run)
            self._evaluate(agent, run)

    def _learn(self, agent: DecisionTransformer, run: RunFolder) -> None:
        try:
            with self._evaluations(agent, run) as callbacks:
                agent.learn(self.updates, callbacks, self.log_interval, progress_bar=self.progress_bar)
        finally:
            keep(agent, run)

    @contextmanager
    def _evaluations(self, agent: DecisionTransformer, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """What evaluates while the agent learns, if that is asked for."""
        if self.evaluate_every is None:
            yield []
            return
        with self._fresh_env(agent) as env:
            targets = self._targets(agent)
            yield [
                EvaluationCallback(
                    env, self.episodes, self.evaluate_every, target_returns=targets, best_path=run.best
                )
            ]

    def _evaluate(self, agent: DecisionTransformer, run: RunFolder) -> None:
        """Report the last checkpoint, and the best one beside it if evaluations chose one."""
        agents = {"last": agent}
        reports = {"last": self._report(agent, agent.logger)}
        if run.best.is_file():
            agents["best"] = DecisionTransformer.load(run.best, device=agent.device)
            with SummaryWriter(str(run.path / FOLDERS["best"])) as writer:
                reports["best"] = self._report(agents["best"], writer)
        for table in tables(reports, {name: each.num_timesteps for name, each in agents.items()}):
            show(table)

    def _report(self, agent: DecisionTransformer, logger: Logger | SummaryWriter) -> TargetSweep:
        with self._fresh_env(agent) as env:
            return evaluate(
                agent,
                env,
                self.episodes,
                target_returns=self._targets(agent),
                progress_bar=self.progress_bar,
                logger=logger,
            )

    @contextmanager
    def _fresh_env(self, agent: DecisionTransformer) -> Iterator[VecEnv]:
        """Environments to evaluate in."""
        number = min(ENVIRONMENTS, self.episodes)
        made = agent.make_env(number) if self.env is None else make_vec_env(self.env, number)
        with closing(made) as env:
            agent.check_env(env)
            yield env
