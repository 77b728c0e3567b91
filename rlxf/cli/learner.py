"""The options of PPO."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlxf.cli.counts import Count
from rlxf.training import parse_schedule


@dataclass(frozen=True, kw_only=True)
class Learner:
    """PPO."""

    n_envs: Count = 32
    """Environments side by side. More give steadier gradients and faster steps, and take more memory."""
    n_steps: Count | None = None
    """Steps of each environment between updates; a multiple of the segment length. None: as many as make
    rollouts of at least 2048 steps, 64 with 32 environments."""
    segment_length: Count = 64
    """Steps through which gradients flow: how far back the agent learns what to remember in one piece."""
    batch_size: Count | None = None
    """Steps in a minibatch; a multiple of the segment length. None: 256, or the next multiple of it."""
    n_epochs: Count = 6
    """Passes over a rollout."""
    learning_rate: str = "linear:0.001:0"
    """Adam's, a schedule: a number, linear:START:END[:FRACTION] or cosine:START:END, over the training. It
    falls to 0, so that a solved task stays solved."""
    gamma: float = 0.99
    """Discount. Rewards more than 1 / (1 - gamma) steps ahead hardly count: 0.995 for long corridors."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantages: nearer to 1 is less biased and noisier."""
    critic_lambda: float | None = None
    """Lambda of the returns that values learn; None for gae_lambda. 1 suits episodes of hundreds of steps."""
    clip_range: str = "0.2"
    """How far the policy may move in one update, a schedule like the learning rate."""
    clip_range_vf: str | None = None
    """Largest change of a value in one update, in units of the standard deviation of recent returns, a
    schedule like the learning rate; None for no bound."""
    normalize_advantage: bool = True
    """Subtract the mean of a rollout's advantages and divide by their deviation."""
    ent_coef: str = "linear:0.03:0"
    """Weight of the entropy, which keeps the agent trying; a schedule like the learning rate."""
    vf_coef: float = 0.5
    """Weight of the value loss, measured in units of the variance of recent returns."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    target_kl: float | None = None
    """End an update once the policy has moved 1.5 times as far; None for no bound."""
    advantage_epsilon: float = 0.05
    """Share of the standard deviation of recent returns that is added to that of advantages, which keeps
    noise small after convergence."""
    previous_action: bool = True
    """The action before is part of each step's input: observations alone do not tell what was done."""
    across_episodes: bool = False
    """Memory outlasts the end of an episode, for tasks that stay the same for many: what was found out in one
    is known in the next. --previous-transition shows what an episode ended with."""
    refresh: bool = False
    """After each update, think of what is remembered anew, with the new weights: one more pass over as many
    steps as layers times memory length."""
    reconstruction_coef: float = 0.0
    """Weight of the observation reconstruction loss; 0 for none. It helps where rewards are rare."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """These options as arguments of the agent."""
        schedules = ("learning_rate", "clip_range", "ent_coef")
        bound = None if self.clip_range_vf is None else parse_schedule(self.clip_range_vf)
        parsed = {name: parse_schedule(getattr(self, name)) for name in schedules}
        return asdict(self) | parsed | {"clip_range_vf": bound}
