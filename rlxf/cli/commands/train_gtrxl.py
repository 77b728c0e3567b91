"""``rlxf train gtrxl``: train a Gated Transformer-XL with PPO, evaluate it, and save it as a run."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tyro.conf import arg

from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.agents.gtrxl.policy import POLICIES, default_policy_name
from rlxf.attention import TransformerSpec
from rlxf.cli.options.common import CheckpointSeconds, Count, Pretrained, Quiet, check_counts, options
from rlxf.cli.options.env_options import EnvOptions
from rlxf.cli.options.online_options import PPOOptions, TensorBoardOptions, WorkerOptions
from rlxf.cli.progress import ONLINE
from rlxf.cli.run_loading import GTRXL
from rlxf.cli.training_command import EvaluatedTrainingCommand
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.distributed import process_group


@options
class TrainGTrXL(EvaluatedTrainingCommand):
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
    seed: Count = 0
    """Seed of weights, actions, minibatches and environments. Equal seeds give equal runs on one machine."""
    pretrained: Pretrained = None
    run: Path | None = None
    """New folder of the run. None means runs/gtrxl-ENV-SEED. It must not exist."""
    episodes: Count = 100
    """Number of episodes of the final evaluation.
    With 100, the 95% confidence interval of a success rate is at most +-0.1."""
    evaluate_every: Count | None = None
    """Number of environment steps between two evaluations during training.
    None means a tenth of the training, or longer if evaluations would take more than about a tenth of the
    training time; there is at least one evaluation, at the end. 0 means no evaluation during training."""
    evaluation_episodes: Count = 20
    """Number of episodes of an evaluation during training. The training waits for it."""
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
    processes: Annotated[WorkerOptions, arg(name="")] = WorkerOptions()
    tensorboard: Annotated[TensorBoardOptions, arg(name="")] = TensorBoardOptions()
    learner: Annotated[PPOOptions, arg(name="")] = PPOOptions()
    core: TransformerSpec = gtrxl()
    """Transformer of the agent. The default is a Gated Transformer-XL (Parisotto et al. 2020)."""

    agent_name = GTRXL
    unit = "steps"
    metrics = ONLINE
    evaluation_budget = 0.2
    """Default largest number of environment steps of evaluations for each step of the training.

    A training step with 32 environments takes about three times as long as one of an evaluation, because
    it includes the update. Evaluations therefore take at most about a tenth of the training time.
    """
    video_budget = 0.004
    """Default largest number of recorded steps for each training step.

    Rendering and compression make a recorded step about 12 times as long as a training step: 5% of the time.
    """
    core_notes = MappingProxyType({"dropout": "It must be 0 for PPO."})

    @property
    def total(self) -> int:
        """Number of environment steps of the training."""
        return self.total_timesteps

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"gtrxl-{self.task.env}"

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_counts(self, "total_timesteps", "episodes")
        self.tensorboard.check()
        super().check()

    def build(self) -> GTrXLPPO:
        """Make the environments of this process, and return an agent in them."""
        number = process_group().split_total("n_envs", self.learner.n_envs)
        env = self._envs(number, self.seed + process_group().row_slice(number).start)
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

    def tensorboard_callbacks(self, agent: GTrXLPPO) -> AbstractContextManager[list[BaseCallback]]:
        """Context manager for the callbacks of `TensorBoardOptions`.

        Videos are recorded as often as evaluations are made.
        """
        if not process_group().is_main:
            return nullcontext([])
        every = self.evaluation_interval(agent) or self.total_timesteps
        return self.tensorboard.callbacks(
            self.task, every, self.video_budget if self.evaluate_every is None else None
        )

    def make_env(self, agent: GTrXLPPO, episodes: int) -> VecEnv:
        """Make environments for an evaluation."""
        return self._envs(min(self.learner.n_envs, episodes), None)

    def _envs(self, number: int, seed: int | None) -> VecEnv:
        return self.task.make(number, seed, self.processes.to_workers(number))


def normalize_env(env: VecEnv, observations: bool, rewards: bool, gamma: float) -> VecEnv:
    """Wrap ``env`` in SB3's ``VecNormalize``; return it unchanged if nothing is normalized.

    Args:
        env: the training environments.
        observations: normalize observations by their running mean and standard deviation.
        rewards: divide rewards by the running standard deviation of discounted returns; clip them to +-10.
        gamma: discount factor of these returns, equal to that of the agent.

    Raises:
        ValueError: if ``observations`` is True, and observations contain an image or no `Box`.
    """
    if not observations and not rewards:
        return env
    keys = _numbers(env.observation_space) if observations else None
    return VecNormalize(env, norm_obs=observations, norm_reward=rewards, norm_obs_keys=keys, gamma=gamma)


def _numbers(space: spaces.Space) -> list[str] | None:
    """Return the keys of the `Box` entries of a Dict observation space; None for other spaces."""
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    numbers = [key for key, part in named.items() if isinstance(part, spaces.Box)]
    if not numbers or any(is_image_space(part) for part in named.values()):
        raise ValueError(f"normalize_observations needs Box observations that are not images, got {space}")
    return numbers if isinstance(space, spaces.Dict) else None
