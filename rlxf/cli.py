"""The command ``rlxf``: a few dataclasses of options, each of which is a command."""

import json
import re
import sys
import traceback
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, Suppress, arg, subcommand

from rlxf import __version__
from rlxf.attention import GRUGate, Softmax, TransformerSpec, XLRelative
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.positions.base import Position
from rlxf.attention.residuals.base import Residual
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES

# What the commands do needs Stable-Baselines3 and more; it is imported there, so that help comes sooner.
if TYPE_CHECKING:
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.agents.gtrxl import GTrXLPPO
    from rlxf.training import RunFolder

QUESTIONS = {
    "position": "how does order enter?",
    "pattern": "which tokens may a query see?",
    "kernel": "how is the weighted average computed?",
    "memory": "what survives from before the segment?",
    "residual": "how does a sublayer's output join the stream?",
    "depth": "how many times is a token processed?",
}
GRU_GATE, XL_RELATIVE, SOFTMAX = GRUGate(bias=2.0), XLRelative(), Softmax()
Json = Annotated[dict[str, Any], arg(constructor=json.loads, metavar="JSON")]


def any_of(axis: str) -> Any:
    """The techniques of an axis as a tyro union: ``residual:Add``, ``position:none``."""
    choices = [
        Annotated[technique, subcommand(name, description=summary(technique))]
        for name, technique in TECHNIQUES[axis].items()
    ]
    return reduce(or_, choices + [None] * (axis in OPTIONAL))


def summary(technique: type) -> str:
    """First paragraph of a technique's docstring, on one line."""
    return " ".join((technique.__doc__ or "").split("\n\n")[0].split())


@dataclass(frozen=True, kw_only=True)
class Core:
    """The transformer. With the defaults it is a Gated Transformer-XL."""

    memory_length: int = 128
    """Steps remembered from before a segment. Each layer looks as far back, so 2 layers reach 256 steps."""
    width: int = 64
    """Features of a token. Enough for small observations; 128 to 384 for images and rich tasks."""
    layers: int = 2
    """Number of layers."""
    heads: int = 4
    """Attention heads; must divide the width."""
    feed_forward: int | None = None
    """Features inside the feed-forward sublayer; None is 4 times the width."""
    residual: Annotated[Residual, arg(constructor=any_of("residual"))] = GRU_GATE
    """How a sublayer's output joins the stream. GRU gates are the paper's most stable."""
    position: Annotated[Position | None, arg(constructor=any_of("position"))] = XL_RELATIVE
    """How order enters."""
    kernel: Annotated[Kernel, arg(constructor=any_of("kernel"))] = SOFTMAX
    """How the weighted average is computed."""

    def spec(self) -> TransformerSpec:
        """These options as the core of an agent."""
        from rlxf.agents.gtrxl.core import gtrxl

        sizes = {name: getattr(self, name) for name in ("width", "layers", "heads", "feed_forward")}
        spec = gtrxl(self.memory_length, residual=self.residual, **sizes)
        return replace(spec, position=self.position, kernel=self.kernel)


