"""Original training and evaluation loop of Decision Transformer: batches by Python loops, one environment.

Source: Chen et al. 2021, arXiv:2106.01345, algorithm 1; kzl/decision-transformer and CORL do the same. This
module runs in the virtual environment of `hugging_face`.
"""

import random
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.hugging_face_model import Learner
from rlxf.data import Trajectories, WindowBatch

Episode = dict[str, NDArray[Any]]


class Batches:
    """Sampler of windows of K steps, which are sliced from episodes, padded and stacked one by one.

    Args:
        trajectories: the data.
        length: window length K.
        seed: random seed of the sampling.
        device: device of the batches.
    """

    def __init__(self, trajectories: Trajectories, length: int, seed: int, device: str = "cpu"):
        self.length, self.device = length, device
        self.episodes = [_episode(trajectories, e) for e in range(trajectories.episodes)]
        self.shares = trajectories.lengths / trajectories.steps
        random.seed(seed)
        self.rng = np.random.default_rng(seed)

    def sample(self, batch_size: int) -> WindowBatch:
        """Sample a batch of windows; the probability of an episode is proportional to its length."""
        chosen = self.rng.choice(len(self.episodes), batch_size, p=self.shares)
        rows = [self._window(self.episodes[e]) for e in chosen]
        parts = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return WindowBatch(*(part.to(self.device) for part in parts))

    def _window(self, episode: Episode) -> tuple[NDArray[Any], ...]:
        start = random.randint(0, len(episode["rewards"]) - 1)
        piece = slice(start, start + self.length)
        observations, actions = episode["observations"][piece], episode["actions"][piece]
        count = len(observations)
        rewards = episode["rewards"][start:]
        return (
            _padded(observations, self.length),
            _padded(actions, self.length),
            _padded(rewards[:count], self.length),
            _padded(_returns_to_go(rewards)[:count], self.length),
            _padded(np.arange(start, start + count), self.length),
            _padded(np.ones(count, bool), self.length),
            np.array(False),  # imitation does not use the ends of episodes
        )


def _returns_to_go(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum rewards from the end in a loop, for each window, as in the original code."""
    returns = np.zeros_like(rewards)
    returns[-1] = rewards[-1]
    for step in reversed(range(len(rewards) - 1)):
        returns[step] = rewards[step] + returns[step + 1]
    return returns


def _padded(rows: NDArray[Any], length: int) -> NDArray[Any]:
    empty = np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)
    return np.concatenate([empty, rows])


def _episode(trajectories: Trajectories, e: int) -> Episode:
    piece = slice(trajectories.offsets[e], trajectories.offsets[e + 1])
    names = ("observations", "actions", "rewards")
    return {name: np.array(getattr(trajectories, name)[piece]) for name in names}


def play_episode(learner: Learner, env: gymnasium.Env, target: float, seed: int) -> tuple[float, int]:
    """Play an episode; return its return and length. The model reads the last K steps of the history."""
    observation, _ = env.reset(seed=seed)
    data, device = learner.trajectories, learner.device
    observations = torch.zeros(0, data.observations.shape[1], device=device)
    actions = torch.zeros(0, data.actions.shape[1], device=device)
    returns, total, done = torch.zeros(0, device=device), 0.0, False
    while not done:
        observations = torch.cat([observations, torch.as_tensor(observation).float()[None].to(device)])
        returns = torch.cat([returns, torch.tensor([target - total], device=device)])
        actions = torch.cat([actions, torch.zeros(1, actions.shape[1], device=device)])
        actions[-1] = choose(learner, observations, actions, returns)
        observation, reward, terminated, truncated, _ = env.step(actions[-1].cpu().numpy())
        total, done = total + float(reward), terminated or truncated
    return total, len(returns)


@torch.no_grad()
def choose(learner: Learner, observations: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    """Return the action (A,) for the last of T steps."""
    length = learner.setting.context_length
    first = max(0, len(returns) - length)
    time_steps = torch.arange(first, len(returns), device=returns.device)
    parts = [part[first:] for part in (observations, actions, returns)]
    parts += [time_steps, torch.ones_like(time_steps, dtype=torch.bool)]
    padded = [torch.cat([part.new_zeros(length - len(part), *part.shape[1:]), part])[None] for part in parts]
    return learner.forward(*padded)[0, -1]
