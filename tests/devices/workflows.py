"""Helpers of uses of agents on an accelerator besides plain training, for a process that has it.

A workflow is a function that does the same on any device, and returns numbers to compare.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat
from torch import Tensor
from torch.utils._pytree import tree_map

from rlxf.agents.inspection import episode_inspector
from rlxf.training import CheckpointFolder, CheckpointWriter
from tests.devices import accelerator
from tests.devices.accelerator import NAME

Numbers = Any
"""Numbers, arrays and tensors, and nested lists, tuples and dicts of them."""
Workflow = Callable[[str], Numbers]


def check(module: str, case: str) -> None:
    """Compare the numbers of one of the ``WORKFLOWS`` of a module with those on the CPU."""
    workflow: Workflow = import_module(module).WORKFLOWS[case]
    with accelerator.random_numbers_of_cpu():
        own, expected = (tree_map(as_tensor, workflow(device)) for device in (NAME, "cpu"))
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def as_tensor(x: Any) -> Tensor:
    """Return a number, an array or a tensor as a tensor on the CPU."""
    return torch.as_tensor(x).detach().cpu().double()


def weights(agent: Any) -> dict[str, Tensor]:
    """Return the weights, and assert that they and the moments of the optimizer are on the device."""
    optimizer = getattr(agent, "optimizer", None) or agent.policy.optimizer
    moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    for x in [*agent.policy.state_dict().values(), *(x for x in moments if x.dim())]:
        assert x.device.type == agent.device.type, x.device
    return dict(agent.policy.state_dict())


class Kept(KVWriter):
    """Log writer that keeps all numbers but times."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        numbers = {name: x for name, x in key_values.items() if isinstance(x, int | float | np.number)}
        self.rows.append({name: x for name, x in numbers.items() if not name.startswith("time/")})

    def close(self) -> None:
        pass


def keep_log(agent: Any, folder: str) -> list[dict[str, float]]:
    """Let an agent log to TensorBoard in a folder, and return the rows of its log, which grow."""
    kept = Kept()
    agent.set_logger(Logger(folder, [kept, TensorBoardOutputFormat(folder)]))
    return kept.rows


class Stop(BaseCallback):
    """Stop the training after a number of steps."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def _on_step(self) -> bool:
        return self.num_timesteps < self.steps


def resumes(make: Callable[[str], Any], half: int, whole: int) -> Workflow:
    """Return a workflow that interrupts a training, resumes it, and asserts that the weights are those of an
    uninterrupted one on the same device. It returns nothing to compare.
    """

    def workflow(device: str) -> Numbers:
        if device == "cpu":
            return []
        straight = weights(make(device).learn(whole))
        with TemporaryDirectory() as folder:
            saving = CheckpointWriter(CheckpointFolder(folder), every_seconds=0)
            make(device).learn(whole, [saving, Stop(half)])
            saving._writer.wait()
            resumed = weights(make(device).learn(whole, resume_from=folder))
        for name, x in resumed.items():
            assert torch.equal(x.cpu(), straight[name].cpu()), name
        return []

    return workflow


def acting_step(agent: Any, exporting_module: str) -> Numbers:
    """Return the outputs of the step that an agent exports, which is on the CPU; no file is written."""
    with TemporaryDirectory() as folder, patch(f"{exporting_module}.export_step") as export:
        agent.export(Path(folder) / "policy.pt2")
    step = export.call_args.args[0].eval()
    with torch.no_grad():
        actions, state = step(*step.arguments)
        following, _ = step(step.observations, torch.zeros(step.envs, dtype=torch.bool), state)
    assert all(x.device.type == "cpu" for x in (actions, following, *state.values()))
    assert weights(agent)
    return actions, following


def inspected(agent: Any, observations: Sequence[Any]) -> Numbers:
    """Return attention and gates of an agent at consecutive observations."""
    inspector, state = episode_inspector(agent), None
    for step, observation in enumerate(observations):
        _, state = inspector.predict(observation, state, np.array([step == 0]))
    attention = inspector.attention()
    return attention.weights, attention.gates
