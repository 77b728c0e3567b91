"""Exported agents next to `predict`: equal actions over many steps with episode ends, and times per step."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import DecisionTransformer, GTrXLPPO, TransformerSpec
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl import gtrxl
from rlxf.agents.gtrxl.policies import default_policy_name
from rlxf.attention import (
    ACT,
    GRU,
    LSTM,
    XL,
    Compressive,
    CoPE,
    Full,
    GatedDeltaNet,
    Mamba2,
    MinGRU,
    Performer,
    RoPE,
    StreamingXL,
    Window,
)
from rlxf.data import Trajectories
from rlxf.export.onnx_player import Player

VECTOR = spaces.Box(-1.0, 1.0, (11,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
MEMORY = 32
GTRXL = gtrxl(MEMORY)
MIXER = TransformerSpec()
CORES: dict[str, TransformerSpec] = {
    "XL, GRU gates": GTRXL,
    "XL, RoPE": replace(GTRXL, position=RoPE()),
    "XL, CoPE": replace(GTRXL, position=CoPE(8)),
    "XL, Performer": replace(GTRXL, position=None, kernel=Performer(32)),
    "XL, ACT": replace(GTRXL, depth=ACT()),
    "StreamingXL": replace(GTRXL, memory=StreamingXL(MEMORY, 4), pattern=Full()),
    "Compressive": replace(GTRXL, memory=Compressive(16, 4, 4), pattern=Full()),
    "MinGRU": replace(MIXER, recurrence=MinGRU()),
    "GatedDeltaNet": replace(MIXER, recurrence=GatedDeltaNet()),
    "LSTM": replace(MIXER, recurrence=LSTM()),
    "Mamba2 below attention": replace(
        MIXER, recurrence=Mamba2(), attention_layers=(1,), memory=XL(MEMORY), pattern=Window(MEMORY + 1)
    ),
    "attention below GRU": replace(
        MIXER, recurrence=GRU(), attention_layers=(0,), memory=XL(MEMORY), pattern=Window(MEMORY + 1)
    ),
}
"""Cores of a `GTrXLPPO` with Box actions."""
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "Discrete": (VECTOR, spaces.Discrete(4)),
    "MultiDiscrete": (VECTOR, spaces.MultiDiscrete([3, 4])),
    "MultiBinary": (VECTOR, spaces.MultiBinary(4)),
    "images": (IMAGE, BOX),
    "Dict": (spaces.Dict({"image": IMAGE, "vector": VECTOR, "choice": spaces.Discrete(3)}), BOX),
}
"""Observations and actions of a `GTrXLPPO` with its default core."""


class Samples(gymnasium.Env[Any, Any]):
    """Environment for its spaces only.

    Args:
        observation_space: space of the observations.
        action_space: space of the actions.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]):
        self.observation_space, self.action_space = observation_space, action_space


@dataclass
class Export:
    """Compare exported agents with `predict`: actions, and CPU milliseconds per step of one environment."""

    steps: int = 1000
    """Number of steps; an episode ends after each of them with probability 1 / 50."""
    only: tuple[str, ...] = ()
    """Names of the rows; default: all."""

    def run(self) -> None:
        """Export each agent, play it next to `predict`, and print the table."""
        torch.set_num_threads(1)
        table = Table("agent", "largest difference", "predict, ms", "onnxruntime, ms", "export, s")
        for name, make in agents().items():
            if not self.only or name in self.only:
                table.add_row(name, *compare(make(), self.steps))
        Console(width=120).print(table)


def agents() -> dict[str, Callable[[], Any]]:
    """Return the agents by name, as functions that build them."""
    cores = {name: (lambda core=core: online(VECTOR, BOX, core)) for name, core in CORES.items()}
    others = {name: (lambda both=both: online(both[0], both[1], GTRXL)) for name, both in SPACES.items()}
    return (
        cores
        | others
        | {"DT, Box": lambda: offline(BOX), "DT, Discrete": lambda: offline(spaces.Discrete(3))}
    )


