"""``rlxf train gtrxl``: train a Gated Transformer-XL with PPO, evaluate it, and save it as a run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from tyro.conf import arg

from rlxf.agents.common.checkpoint import CACHE_COPIES, state_memory
from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.agents.gtrxl.config import SCHEDULES
from rlxf.agents.gtrxl.policies import POLICIES, default_policy_name
from rlxf.attention import TransformerSpec
from rlxf.cli.env_options import EnvOptions, check_curriculum_trust, check_worker_trust
from rlxf.cli.evaluated_training import EvaluatedTrainingCommand
from rlxf.cli.normalization import normalize_env
from rlxf.cli.options import (
    CheckpointSeconds,
    ConfigFile,
    ConfigTrust,
    Device,
    PrecisionOption,
    Pretrained,
    Quiet,
    StopReturn,
    Track,
    TunedName,
    argument_defaults,
    check_counts,
    options,
)
from rlxf.cli.progress import ONLINE_METRICS
from rlxf.cli.run_options import FLOAT32_BYTES
from rlxf.cli.runs import GTRXL
from rlxf.envs.curriculum import CurriculumCallback
from rlxf.envs.worker_pool import Workers
from rlxf.training import RunFolder, parse_schedule
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.distributed import process_group

ENV_BYTES = 16 * 2**10
"""Estimated memory of a small environment with its wrappers, in bytes."""
DEFAULTS = argument_defaults(GTrXLPPO)
"""Argument of `GTrXLPPO` -> default."""


@options
class WorkerOptions:
    """Options of worker processes, for environments that are slow or may crash or hang."""

    workers: int = 0
    """Number of worker processes for the environments.
    With 0, the environments run in this process, which is faster for simple ones.
    Environments that raise, crash or hang in a worker are restarted in new episodes; the others continue.
    With one worker per environment, a crash does not affect other environments."""
    env_timeout: float = 60.0
    """Time limit in seconds for a step of the environments of a worker; all others wait for it.
    A worker that exceeds the limit is killed, with all programs that its environments have started."""
    env_restarts: int = 5
    """Maximum number of consecutive restarts of an environment; the next failure ends the run.
    A completed episode, or 1000 steps, resets the count."""

    def to_workers(self, n_envs: int) -> Workers | None:
        """Return the worker settings for ``n_envs`` environments; None if ``workers`` is 0.

        Raises:
            ValueError: if a number is out of range.
        """
        workers = min(self.workers, n_envs)
        return Workers(workers, self.env_timeout, max_restarts=self.env_restarts) if workers else None

    def check(self) -> None:
        """Raise ValueError if a limit is given without workers."""
        limits = ("env_timeout", "env_restarts")
        given = [name for name in limits if getattr(self, name) != getattr(WorkerOptions, name)]
        if given and self.workers == 0:
            names = " and ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{names} needs worker processes, and --workers is 0: add --workers 1 or more")


@options
class PPOOptions:
    """Options of PPO."""

    n_envs: int = DEFAULTS["n_envs"]
    """Number of parallel environments.
    More environments give less noisy gradients and more steps per second, and use more memory."""
    n_steps: int | None = DEFAULTS["n_steps"]
    """Steps of each environment per rollout, a multiple of the segment length.
    None means the smallest number for rollouts of at least 2048 steps: 64 with 32 environments."""
    segment_length: int = DEFAULTS["segment_length"]
    """Length of training segments in steps. Gradients do not flow beyond the start of a segment."""
    batch_size: int | None = DEFAULTS["batch_size"]
    """Minibatch size in steps, a multiple of the segment length.
    None means 256, rounded up to a multiple of the segment length."""
    n_epochs: int = DEFAULTS["n_epochs"]
    """Number of epochs per rollout."""
    learning_rate: str = "linear:0.001:0"
    """Learning rate of Adam over the training: NUMBER, linear:START:END[:FRACTION] or cosine:START:END.
    The default decays to 0, so that the policy stops changing at the end."""
    gamma: float = DEFAULTS["gamma"]
    """Discount factor. The horizon is about 1 / (1 - gamma) steps: use 0.995 or more if rewards are
    several hundred steps ahead."""
    gae_lambda: float = DEFAULTS["gae_lambda"]
    """Lambda of generalized advantage estimation. Values near 1 have less bias and more variance."""
    critic_lambda: float | None = DEFAULTS["critic_lambda"]
    """Lambda of the return targets of the value function. None means gae_lambda.
    A value of 1 suits episodes of hundreds of steps."""
    clip_range: str = "0.2"
    """Clip range of the probability ratio, a schedule like the learning rate."""
    clip_range_vf: str | None = None
    """Clip range of the value function, in standard deviations of recent returns.
    It is a schedule like the learning rate. None means no clipping."""
    normalize_advantage: bool = DEFAULTS["normalize_advantage"]
    """Subtract the mean of a rollout's advantages and divide by their standard deviation."""
    ent_coef: str = "linear:0.03:0"
    """Coefficient of the entropy bonus, a schedule like the learning rate."""
    vf_coef: float = DEFAULTS["vf_coef"]
    """Coefficient of the value loss, which is divided by the variance of recent returns."""
    max_grad_norm: float = DEFAULTS["max_grad_norm"]
    """Maximum norm of the gradient; larger gradients are clipped."""
    target_kl: float | None = DEFAULTS["target_kl"]
    """Stop an update early when the approximate KL divergence exceeds 1.5 times this value.
    None means no limit."""
    advantage_epsilon: float = DEFAULTS["advantage_epsilon"]
    """Constant added to the standard deviation of advantages, in standard deviations of recent returns.
    It keeps noise small after convergence."""
    use_sde: bool = DEFAULTS["use_sde"]
    """Explore with state-dependent noise (gSDE) that is kept for several steps, for Box actions.
    It reaches distant states where independent noise averages out, e.g. in MountainCarContinuous."""
    sde_sample_freq: int = DEFAULTS["sde_sample_freq"]
    """Steps after which the noise of --use-sde is drawn again; -1 means once in each rollout."""
    previous_action: bool = DEFAULTS["previous_action"]
    """Add the previous action to the input of each step. Observations alone do not reveal it."""
    persist_memory_across_episodes: bool = DEFAULTS["persist_memory_across_episodes"]
    """Keep the memory across episodes (RL^2), for tasks that stay the same over several episodes.
    Add --previous-transition to show the agent the last step of the previous episode."""
    recompute_memory: bool = DEFAULTS["recompute_memory"]
    """Recompute the memory with the current weights after each update.
    This costs one extra pass over (layers * memory length) steps per environment."""
    reconstruction_coef: float = DEFAULTS["reconstruction_coef"]
    """Coefficient of the observation reconstruction loss. 0 turns it off. It trains the memory before the
    first reward, but does not help to find rewards."""
    gradient_accumulation_steps: int = DEFAULTS["gradient_accumulation_steps"]
    """Number of micro-batches into which each minibatch is divided to save memory, at most its number of
    segments. The update stays the same, apart from rounding."""
    precision: PrecisionOption = DEFAULTS["precision"]
    compile: bool = DEFAULTS["compile"]
    """Compile the acting step and the losses of updates on a CPU, which needs a C++ compiler and about a
    minute at the start of the training. Results are equal up to rounding."""
    cuda_graphs: bool = DEFAULTS["cuda_graphs"]
    """Capture the acting step and the losses of updates as CUDA graphs on a GPU."""
    device: Device = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent."""
        values = asdict(self)
        given = [name for name in SCHEDULES if values[name] is not None]
        return values | {name: parse_schedule(values[name]) for name in given}

    def memory_usage(self, core: TransformerSpec) -> dict[str, int]:
        """Return a lower bound of the memory in bytes of the environments, a rollout and the agent's memory.

        Keys describe each part. `check_core_memory` uses it before a run is resumed.
        """
        steps = (self.n_steps or self.segment_length) * core.layers * core.width * FLOAT32_BYTES
        sizes = f"n_envs={self.n_envs}, n_steps={self.n_steps}, segment_length={self.segment_length}"
        states = self.n_envs * (state_memory(core) // CACHE_COPIES)
        return {
            f"environments and rollout steps with {sizes}": self.n_envs * (ENV_BYTES + steps),
            f"the memory of the core with n_envs={self.n_envs}": states,
        }


@options
class TensorBoardOptions:
    """Options of additional TensorBoard output.

    Without videos, the defaults take about 2% of the training time.
    """

    attention_maps_every: int | None = 20
    """Number of rollouts between images of the attention of each layer and head. None turns them off."""
    memory_every: int | None = 10
    """Number of rollouts between measurements of the attention to memory. None turns them off."""
    histograms_every: int | None = 20
    """Number of rollouts between histograms, e.g. of weights and gradients. None turns them off."""
    videos: bool = True
    """Record a video of an episode as often as evaluations are made, if the environment renders images.
    Without evaluations during training, one video is recorded, after --total-timesteps steps.
    By default videos are left out if they would take more than about 5% of the training time."""

    def check(self) -> None:
        """Raise ValueError unless each number is None or at least 1."""
        check_counts(self, "attention_maps_every", "memory_every", "histograms_every")

    @contextmanager
    def callbacks(
        self, task: EnvOptions, every_steps: int, video_budget: float | None = None
    ) -> Iterator[list[BaseCallback]]:
        """Yield the callbacks for these options; a video is recorded every ``every_steps`` steps.

        Args:
            task: the environment.
            every_steps: number of steps between two videos.
            video_budget: largest number of recorded steps for each training step; None for no limit.
        """
        from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
        from rlxf.cli.videos import make_rendering_env, make_video_callbacks

        kinds: list[Callable[[int], BaseCallback]] = [AttentionMapCallback, MemoryCallback, HistogramCallback]
        intervals = [self.attention_maps_every, self.memory_every, self.histograms_every]
        pairs = zip(kinds, intervals, strict=True)
        callbacks = [callback(every) for callback, every in pairs if every is not None]
        with ExitStack() as stack:
            if self.videos:
                make = partial(make_rendering_env, task)
                callbacks += make_video_callbacks(task.env, make, stack, every_steps, budget=video_budget)
            yield callbacks


@options
class TrainGTrXL(EvaluatedTrainingCommand):
    """Train a Gated Transformer-XL with PPO, evaluate it, and save it in a new folder.

    The folder contains config.json, checkpoint.zip, progress.csv and TensorBoard events; show them with the
    command "tensorboard --logdir runs". The checkpoint of the best evaluation during training is best.zip; it
    is reported together with the last checkpoint. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its
    progress, and "rlxf resume" continues it, even after a crash. The environments are divided among the
    processes of torchrun: torchrun --nproc-per-node 4 -m rlxf train gtrxl ...

    Each technique of the transformer is chosen by its name, e.g. --core.position alibi; case, dashes and
    underscores in names are ignored. With these options, --help shows the options of the chosen techniques.
    "rlxf techniques" lists all techniques.

    Example: rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{"corridor_length":9}' --total-timesteps 20000
    """

    task: Annotated[EnvOptions, arg(name="")]
    total_timesteps: int = 200_000
    """Number of environment steps, over all environments, e.g. 1e6.
    It is rounded up to whole rollouts of n_envs * n_steps steps.
    The default is sufficient for a T-Maze with a corridor of 50."""
    seed: int = 0
    """Seed of weights, actions, minibatches and environments. Equal seeds give equal runs on one machine."""
    pretrained: Pretrained = None
    run: Path | None = None
    """New folder of the run. None means runs/gtrxl-ENV-SEED. It must not exist."""
    config: ConfigFile = None
    tuned: TunedName = None
    trust: ConfigTrust = False
    episodes: int = 100
    """Number of episodes of the final evaluation.
    With 100, the 95% confidence interval of a success rate is at most +-0.1."""
    evaluate_every: int | None = None
    """Number of environment steps between two evaluations during training.
    None means a tenth of the training, or longer if evaluations would take more than about a tenth of the
    training time; the last evaluation is always made, at the end, if there are two rollouts or more.
    0 means no evaluation during training."""
    evaluation_episodes: int = 20
    """Number of episodes of an evaluation during training. The training waits for it."""
    stop_return: StopReturn = None
    policy: Annotated[str | None, arg(metavar=f"{{None,{','.join(POLICIES)}}}")] = None
    """Policy class, which determines the feature extractor. None selects it by the observation space.
    The names of Stable-Baselines3, e.g. MlpPolicy, are accepted, too."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation, which the run saves."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of discounted returns.
    Evaluations report the rewards of the environment."""
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds, and progress bars."""
    quiet: Quiet = False
    track: Track = None
    processes: Annotated[WorkerOptions, arg(name="")] = WorkerOptions()
    tensorboard: Annotated[TensorBoardOptions, arg(name="")] = TensorBoardOptions()
    learner: Annotated[PPOOptions, arg(name="")] = PPOOptions()
    core: TransformerSpec = gtrxl()
    """Transformer of the agent. The default is a Gated Transformer-XL (Parisotto et al. 2020)."""

    agent_name = GTRXL
    unit, total_name = "steps", "total_timesteps"
    metrics = ONLINE_METRICS
    evaluation_budget = 0.2
    """Default largest number of environment steps of evaluations for each step of the training.

    A training step with 32 environments takes about three times as long as one of an evaluation, because
    it includes the update. Evaluations therefore take at most about a tenth of the training time.
    """
    video_budget = 0.004
    """Default largest number of recorded steps for each training step.

    Rendering and compression make a recorded step about 12 times as long as a training step: 5% of the time.
    """

    @classmethod
    def check_trust(cls, run: RunFolder) -> None:
        """Raise ValueError if the environment, the curriculum or the workers of a run need trust."""
        super().check_trust(run)
        check_curriculum_trust(run.config)
        check_worker_trust(run.config)

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"gtrxl-{self.task.env}"

    def check(self) -> None:
        """Raise ValueError or TypeError if an option is invalid."""
        check_counts(self, "total_timesteps", "episodes")
        check_counts(self.learner, "n_envs", "n_steps", "segment_length", "batch_size", "n_epochs")
        self.task.check()
        self.tensorboard.check()
        self.processes.check()
        super().check()

    def build(self) -> GTrXLPPO:
        """Make the environments of this process, and return an agent that acts in them."""
        n_envs = process_group().split_total("n_envs", self.learner.n_envs)
        seed = self.seed + process_group().row_slice(n_envs).start
        env = self.task.make_for_training(n_envs, seed, self.processes.to_workers(n_envs))
        env = normalize_env(env, self.normalize_observations, self.normalize_rewards, self.learner.gamma)
        policy = self.policy or default_policy_name(env.observation_space)
        return GTrXLPPO(policy, env, core=self.core, seed=self.seed, **self.learner.arguments())

    def resolved_options(self, agent: GTrXLPPO) -> dict[str, Any]:
        """Return the options whose default depends on the environment or the rollout, with their values."""
        return {
            "policy": type(agent.policy).__name__,
            "n_steps": agent.n_steps,
            "batch_size": agent.batch_size,
        }

    def steps_per_rollout(self, agent: GTrXLPPO) -> int:
        """Return the number of steps between two updates of the weights."""
        return agent.n_envs_total * agent.n_steps

    @contextmanager
    def callbacks(self, agent: GTrXLPPO, run: RunFolder) -> Iterator[list[BaseCallback]]:
        """Context manager for the callback that evaluates, and for those of `TensorBoardOptions`.

        Videos are recorded as often as evaluations are made; without evaluations, every --total-timesteps
        steps.
        """
        every = self.evaluation_interval(agent) or self.total_timesteps
        budget = self.video_budget if self.evaluate_every is None else None
        with (
            super().callbacks(agent, run) as evaluations,
            self.tensorboard.callbacks(self.task, every, budget) as others,
        ):
            yield [*evaluations, *others, *([CurriculumCallback()] if self.task.curriculum else [])]

    def make_env(self, agent: GTrXLPPO, episodes: int) -> VecEnv:
        """Make environments for an evaluation."""
        n_envs = min(self.learner.n_envs, episodes)
        return self.task.make(n_envs, None, self.processes.to_workers(n_envs))
