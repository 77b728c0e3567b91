"""Memory and time of updates in micro-batches and in bfloat16, each setting in a process of its own."""

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.gtrxl_agents import gtrxl_ppo
from benchmarks.machine import fresh_processes
from benchmarks.process_memory import peak_bytes, resident_bytes
from benchmarks.shapes import Shape, cleanrl_shape
from benchmarks.speed import LIGHT
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.envs.make import make_vec_env

MEGABYTE = 2**20


@dataclass(frozen=True)
class Result:
    """Result of one setting.

    Args:
        megabytes: peak of the resident memory in an update, above that before it.
        seconds: CPU time of the update.
        ratio: largest difference of PPO's ratio from 1 before the update.
        weights: weights after the update, as one vector.
    """

    megabytes: float
    seconds: float
    ratio: float
    weights: NDArray[np.float32]


@dataclass
class Updates:
    """Memory and time of an update of GTrXLPPO, with a single minibatch of all steps, at CleanRL's sizes.

    The first row is the whole minibatch in float32. Weights are compared after one update from the same
    weights with the same rollout.
    """

    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Values of gradient_accumulation_steps."""
    envs: int = 16
    """Number of environments; a minibatch has 128 steps of each."""
    precisions: tuple[str, ...] = ("float32", "bf16-mixed")
    """Precisions, each with one micro-batch."""

    def run(self) -> None:
        """Measure and print the table."""
        settings: list[dict[str, Any]] = [
            {"gradient_accumulation_steps": steps} for steps in self.micro_batches
        ]
        settings += [{"precision": each} for each in self.precisions[1:]]
        shape = replace(cleanrl_shape(gated=True), envs=self.envs, minibatch=128 * self.envs, epochs=1)
        results = {str(options): measure(shape, options) for options in settings}
        Console().print(table(results))


def measure(shape: Shape, options: dict[str, Any]) -> Result:
    """Measure one update in a new process."""
    with fresh_processes(1, torch.get_num_threads()) as pool:
        return pool.submit(_update, shape, options).result()


def _update(shape: Shape, options: dict[str, Any]) -> Result:
    warnings.simplefilter("ignore")
    agent = gtrxl_ppo(make_vec_env(LIGHT, shape.envs, seed=0), shape, seed=0, device="cpu", **options)
    _, callback = agent._setup_learn(10**9)
    assert agent.env is not None
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    ratio, before = _ratio(agent), resident_bytes()
    start = time.process_time()
    agent.train()
    seconds = time.process_time() - start
    weights = torch.cat([x.detach().flatten() for x in agent.policy.parameters()]).numpy()
    return Result((peak_bytes() - before) / MEGABYTE, seconds, ratio, weights)


@torch.no_grad()
def _ratio(agent: GTrXLPPO) -> float:
    """Return the largest difference of PPO's ratio from 1 over the first segments of a rollout."""
    agent.policy.set_training_mode(True)
    batch = agent.rollout_buffer.segments(torch.arange(1), agent.rollout_buffer.advantages)
    exits = agent.policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state)
    distribution, _ = agent.policy.heads(exits.outputs[-1].flatten(0, 1))
    return float(((distribution.log_prob(batch.actions) - batch.log_probs).exp() - 1).abs().max())


def table(results: dict[str, Result]) -> Table:
    """Return the table of all settings, compared with the first."""
    first, *_ = results.values()
    shown = Table(
        "setting", "peak MB", "CPU s", "largest difference of ratio from 1", "of weights from the first"
    )
    for name, each in results.items():
        difference = float(np.abs(each.weights - first.weights).max())
        numbers = (f"{each.megabytes:.0f}", f"{each.seconds:.1f}", f"{each.ratio:.1e}", f"{difference:.1e}")
        shown.add_row(name, *numbers)
    return shown
