"""``rlxf train gtrxl``: train, evaluate, and keep all of it in a folder."""

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
from rlxf.agents.gtrxl.policy import policy_for
from rlxf.attention import TransformerSpec
from rlxf.cli.checkpoints import FOLDERS, tables
from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.keeping import naming
from rlxf.cli.learner import Learner
from rlxf.cli.looks import Looks
from rlxf.cli.normalization import normalised, normalised_alike
from rlxf.cli.periodic_evaluation import EVALUATION, describe_best, interval
from rlxf.cli.pretrained import begin_with
from rlxf.cli.processes import Processes
from rlxf.cli.progress import ONLINE, progress
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
from rlxf.cli.task import Task, check_described
from rlxf.cli.together import join_others, log_of, new_run, started_anew
from rlxf.evaluation import EvaluationCallback, Report, evaluate
from rlxf.evaluation.isolation import generators_kept
from rlxf.training import RunFolder, save_normalizer
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.joining import here
from rlxf.training.log_files import replaced_events
from rlxf.training.stopping import Stop

OWN = (
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
"""Options of its own that ``config.json`` keeps, by which a run can go on."""


@dataclass(frozen=True, kw_only=True)
class TrainGTrXL:
    """Train a Gated Transformer-XL with PPO, evaluate it, and keep all of it in a new folder.

    The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events; look at them with
    "tensorboard --logdir runs". It also holds best.zip, the agent of the best evaluation during training,
    which is reported next to the last one. Ctrl-C, SIGTERM and SIGUSR1 end the training and keep its
    progress, and "rlxf resume" continues it, also after a crash. Several processes share the environments
    if torchrun starts them: torchrun --nproc-per-node 4 -m rlxf train gtrxl ...

    Every part of the transformer is chosen by name, e.g. --core.position alibi; upper and lower case are
    the same. --help then shows the options of what was chosen, "rlxf techniques" what there is to choose.

    Example: rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{"corridor_length":9}' --total-timesteps 20000
    """

    task: Annotated[Task, arg(name="")]
    total_timesteps: Count = 200_000
    """Environment steps to train for, over all environments, e.g. 1e6; rounded up to whole rollouts of
    n_envs * n_steps steps. The default is enough for a T-Maze of 50."""
    seed: int = 0
    """Of weights, actions, minibatches and environments: the same seed gives the same run on one machine."""
    pretrained: Path | None = None
    """Folder of a run whose weights it begins with, e.g. of "rlxf pretrain"; None for fresh ones."""
    run: Path | None = None
    """The new folder; None is runs/gtrxl-ENV-SEED. An existing one is refused."""
    episodes: Count = 100
    """Episodes of the evaluation at the end: 100 resolve a success rate to about 0.1."""
    evaluate_every: Count | None = None
    """Steps from one evaluation during training to the next; None for a tenth of the training, 0 for none."""
    evaluation_episodes: Count = 20
    """Episodes of an evaluation during training: few, as each is played while the training waits."""
    policy: Literal["MlpGTrXLPolicy", "CnnGTrXLPolicy", "MultiInputGTrXLPolicy"] | None = None
    """What reads observations; None chooses by the observation space."""
    normalize_observations: bool = False
    """Scale each number of the observation by its mean and deviation so far. The run keeps both."""
    normalize_rewards: bool = False
    """Divide rewards by the deviation of the discounted returns so far. Evaluations report raw rewards."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds from one checkpoint to the next; "rlxf resume" goes on from them, and the last three stay."""
    progress_bar: bool = True
    """Show progress: steps, returns and losses every few seconds, and bars."""
    quiet: bool = False
    """Print warnings, errors and the final result only: neither the settings nor progress."""
    processes: Annotated[Processes, arg(name="")] = Processes()
    looks: Annotated[Looks, arg(name="")] = Looks()
    learner: Annotated[Learner, arg(name="")] = Learner()
    core: TransformerSpec = gtrxl()
    """The transformer. With the defaults it is a Gated Transformer-XL."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        join_others()
        run = started_anew(self._path)
        if run is not None:
            again = self.of_run(run, self.progress_bar, self.quiet, trust=True)  # this job wrote it
            return again.prepare_again(run)
        self._check()
        env, agent = self._made()
        begin_with(agent, self.pretrained)
        run = new_run(self._path, self._config(agent))
        with naming(run):
            agent.set_logger(log_of(run.make_logger))
        return partial(self._train, agent, env, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """The options that a run was started with.

        Args:
            run: the folder.
            progress_bar: show progress bars.
            trust: use the environment of its ``config.json`` in full, including code.

        Raises:
            ValueError: if its ``config.json`` lacks one, or its environment needs trust.
        """
        if not trust:
            check_described(run.config)
        with config_read(run):
            parts = {
                "task": options_of(Task, run.config),
                "processes": options_of(Processes, run.config),
                "looks": options_of(Looks, run.config),
                "learner": options_of(Learner, run.config),
                "core": TransformerSpec.from_dict(run.config["core"]),
            }
            own = {name: run.config[name] for name in OWN}
        own["pretrained"] = None if own["pretrained"] is None else Path(own["pretrained"])
        return cls(**own | parts, run=run.path, progress_bar=progress_bar, quiet=quiet)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """As `prepare`, to go on with a run that was cut off.

        Raises:
            FileNotFoundError: if none of its checkpoints is whole.
        """
        join_others()
        if is_complete(run, self.total_timesteps):
            return partial(show, describe_completion(run, "steps", f"; see: rlxf evaluate {run.path}"))
        start = Start.of(run)
        env, agent = self._made()
        if start.file is None:
            begin_with(agent, self.pretrained)
        agent.set_logger(log_of(partial(run.continue_logger, start.log, start.steps)))
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

    def _made(self) -> tuple[VecEnv, GTrXLPPO]:
        """Environments, and an agent in them."""
        number = here().part("n_envs", self.learner.n_envs)
        env = self._envs(number, self.seed + here().rows(number).start)
        asked = self.normalize_observations, self.normalize_rewards
        return env, self._agent(normalised(env, *asked, self.learner.gamma))

    def _envs(self, number: int, seed: int | None) -> VecEnv:
        return self.task.make(number, seed, self.processes.asked(number))

    def _agent(self, env: VecEnv) -> GTrXLPPO:
        policy = self.policy or policy_for(env.observation_space)
        return GTrXLPPO(policy, env, core=self.core, seed=self.seed, **self.learner.arguments())

    def _config(self, agent: GTrXLPPO) -> dict[str, Any]:
        """What the run is started with, defaults included."""
        own = {name: getattr(self, name) for name in OWN} | {
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
        with naming(run), closing(env), closing(agent.logger):
            if not self.quiet:
                show(as_table(str(run.path), run.config))
            train_to_completion(agent, run, start, self.total_timesteps, learn, finish)

    def _interval(self, agent: GTrXLPPO) -> int:
        """Steps from one evaluation to the next; 0 for none."""
        return interval(self.evaluate_every, self.total_timesteps, agent.all_envs * agent.n_steps)

    @property
    def _speaks(self) -> bool:
        """True if this process shows progress."""
        return self.progress_bar and not self.quiet and here().writes

    def _learn(self, agent: GTrXLPPO, run: RunFolder, start: Start, stop: Stop) -> None:
        learn, rollout = partial(agent.learn, self.total_timesteps), agent.all_envs * agent.n_steps
        total = -(-self.total_timesteps // rollout) * rollout
        with (
            self._evaluations(agent, run) as evaluations,
            self._looks(agent) as looks,
            progress(self._speaks, "steps", total, ONLINE, evaluations.values()) as shown,
        ):
            callbacks, seconds = [*evaluations.values(), *looks, *shown], self.checkpoint_seconds
            learn_resumably(agent, run, learn, callbacks, evaluations, seconds, start, stop)

    def _looks(self, agent: GTrXLPPO) -> AbstractContextManager[list[BaseCallback]]:
        """What shows the inside of the agent; it films when evaluations are made."""
        if not here().writes:
            return nullcontext([])
        return self.looks.callbacks(self.task, self._interval(agent) or self.total_timesteps)

    @contextmanager
    def _evaluations(self, agent: GTrXLPPO, run: RunFolder) -> Iterator[dict[str, EvaluationCallback]]:
        """Provide the evaluation callbacks of the training by name; none if evaluation is turned off."""
        every = self._interval(agent)
        if not every or not here().writes:
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
        """Report the last checkpoint, and the best one next to it if evaluations chose one."""
        if not here().writes:
            return
        with self._fresh_env(agent, self.episodes) as env:
            reports, steps = {"last": self._report(agent, env, agent.logger)}, {"last": agent.num_timesteps}
        if run.best.is_file():
            reports["best"], steps["best"] = self._report_best(run)
        for table in tables(reports, steps):
            show(table)
        if summary := describe_best(run, "step"):
            show(summary)

    def _report(self, agent: GTrXLPPO, env: VecEnv, logger: Logger | SummaryWriter) -> Report:
        return evaluate(agent, env, self.episodes, progress_bar=self._speaks, logger=logger)

    def _report_best(self, run: RunFolder) -> tuple[Report, int]:
        """Evaluate the best checkpoint in the episodes of the last one; return the report and its steps."""
        from rlxf.cli.players import load_agent  # imports dataset readers, which training does not need

        with (
            closing(self._envs(min(self.learner.n_envs, self.episodes), None)) as env,
            replaced_events(run.path / FOLDERS["best"]) as writer,
        ):
            best = load_agent(run, env, run.best, self.learner.device)
            assert isinstance(best, GTrXLPPO)
            return self._report(best, env, writer), best.num_timesteps

    @contextmanager
    def _fresh_env(self, agent: GTrXLPPO, episodes: int) -> Iterator[VecEnv]:
        """Environments to evaluate in, which show what the agent saw in training."""
        with generators_kept():  # without a seed, SB3 draws from numpy's
            env = self._envs(min(self.learner.n_envs, episodes), None)
        with closing(env):
            yield normalised_alike(env, agent.get_vec_normalize_env())


def _keep_statistics(agent: GTrXLPPO, run: RunFolder) -> None:
    """Save the normalisation statistics of the best agent, if there are any."""
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.best_normalizer, normalizer)
