"""Environment steps per second over rollout plus training."""

import time
from itertools import pairwise
from statistics import median

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm


class IterationClock(BaseCallback):
    """Notes when each rollout starts and when training ends: an iteration lies between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.times.append(time.perf_counter())

    def _on_training_end(self) -> None:
        self.times.append(time.perf_counter())


def iteration_rates(agent: OnPolicyAlgorithm, iterations: int) -> list[float]:
    """Environment steps per second of each iteration, after one to warm up."""
    steps = agent.n_envs * agent.n_steps
    clock = IterationClock()
    agent.learn(steps * (1 + iterations), callback=clock)
    return rates(clock.times[1:], steps)


def rates(times: list[float], steps: int) -> list[float]:
    """``steps`` over the seconds from each of ``times`` to the next."""
    return [steps / (end - start) for start, end in pairwise(times)]


def typical(rates: list[float]) -> float:
    """The median: what another program on the machine disturbs the least."""
    return median(rates)