@dataclass(frozen=True, kw_only=True)
class Learner:
    """PPO. A schedule is a number, or linear:START:END, which falls with the training."""

    n_envs: int = 32
    """Environments side by side. More give steadier gradients and faster steps, and take more memory."""
    n_steps: int = 64
    """Steps of each environment between updates; a multiple of the segment length."""
    segment_length: int = 64
    """Steps through which gradients flow: how far back the agent learns what to remember in one piece."""
    batch_size: int = 512
    """Steps in a minibatch; a multiple of the segment length. 512 makes 4 minibatches of a rollout."""
    n_epochs: int = 3
    """Passes over a rollout."""
    learning_rate: str = "linear:0.001:0"
    """Schedule of Adam's learning rate. It falls to 0, so that a solved task stays solved."""
    gamma: float = 0.99
    """Discount. Rewards more than 1 / (1 - gamma) steps ahead hardly count: 0.995 for long corridors."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantages: nearer to 1 is less biased and noisier."""
    clip_range: str = "0.2"
    """Schedule of how far the policy may move in one update."""
    ent_coef: str = "linear:0.03:0"
    """Schedule of the weight of the entropy, which keeps the agent trying. It falls with the rate."""
    vf_coef: float = 0.5
    """Weight of the value loss, taken in units of the variance of all returns so far."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    target_kl: float | None = None
    """End an update once the policy has moved 1.5 times as far; None for no bound."""
    advantage_epsilon: float = 0.05
    """Share of all returns' deviation added to that of advantages: noise stays small once all is learned."""
    previous_action: bool = True
    """The action before is part of each step's input: observations alone do not tell what was done."""
    reconstruction_coef: float = 0.0
    """Weight of the observation reconstruction loss; 0 for none. It helps where rewards are rare."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """These options as arguments of the agent."""
        from rlxf.training import parse_schedule

        schedules = ("learning_rate", "clip_range", "ent_coef")
        return asdict(self) | {name: parse_schedule(getattr(self, name)) for name in schedules}


@dataclass(frozen=True, kw_only=True)
class TrainGTrXL:
    """Train a Gated Transformer-XL with PPO, evaluate it, and keep all of it in a new folder.

    The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events; look at them with
    "tensorboard --logdir runs". Ctrl-C ends the training and keeps what was learned.

    Example: rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{"corridor_length":9}' --total-timesteps 60000
    """

    env: str
    """Gymnasium id of the task, e.g. rlxf/TMaze-v0 or CartPole-v1; package:id imports the package first."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object, e.g. '{"corridor_length": 100}'."""
    total_timesteps: int = 200_000
    """Environment steps to train for, over all environments: enough for a T-Maze of 50."""
    seed: int = 0
    """Of weights, actions, minibatches and environments: the same seed gives the same run on one machine."""
    run: Path | None = None
    """The new folder; None is runs/gtrxl-ENV-SEED. An existing one is refused."""
    episodes: int = 100
    """Episodes of an evaluation: 100 resolve a success rate to about 0.1."""
    evaluate_every: int | None = None
    """Also evaluate each time so many steps are trained; None: at the end alone."""
    policy: Literal["MlpGTrXLPolicy", "CnnGTrXLPolicy", "MultiInputGTrXLPolicy"] | None = None
    """What reads observations; None chooses by the observation space."""
    progress_bar: bool = True
    """Show progress bars."""
    learner: Annotated[Learner, arg(name="")] = Learner()
    core: Annotated[Core, arg(name="")] = Core()

    def __call__(self) -> None:
        """Run the command."""
        self._check()
        env = make_env(self.env, self.env_kwargs, self.learner.n_envs, self.seed)
        agent = self._agent(env)
        run = self._folder(agent)
        agent.set_logger(run.make_logger())
        log_hyperparameters(agent.logger, run.config)
        show(settings(run))
        self._learn(agent, run)
        self._evaluate(agent)

    def _check(self) -> None:
        check_counts(self, "total_timesteps", "episodes", "evaluate_every")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")

    @property
    def _path(self) -> Path:
        task = re.sub(r"[^\w.-]+", "-", self.env)
        return Path("runs", f"gtrxl-{task}-{self.seed}") if self.run is None else self.run

    def _agent(self, env: "VecEnv") -> "GTrXLPPO":
        from rlxf.agents.gtrxl import GTrXLPPO
        from rlxf.agents.gtrxl.policy import policy_for

        policy = self.policy or policy_for(env.observation_space)
        return GTrXLPPO(policy, env, core=self.core.spec(), seed=self.seed, **self.learner.arguments())

    def _folder(self, agent: "GTrXLPPO") -> "RunFolder":
        from rlxf.training import RunFolder

        own = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("run", "learner", "core")
        }
        chosen = {"policy": type(agent.policy).__name__, "core": agent.core.to_dict()}
        return RunFolder.create(self._path, {"agent": "gtrxl", **own, **asdict(self.learner), **chosen})

    def _learn(self, agent: "GTrXLPPO", run: "RunFolder") -> None:
        from rlxf.evaluation import EvaluationCallback

        callback = None
        if self.evaluate_every is not None:
            callback = EvaluationCallback(self._fresh_env(), self.episodes, self.evaluate_every)
        try:
            agent.learn(self.total_timesteps, callback, progress_bar=self.progress_bar)
        finally:
            agent.save(run.checkpoint)
            show(f"checkpoint: {run.checkpoint}")

    def _evaluate(self, agent: "GTrXLPPO") -> None:
        from rlxf.evaluation import evaluate

        env = self._fresh_env()
        report = evaluate(agent, env, self.episodes, progress_bar=self.progress_bar, logger=agent.logger)
        env.close()
        agent.logger.close()
        show(report.table())

    def _fresh_env(self) -> "VecEnv":
        return make_env(self.env, self.env_kwargs, min(self.learner.n_envs, self.episodes), None)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play whole episodes with the agent of a run and report its returns.

    The numbers also go to TensorBoard, in the folder "evaluation" of the run.

    Example: rlxf evaluate runs/gtrxl-rlxf-TMaze-v0-0 --episodes 500
    """

    run: Positional[Path]
    """Folder of the run."""
    episodes: int = 200
    """Number of episodes: 200 resolve a success rate to about 0.07."""
    env: str | None = None
    """Gymnasium id of another task with the same spaces; None is the one trained on."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object; without --env they change those trained with."""
    deterministic: bool = True
    """Take the most likely action instead of a sample."""
    n_envs: int = 32
    """Environments side by side, at most one per episode."""
    seed: int = 1_000_000
    """Of the environments; far from the seeds one trains with, so that generated levels are new."""
    progress_bar: bool = True
    """Show a progress bar."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def __call__(self) -> None:
        """Run the command."""
        from torch.utils.tensorboard import SummaryWriter

        from rlxf.agents.gtrxl import GTrXLPPO
        from rlxf.evaluation import evaluate
        from rlxf.training import RunFolder

        run = RunFolder.open(self.run)
        env = self._env(run.config)
        agent = GTrXLPPO.load(run.checkpoint, env=env, device=self.device)
        with SummaryWriter(str(run.path / "evaluation")) as writer:
            report = evaluate(
                agent,
                env,
                self.episodes,
                deterministic=self.deterministic,
                seed=self.seed,
                progress_bar=self.progress_bar,
                logger=writer,
            )
        env.close()
        show(report.table())

    def _env(self, config: dict[str, Any]) -> "VecEnv":
        check_counts(self, "episodes", "n_envs")
        n_envs = min(self.n_envs, self.episodes)
        if self.env is not None:
            return make_env(self.env, self.env_kwargs, n_envs, None)
        return make_env(config["env"], config["env_kwargs"] | self.env_kwargs, n_envs, None)


@dataclass(frozen=True)
class Techniques:
    """List what a transformer can be made of, by the question it answers.

    Example: rlxf techniques
    """

    def __call__(self) -> None:
        """Run the command."""
        for axis, question in QUESTIONS.items():
            table = Table("technique", "what it does", title=f"{axis}: {question}", expand=True)
            for technique in TECHNIQUES[axis].values():
                table.add_row(repr(technique()), f"{summary(technique)}\n{technique.paper}")
            show(table)


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def make_env(env_id: str, env_kwargs: dict[str, Any], n_envs: int, seed: int | None) -> "VecEnv":
    """The environments of a command.

    Raises:
        ValueError: if the id is unknown or the environment does not take the arguments.
        TypeError: if a space is not supported.
    """
    from rlxf.envs.make import make_vec_env

    if not isinstance(env_kwargs, dict):
        raise ValueError(f"env_kwargs must be a JSON object, got {env_kwargs!r}")
    try:
        return make_vec_env(env_id, n_envs, seed, env_kwargs)
    except TypeError as error:
        if not env_kwargs or is_mistake(error):
            raise
        raise ValueError(f"{env_id} does not take env_kwargs {env_kwargs}: {error}") from error


def log_hyperparameters(logger: "Logger", config: dict[str, Any]) -> None:
    """Show the configuration in TensorBoard's HPARAMS tab, beside what the run achieves."""
    from stable_baselines3.common.logger import HParam

    values = {name: value if _is_plain(value) else json.dumps(value) for name, value in config.items()}
    metrics = ("rollout/ep_rew_mean", "eval/mean_reward", "eval/iqm", "eval/success_rate")
    hidden = ("stdout", "log", "json", "csv")
    logger.record("hparams", HParam(values, dict.fromkeys(metrics, 0.0)), exclude=hidden)


