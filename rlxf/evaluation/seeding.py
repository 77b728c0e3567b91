"""Reproducible samples of actions of agents that draw from global generators or from their action space."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf.utils.rng import preserve_rng_state


def action_seed(seed: int) -> int:
    """Return the seed of random actions for the seed of a run.

    Generators of equal seeds give equal numbers, so actions with the seed of the environments, or of the
    choice of steps, would depend on them.
    """
    return int(np.random.SeedSequence(seed, spawn_key=(0,)).generate_state(1)[0])


@contextmanager
def seeded_sampling(agents: Sequence[Any], seed: int) -> Iterator[None]:
    """Context manager that seeds the sampling of actions, and restores the global generators at the end.

    Agents sample with the global generator of torch. DQN of SB3 decides with that of NumPy whether it takes a
    random action, and draws the action from its action space.

    Args:
        agents: agents that act inside. Those of SB3 have a copy of their action space meanwhile.
        seed: seed of the global generators of torch, NumPy and Python, and of the action spaces; at least 0.
    """
    algorithms = {id(agent): agent for agent in agents if isinstance(agent, BaseAlgorithm)}
    with ExitStack() as stack:
        for algorithm in algorithms.values():
            stack.enter_context(_seeded_action_space(algorithm, action_seed(seed)))
        stack.enter_context(preserve_rng_state())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # the generator that SB3 draws from
        yield


@contextmanager
def _seeded_action_space(algorithm: BaseAlgorithm, seed: int) -> Iterator[None]:
    """Context manager in which an algorithm has a seeded copy of its action space."""
    space = algorithm.action_space
    algorithm.action_space = deepcopy(space)
    algorithm.action_space.seed(seed)
    try:
        yield
    finally:
        algorithm.action_space = space