def online(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], core: TransformerSpec
) -> GTrXLPPO:
    """Return a `GTrXLPPO` with noise on its weights, whose actions depend on its observations."""
    env = DummyVecEnv([lambda: Samples(observation_space, action_space)])
    agent = GTrXLPPO(default_policy_name(observation_space), env, core=core, seed=0, device="cpu")
    return with_noise(agent)


def offline(action_space: spaces.Space[Any]) -> DecisionTransformer:
    """Return a `DecisionTransformer` of the published size with the spaces of Hopper, and noise."""
    rng, steps = np.random.default_rng(0), 60
    discrete = isinstance(action_space, spaces.Discrete)
    data = Trajectories(
        observations=rng.normal(size=(steps, 11)).astype(np.float32),
        actions=rng.integers(3, size=steps)
        if discrete
        else rng.uniform(-1, 1, (steps, 3)).astype(np.float32),
        rewards=np.ones(steps, np.float32),
        return_to_go=np.arange(steps, 0, -1).astype(np.float32),
        offsets=np.array([0, 20, steps]),
        terminated=np.ones(2, np.bool_),
        truncated=np.zeros(2, np.bool_),
        observation_mean=np.zeros(11, np.float32),
        observation_std=np.ones(11, np.float32),
        observation_space=spaces.Box(-np.inf, np.inf, (11,), np.float32),
        action_space=action_space,
        dataset_ids=("made-up/hopper-v0",),
    )
    core = decision_transformer(width=128, layers=3, heads=1)
    return with_noise(DecisionTransformer(data, context_length=20, core=core, seed=0, device="cpu"))


def with_noise(agent: Any) -> Any:
    """Add noise to all weights of an agent, and return it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return agent


def compare(agent: Any, steps: int) -> tuple[str, ...]:
    """Return largest difference of actions, median milliseconds of both, and seconds of the export."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, _ = timed(lambda: agent.export(Path(folder) / "policy.onnx"))
        player = Player(Path(folder) / "policy.onnx")
    state = own = None
    worst, times = 0.0, []
    for observation, start in observations(agent, steps):
        ours, (expected, state) = timed(
            lambda o=observation, s=state, e=start: agent.predict(o, s, e, deterministic=True)  # type: ignore[misc]
        )
        theirs, (action, own) = timed(lambda o=observation, s=own, e=start: player.predict(o, s, e))  # type: ignore[misc]
        worst = max(worst, float(np.abs(np.asarray(action, float) - expected).max()))
        times.append((ours, theirs))
    medians = (1000 * median(column) for column in zip(*times, strict=True))
    return f"{worst:.1e}", *(f"{x:.2f}" for x in medians), f"{seconds:.0f}"


def observations(agent: Any, steps: int) -> Iterator[tuple[Any, Any]]:
    """Yield random observations with a batch axis, and whether each is the first of an episode, (1,) bool."""
    rng, since = np.random.default_rng(0), 0
    online = isinstance(agent, GTrXLPPO)
    space = agent.observation_space if online else agent.dataset_info.observation_space
    space.seed(0)
    for number in range(steps):
        start = number == 0 or rng.random() < 1 / 50
        since = 0 if start else since + 1
        value = space.sample()
        batch = {key: x[None] for key, x in value.items()} if isinstance(value, dict) else value[None]
        yield (batch if online else conditioned(agent, batch, since, rng)), np.array([start])


def conditioned(agent: Any, observation: Any, time_step: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the observation of `rlxf.envs.ReturnToGo` with a random previous action."""
    action = agent.action_space.sample() if time_step else np.zeros(agent.action_space.shape or ())
    return {
        "observation": observation,
        "return_to_go": np.array([[60.0 - time_step]], np.float32),
        "previous_action": np.asarray(action, agent.action_space.dtype)[None],
        "time_step": np.array([[time_step]]),
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result