def settings(run: "RunFolder") -> Table:
    """The configuration of a run as a table."""
    table = Table(title=str(run.path), show_header=False)
    for name, value in run.config.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table


def show(content: str | Table) -> None:
    """Print to the screen."""
    Console(markup=False, highlight=False).print(content)


def is_mistake(error: BaseException) -> bool:
    """Whether a check of this package raised the error; what a slip in any code raised is a bug."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(Path(__file__).parent)
    return ours and (last.line or "").startswith("raise ")


def leave(message: str, status: int) -> None:
    """End the program with one red line."""
    line = " ".join(f"rlxf: {message}".split())
    Console(stderr=True).print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(status)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


# With Suppress a lone agent stays a word of its own instead of melting into "train".
Agents: Any = Annotated[TrainGTrXL, subcommand("gtrxl")] | Annotated[None, Suppress]
Commands: Any = (
    Annotated[Agents, subcommand("train", description="Train an agent. Example: rlxf train gtrxl --help")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Techniques, subcommand("techniques")]
)
DESCRIPTION = f"""rlxf {__version__}: transformer agents for reinforcement learning.

Example: rlxf train gtrxl --help"""


def parse(args: list[str] | None = None) -> TrainGTrXL | Evaluate | Techniques:
    """The command that the arguments ask for, ready to be called; None: those of the program."""
    config = (tyro.conf.CascadeSubcommandArgs,)
    return tyro.cli(Commands, prog="rlxf", description=DESCRIPTION, args=args, config=config)


def main(args: list[str] | None = None) -> None:
    """Run the command line: exit with 2 and one line on a user's mistake, with 130 on Ctrl-C."""
    command = parse(args)
    try:
        command()
    except KeyboardInterrupt:
        leave("interrupted", 130)
    except (ValueError, TypeError, OSError) as error:
        if not is_mistake(error):
            raise
        leave(str(error), 2)
