"""A Gymnasium task of your own that needs memory, and a GTrXL agent that solves it.

In the first step, one of three signals is shown. It disappears, and three to six steps later a lamp turns
green: the agent now has to name the signal. An agent without memory is right in a third of the episodes.

    python signal_task.py

or, with the command line, a run folder and TensorBoard:

    rlxf train gtrxl --env signal_task:examples/Signal-v0 --core.memory.length 16 \\
        --total-timesteps 20k
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env

from rlxf import GTrXLPPO, evaluate
from rlxf.envs import make_vec_env
from rlxf.evaluation import Report

SIGNALS = 3
TASK = "examples/Signal-v0"


class SignalTask(gymnasium.Env[np.ndarray, np.int64]):
    """Name the signal of the first step after the lamp turned green.

    The observation is the one-hot signal, which is 0 after the first step, and the lamp. Actions 0, 1 and 2
    name a signal, action 3 waits. The reward is 1 for the right signal, and 0 otherwise.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - the form of Gymnasium

    def __init__(self, delays: tuple[int, int] = (3, 6)):
        # The spaces describe each observation and action exactly: dtype, shape and bounds are checked.
        self.observation_space = Box(0.0, 1.0, (SIGNALS + 1,), np.float32)
        self.action_space = Discrete(SIGNALS + 1)
        self.delays = delays

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)  # creates self.np_random; other random generators would ignore the seed
        self.signal = int(self.np_random.integers(SIGNALS))
        self.delay = int(self.np_random.integers(self.delays[0], self.delays[1] + 1))
        self.time = 0
        return self.observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        # An episode is terminated if it ends by the rules of the task. It is truncated if only the time is
        # over: then its value is not 0, and agents estimate it. The TimeLimit below truncates, not the task.
        terminated = self.time >= self.delay and action != SIGNALS
        right = terminated and action == self.signal
        self.time += 1
        info = {"is_success": right} if terminated else {}  # rlxf and SB3 report the success rate
        return self.observation(), float(right), terminated, False, info

    def observation(self) -> np.ndarray:
        observation = np.zeros(SIGNALS + 1, np.float32)
        if self.time == 0:
            observation[self.signal] = 1
        observation[-1] = self.time >= self.delay
        return observation


# With the registration, the task has an id and a time limit. If this module is in an installed package,
# `rlxf train gtrxl --env PACKAGE.MODULE:examples/Signal-v0` works in any folder.
# The entry point is a text, not the class, so that Minari can write it to the metadata of datasets.
gymnasium.register(TASK, entry_point=f"{__name__}:SignalTask", max_episode_steps=16)


# Defaults are meant for longer tasks. Here the memory is as long as an episode, and rollouts are short.
SMALL: dict[str, Any] = {
    "memory_length": 16,
    "segment_length": 32,
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 4,
}


def train(steps: int = 10_240, seed: int = 0) -> Report:
    """Train an agent, and return its evaluation."""
    env = make_vec_env(TASK, n_envs=32, seed=seed)
    agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, **SMALL)
    agent.learn(steps, progress_bar=True)
    return evaluate(agent, TASK, episodes=200)


def main() -> None:
    """Check the task, train an agent and print its evaluation."""
    check_env(gymnasium.make(TASK).unwrapped)
    print(train())


if __name__ == "__main__":
    main()
