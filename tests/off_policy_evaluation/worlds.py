"""A random tabular MDP with exact values, logged episodes of it, and tabular agents."""

from dataclasses import dataclass, replace

import numpy as np
from gymnasium import spaces

from rlxf.data import Trajectories, return_to_go


@dataclass(frozen=True)
class TabularMDP:
    """MDP with S states, A actions, and a probability of 0.2 to terminate after each step.

    Args:
        seed: seed of transitions and rewards.
        states: number of states S.
        actions: number of actions A.
    """

    seed: int = 0
    states: int = 4
    actions: int = 2
    survival: float = 0.8

    @property
    def transitions(self):
        """Probabilities (S, A, S) of the next state if the episode goes on."""
        return np.random.default_rng(self.seed).dirichlet(np.ones(self.states), (self.states, self.actions))

    @property
    def rewards(self):
        """Rewards (S, A)."""
        return np.random.default_rng(self.seed + 1).normal(size=(self.states, self.actions))

    def q(self, policy, discount):
        """Solve the Bellman equation for the values (S, A) of a policy (S, A)."""
        mean = np.einsum("sat,tb->satb", self.survival * self.transitions, policy)
        size = self.states * self.actions
        step = np.eye(size) - discount * mean.reshape(size, size)
        return np.linalg.solve(step, self.rewards.ravel()).reshape(self.states, self.actions)

    def record(self, policy, episodes, seed, limit=20):
        """Record episodes of a policy (S, A) from uniform first states, truncated after ``limit`` steps."""
        rng, transitions, rewards = np.random.default_rng(seed), self.transitions, self.rewards
        states, actions, lengths, terminated = [], [], [], []
        for _ in range(episodes):
            state, begin = rng.integers(self.states), len(actions)
            for step in range(limit):
                action = rng.choice(self.actions, p=policy[state])
                states.append(state)
                actions.append(action)
                ends = rng.random() >= self.survival
                if ends or step == limit - 1:
                    terminated.append(ends)
                    break
                state = rng.choice(self.states, p=transitions[state, action])
            lengths.append(len(actions) - begin)
        return episodes_of(
            np.eye(self.states)[states], np.array(actions), rewards[states, actions], lengths, terminated
        )


def episodes_of(observations, actions, rewards, lengths, terminated, action_space=None):
    """Return `Trajectories` of vector observations (N, D), Discrete actions by default."""
    offsets, terminated = np.cumsum([0, *lengths]), np.array(terminated, np.bool_)
    to_go = np.concatenate([return_to_go(part) for part in np.split(rewards, offsets[1:-1])])
    observations = observations.astype(np.float32)
    return Trajectories(
        observations,
        actions,
        rewards.astype(np.float32),
        to_go.astype(np.float32),
        offsets,
        terminated,
        ~terminated,
        np.zeros(observations.shape[1], np.float32),
        np.ones(observations.shape[1], np.float32),
        spaces.Box(-np.inf, np.inf, observations.shape[1:], np.float32),
        action_space or spaces.Discrete(int(actions.max()) + 1),
        dataset_ids=("test/tabular-v0",),
    )


def scaled(data, factor):
    """Multiply the rewards of a dataset."""
    return replace(data, rewards=data.rewards * factor, return_to_go=data.return_to_go * factor)


def states_of(data):
    """Return the states (N,) of one-hot observations."""
    return data.observations.argmax(axis=1)


class TabularAgent:
    """Deterministic agent without state: action ``choices[s]`` for one-hot observations."""

    def __init__(self, choices):
        self.choices = np.asarray(choices)

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        return self.choices[observation.argmax(axis=1)], None

    @property
    def policy_table(self):
        """Probabilities (S, A) of two actions."""
        return np.eye(2)[self.choices]
