"""CPU time of updates and acting steps by the library that computes large matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gtrxl_agents import gtrxl_ppo
from benchmarks.operations import matrix_rate, torch_matrix_rate
from benchmarks.shapes import SMALL, Shape, cleanrl_shape
from benchmarks.speed import LIGHT, TMAZE
from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.envs.make import make_vec_env
from rlxf.utils.matrix_products import onednn_is_faster

USED = "rlxf.utils.matrix_products.onednn_is_faster"
"""Function that decides whether products use oneDNN."""
CALLS = 20
"""Calls of `predict`, or updates of a Decision Transformer, in a round."""


@dataclass(frozen=True)
class Work:
    """Part of a training or an evaluation.

    Args:
        name: description of the part.
        call: does it.
        count: number of equal parts in a call.
    """

    name: str
    call: Callable[[], object]
    count: float

    def milliseconds(self) -> float:
        """Return the CPU time of one part."""
        start = time.process_time()
        self.call()
        return 1000 * (time.process_time() - start) / self.count


@dataclass
class Products:
    """Milliseconds of updates and acting steps with large matrix products of MKL and of oneDNN.

    Both alternate in this process with one thread, and the lowest CPU time of the rounds counts. The
    benchmark needs a processor on which rlxf uses oneDNN. The dataset is read from MINARI_DATASETS_PATH.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    rounds: int = 4
    """Rounds with each library, after one for warm-up."""

    def run(self) -> None:
        """Measure and print the table."""
        torch.set_num_threads(1)
        if not onednn_is_faster():
            raise SystemExit("rlxf computes all matrix products by torch's settings on this processor")
        rates = f"{torch_matrix_rate() / 1e9:.0f} and {matrix_rate() / 1e9:.0f} GFLOP/s"
        table = Table("part", "MKL, ms", "oneDNN, ms", "ratio", title=f"Matrix products with {rates}")
        for work in self.parts():
            mkl, onednn = self.measure(work)
            table.add_row(work.name, f"{mkl:.1f}", f"{onednn:.1f}", f"{mkl / onednn:.2f}")
        Console(width=120).print(table)

    def parts(self) -> list[Work]:
        """Return the parts: minibatches, updates and acting steps of small and of large networks."""
        gated, agent = cleanrl_shape(gated=True), DecisionTransformer(self.dataset, seed=0, device="cpu")
        return [
            minibatches("2 layers of 64, GRU gates", TMAZE, SMALL),
            minibatches("the same, compiled", TMAZE, SMALL, compile=True),
            minibatches("3 layers of 384, GRU gates", LIGHT, gated),
            Work("update of DecisionTransformer", lambda: agent.learn(CALLS), CALLS),
            offline_steps(agent, 50),
            online_steps("3 layers of 384, GRU gates", gated),
        ]

    def measure(self, work: Work) -> tuple[float, float]:
        """Return the milliseconds of a part with MKL and with oneDNN."""
        rounds = [[with_library(onednn, work) for onednn in (False, True)] for _ in range(1 + self.rounds)]
        mkl, onednn = zip(*rounds[1:], strict=True)
        return min(mkl), min(onednn)


def with_library(onednn: bool, work: Work) -> float:
    """Return the milliseconds of a part with the products of oneDNN or of MKL."""
    with patch(USED, lambda: onednn):
        return work.milliseconds()


def minibatches(name: str, env_id: str, shape: Shape, **options: Any) -> Work:
    """Return the minibatches of an update of GTrXLPPO, which trains on the same rollout each time."""
    agent = gtrxl_agent(env_id, shape, **options)
    agent.learn(shape.envs * shape.steps)
    count = shape.epochs * shape.envs * shape.steps / shape.minibatch
    return Work(f"minibatch of {shape.minibatch:,} steps, {name}", agent.train, count)


def gtrxl_agent(env_id: str, shape: Shape, **options: Any) -> GTrXLPPO:
    """Return an untrained agent with the sizes of a shape."""
    return gtrxl_ppo(make_vec_env(env_id, shape.envs, seed=0), shape, seed=0, device="cpu", **options)


def online_steps(name: str, shape: Shape) -> Work:
    """Return calls of `predict` of GTrXLPPO for the environments of a shape."""
    agent = gtrxl_agent(LIGHT, shape)
    env: Any = agent.get_env()
    return Work(
        f"predict in {shape.envs} environments, {name}", steps_of(agent, env.reset(), shape.envs), CALLS
    )


def offline_steps(agent: DecisionTransformer, envs: int) -> Work:
    """Return calls of `predict` of a Decision Transformer whose windows are full."""
    space, action = agent.dataset_info.observation_space, agent.dataset_info.action_space
    observation = {
        "observation": np.zeros((envs, *(space.shape or ())), np.float32),
        "return_to_go": np.ones((envs, 1), np.float32),
        "time_step": np.full((envs, 1), agent.context_length),
        "previous_action": np.zeros((envs, *(action.shape or ())), np.float32),
    }
    return Work(
        f"predict of DecisionTransformer in {envs} environments", steps_of(agent, observation, envs), CALLS
    )


def steps_of(agent: Any, observation: Any, envs: int) -> Callable[[], None]:
    """Return a function that calls `predict` repeatedly, which continues with the state of its last call."""
    states = [None]

    def step() -> None:
        for _ in range(CALLS):
            _, states[0] = agent.predict(observation, states[0], np.full(envs, states[0] is None))

    return step
