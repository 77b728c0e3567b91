"""Environment steps per second over rollout and training."""

from itertools import pairwise

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from benchmarks.machine import now


class IterationClock(BaseCallback):
    """Callback that records the start of each rollout and the end of training, which delimit iterations.

    The times are those after all work of the agent's device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.times.append(now(self.model.device))

    def _on_training_end(self) -> None:
        self.times.append(now(self.model.device))


def iteration_rates(agent: OnPolicyAlgorithm, iterations: int) -> list[float]:
    """Return the environment steps per second of each iteration, after one for warm-up."""
    steps = agent.n_envs * agent.n_steps
    clock = IterationClock()
    agent.learn(steps * (1 + iterations), callback=clock)
    return rates(clock.times[1:], steps)


def rates(times: list[float], steps: int) -> list[float]:
    """Return ``steps`` divided by the seconds between successive ``times``."""
    return [steps / (end - start) for start, end in pairwise(times)]
