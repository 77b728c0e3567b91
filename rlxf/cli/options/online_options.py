"""Options of online training: PPO, environments in worker processes, and TensorBoard callbacks."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.common.checkpoint import CACHE_COPIES, state_memory
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.attention import TransformerSpec
from rlxf.cli.options.common import Count, Device, check_counts, options
from rlxf.cli.options.env_options import EnvOptions
from rlxf.cli.output import print_out
from rlxf.cli.run_config import FLOAT32_BYTES
from rlxf.envs.workers import Workers
from rlxf.training import parse_schedule

ENV_BYTES = 16 * 2**10
"""Estimated memory of a small environment with its wrappers, in bytes."""
DEFAULTS = {name: each.default for name, each in inspect.signature(GTrXLPPO).parameters.items()}
"""Argument of `GTrXLPPO` -> default."""


@options
class WorkerOptions:
    """Options of worker processes, for environments that are slow or may crash or hang."""

    workers: Count = 0
    """Number of worker processes for the environments. 0 uses this process: faster for simple environments.
    Environments that raise, crash or hang in a worker are restarted in new episodes; the others continue.
    With one worker per environment, a crash does not affect other environments."""
    env_timeout: float = 60.0
    """Time limit in seconds for a step of the environments of a worker; all others wait for it.
    A worker that exceeds the limit is killed, with all programs that its environments have started."""
    env_restarts: Count = 5
    """Maximum number of consecutive restarts of an environment; the next failure ends the run.
    A completed episode, or 1000 steps, resets the count."""

    def to_workers(self, n_envs: int) -> Workers | None:
        """Return the worker settings for ``n_envs`` environments; None if ``workers`` is 0.

        Raises:
            ValueError: if a number is out of range.
        """
        if not self.workers:
            return None
        return Workers(min(self.workers, n_envs), self.env_timeout, restarts=self.env_restarts)


@options
class PPOOptions:
    """Options of PPO."""

    n_envs: Count = DEFAULTS["n_envs"]
    """Number of parallel environments.
    More environments give less noisy gradients and more steps per second, and use more memory."""
    n_steps: Count | None = DEFAULTS["n_steps"]
    """Steps of each environment per rollout, a multiple of the segment length.
    None means the smallest number for rollouts of at least 2048 steps: 64 with 32 environments."""
    segment_length: Count = DEFAULTS["segment_length"]
    """Length of training segments in steps. Gradients do not flow beyond the start of a segment."""
    batch_size: Count | None = DEFAULTS["batch_size"]
    """Minibatch size in steps, a multiple of the segment length.
    None means 256, rounded up to a multiple of the segment length."""
    n_epochs: Count = DEFAULTS["n_epochs"]
    """Number of epochs per rollout."""
    learning_rate: str = "linear:0.001:0"
    """Learning rate of Adam over the training: NUMBER, linear:START:END[:FRACTION] or cosine:START:END.
    The default decays to 0, so that the policy stops changing at the end."""
    gamma: float = DEFAULTS["gamma"]
    """Discount factor. The horizon is about 1 / (1 - gamma) steps; use 0.995 for long corridors."""
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
    previous_action: bool = DEFAULTS["previous_action"]
    """Add the previous action to the input of each step. Observations alone do not reveal it."""
    persist_memory_across_episodes: bool = DEFAULTS["persist_memory_across_episodes"]
    """Keep the memory across episodes (RL^2), for tasks that stay the same over several episodes.
    Add --previous-transition to show the agent the last step of the previous episode."""
    recompute_memory: bool = DEFAULTS["recompute_memory"]
    """Recompute the memory with the current weights after each update.
    This costs one extra pass over (layers * memory length) steps per environment."""
    reconstruction_coef: float = DEFAULTS["reconstruction_coef"]
    """Coefficient of the observation reconstruction loss. 0 turns it off. It helps with sparse rewards."""
    device: Device = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent."""
        schedules = ("learning_rate", "clip_range", "ent_coef")
        bound = None if self.clip_range_vf is None else parse_schedule(self.clip_range_vf)
        parsed = {name: parse_schedule(getattr(self, name)) for name in schedules}
        return asdict(self) | parsed | {"clip_range_vf": bound}

    def memory_usage(self, core: TransformerSpec) -> dict[str, int]:
        """Return the bytes of environments, their recurrent states, and the rollout, by description."""
        steps = (self.n_steps or self.segment_length) * core.layers * core.width * FLOAT32_BYTES
        sizes = f"n_envs {self.n_envs}, n_steps {self.n_steps}, segment_length {self.segment_length}"
        return {
            f"environments and steps of {sizes}": self.n_envs * (ENV_BYTES + steps),
            f"the core.memory of n_envs {self.n_envs}": self.n_envs * (state_memory(core) // CACHE_COPIES),
        }


@options
class TensorBoardOptions:
    """Options of additional TensorBoard output. With the defaults it takes about 2% of the training time."""

    attention_maps_every: Count | None = 100
    """Number of rollouts between images of the attention of each layer and head. None turns them off."""
    memory_every: Count | None = 10
    """Number of rollouts between measurements of the attention to memory. None turns them off."""
    histograms_every: Count | None = 20
    """Number of rollouts between histograms, e.g. of weights and gradients. None turns them off."""
    videos: bool = True
    """Record a video of an episode as often as evaluations are made, if the environment renders images.
    By default videos are left out where they would take more than about 5% of the training time."""

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

        chosen: list[tuple[Callable[[int], BaseCallback], int | None]] = [
            (AttentionMapCallback, self.attention_maps_every),
            (MemoryCallback, self.memory_every),
            (HistogramCallback, self.histograms_every),
        ]
        callbacks = [callback(every) for callback, every in chosen if every is not None]
        with ExitStack() as stack:
            yield callbacks + (
                make_video_callbacks(task, every_steps, video_budget, stack) if self.videos else []
            )


def make_video_callbacks(
    task: EnvOptions, every_steps: int, budget: float | None, stack: ExitStack
) -> list[BaseCallback]:
    """Return the callback that records videos of the task; ``stack`` closes its environment.

    If the environment cannot render images, print the reason and return no callback.
    """
    from rlxf.envs.make import make_env
    from rlxf.evaluation import VideoCallback

    kwargs = task.env_kwargs | {"render_mode": "rgb_array"}
    try:
        env = make_env(task.env, kwargs, **task.observation_options)
        stack.callback(env.close)
        return [VideoCallback(env, every_steps, budget=budget)]
    except Exception as error:  # training does not need videos: a driver or package may be missing
        print_out(" ".join(f"no videos: {task.env} cannot render images: {error}".split()))
        return []
