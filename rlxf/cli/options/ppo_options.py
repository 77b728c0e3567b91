"""Options of PPO and of environments in processes."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlxf.cli.argument_checks import Count
from rlxf.training import parse_schedule

if TYPE_CHECKING:
    from rlxf.envs.workers import Workers


@dataclass(frozen=True, kw_only=True)
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

    def to_workers(self, n_envs: int) -> "Workers | None":
        """Return the worker settings for ``n_envs`` environments; None if ``workers`` is 0.

        Raises:
            ValueError: if a number is out of range.
        """
        if not self.workers:
            return None
        from rlxf.envs.workers import Workers

        return Workers(min(self.workers, n_envs), self.env_timeout, restarts=self.env_restarts)


@dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """Options of PPO."""

    n_envs: Count = 32
    """Number of parallel environments.
    More environments give less noisy gradients and more steps per second, and use more memory."""
    n_steps: Count | None = None
    """Steps of each environment per rollout, a multiple of the segment length.
    None means the smallest number for rollouts of at least 2048 steps: 64 with 32 environments."""
    segment_length: Count = 64
    """Length of training segments in steps. Gradients do not flow beyond the start of a segment."""
    batch_size: Count | None = None
    """Minibatch size in steps, a multiple of the segment length.
    None means 256, rounded up to a multiple of the segment length."""
    n_epochs: Count = 6
    """Number of epochs per rollout."""
    learning_rate: str = "linear:0.001:0"
    """Learning rate of Adam over the training: NUMBER, linear:START:END[:FRACTION] or cosine:START:END.
    The default decays to 0, so that the policy stops changing at the end."""
    gamma: float = 0.99
    """Discount factor. The horizon is about 1 / (1 - gamma) steps; use 0.995 for long corridors."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation. Values near 1 have less bias and more variance."""
    critic_lambda: float | None = None
    """Lambda of the return targets of the value function. None means gae_lambda.
    A value of 1 suits episodes of hundreds of steps."""
    clip_range: str = "0.2"
    """Clip range of the probability ratio, a schedule like the learning rate."""
    clip_range_vf: str | None = None
    """Clip range of the value function, in standard deviations of recent returns.
    It is a schedule like the learning rate. None means no clipping."""
    normalize_advantage: bool = True
    """Subtract the mean of a rollout's advantages and divide by their standard deviation."""
    ent_coef: str = "linear:0.03:0"
    """Coefficient of the entropy bonus, a schedule like the learning rate."""
    vf_coef: float = 0.5
    """Coefficient of the value loss, which is divided by the variance of recent returns."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; larger gradients are clipped."""
    target_kl: float | None = None
    """Stop an update early when the approximate KL divergence exceeds 1.5 times this value.
    None means no limit."""
    advantage_epsilon: float = 0.05
    """Constant added to the standard deviation of advantages, in standard deviations of recent returns.
    It keeps noise small after convergence."""
    previous_action: bool = True
    """Add the previous action to the input of each step. Observations alone do not reveal it."""
    persist_memory_across_episodes: bool = False
    """Keep the memory across episodes (RL^2), for tasks that stay the same over several episodes.
    Add --previous-transition to show the agent the last step of the previous episode."""
    recompute_memory: bool = False
    """Recompute the memory with the current weights after each update.
    This costs one extra pass over (layers * memory length) steps per environment."""
    reconstruction_coef: float = 0.0
    """Coefficient of the observation reconstruction loss. 0 turns it off. It helps with sparse rewards."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. "auto" selects the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent."""
        schedules = ("learning_rate", "clip_range", "ent_coef")
        bound = None if self.clip_range_vf is None else parse_schedule(self.clip_range_vf)
        parsed = {name: parse_schedule(getattr(self, name)) for name in schedules}
        return asdict(self) | parsed | {"clip_range_vf": bound}
