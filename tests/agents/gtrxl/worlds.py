"""Small environments with scripted episode ends, and small agents with random weights."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl import GTrXLPolicy, gtrxl
from rlxf.agents.gtrxl.training_algorithm import PPOTraining
from rlxf.attention import (
    CALM,
    GRU,
    KNN,
    LSTM,
    RATE,
    RMT,
    Full,
    GatedDeltaNet,
    GRUGate,
    InfiniAttention,
    Mamba2,
    StreamingXL,
    TransformerSpec,
    Window,
)
from rlxf.attention.memory.base import Memory
from rlxf.attention.patterns.window import limit_distance

GOES_ON, TERMINATED, TRUNCATED = range(3)

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
DICT = spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR, "image": IMAGE})
OBSERVATIONS = {"MlpGTrXLPolicy": VECTOR, "CnnGTrXLPolicy": IMAGE, "MultiInputGTrXLPolicy": DICT}
SMALL_EXTRACTOR: dict[str, dict[str, Any]] = {
    "MlpGTrXLPolicy": {},
    "CnnGTrXLPolicy": {"features_extractor_kwargs": {"features_dim": 16}},
    "MultiInputGTrXLPolicy": {"features_extractor_kwargs": {"cnn_output_dim": 16}},
}
ACTIONS = {
    "Discrete": spaces.Discrete(3),
    "Box": spaces.Box(-1.0, 2.0, (2,), np.float32),
    "Box of two axes": spaces.Box(-1.0, 2.0, (2, 3), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(3),
    "Discrete from 2": spaces.Discrete(3, start=2),
}
MIXED = (0, 0, 1, 0, 2, 0, 0, 0, 0, 2, 1)


class Scripted(gymnasium.Env):
    """Environment with random observations and rewards; step k ends the episode if ``ends[k]``."""

    def __init__(
        self,
        ends: Sequence[int] = MIXED,
        observation_space: spaces.Space = VECTOR,
        action_space: spaces.Space = ACTIONS["Discrete"],
    ):
        self.ends, self.life = ends, 0
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        end = self.ends[self.life % len(self.ends)]
        self.life += 1
        reward = float(self.np_random.normal())
        return self.observation_space.sample(), reward, end == TERMINATED, end == TRUNCATED, {}


def scripts(
    ends: Sequence[Sequence[int]],
    observation_space: spaces.Space = VECTOR,
    action_space: spaces.Space = ACTIONS["Discrete"],
) -> DummyVecEnv:
    """Return a VecEnv with a `Scripted` environment for each script, which resets in the same step."""
    spaces_of = [_copies(observation_space, action_space) for _ in ends]
    return DummyVecEnv([lambda s=s, e=e: Scripted(e, *s) for s, e in zip(spaces_of, ends, strict=True)])


def sampled(space: spaces.Space, envs: int) -> Any:
    """Return random observations of a space for E environments."""
    values = [space.sample() for _ in range(envs)]
    if not isinstance(values[0], dict):
        return np.stack(values)
    return {key: np.stack([value[key] for value in values]) for key in values[0]}


def next_step_scripts(ends: Sequence[Sequence[int]]) -> SyncVectorEnv:
    """Return the environments of `scripts` as a Gymnasium vector environment with reset steps."""
    made = [lambda e=e: Scripted(e, *_copies(VECTOR, ACTIONS["Discrete"])) for e in ends]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode.NEXT_STEP)


def shifted(number: int, script: Sequence[int] = MIXED) -> list[list[int]]:
    """Return ``number`` copies of a script, each rotated by one more step."""
    return [[*script[i % len(script) :], *script[: i % len(script)]] for i in range(number)]


def small_core(**changes: Any) -> Any:
    """Return a core with memory of 8 steps, width 16 and two layers."""
    return gtrxl(8, **({"width": 16, "layers": 2, "heads": 2, "feed_forward": 32} | changes))


def recurrent_core(**changes: Any) -> TransformerSpec:
    """Return a core of the size of `small_core` whose layers are gated delta rules."""
    sizes = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 32}
    return TransformerSpec(**({"recurrence": GatedDeltaNet(), "residual": GRUGate()} | sizes | changes))


def limited_to_memory(core: TransformerSpec, **choice: Any) -> TransformerSpec:
    """Return the core with a choice and a pattern limited to its memory; a recurrence has no memory.

    `Full()` becomes a `Window`, unless the memory itself defines what is visible.
    """
    if "recurrence" in choice:
        return replace(core, **({"position": None, "pattern": Full(), "memory": None} | choice))
    core = replace(core, **choice)
    assert core.memory is not None
    if core.memory.covers(core.pattern):
        return core
    return replace(core, pattern=limit_distance(core.pattern, core.memory.length))


def memory_core(memory: Memory, **changes: Any) -> TransformerSpec:
    """Return a core of the size of `small_core` with a memory that itself defines what is visible."""
    return replace(small_core(**changes), memory=memory, pattern=Full())


MEMORY_CORES = {
    "attention sinks": memory_core(StreamingXL(8, 3)),
    "memory tokens": memory_core(RMT(2, 2)),
    "retention valve": memory_core(RATE(2, 2)),
}
"""Cores whose memory has a part of fixed size that is stored at the starts of segments."""

RECURRENT_CORES: dict[str, TransformerSpec] = {
    "GatedDeltaNet": recurrent_core(),
    "LSTM": recurrent_core(recurrence=LSTM()),
    "InfiniAttention": recurrent_core(recurrence=InfiniAttention(3, "delta")),
    "Mamba-2 below attention": replace(small_core(), recurrence=Mamba2(state=4), attention_layers=(1,)),
    "kNN memory below GRU": replace(
        small_core(), recurrence=GRU(), attention_layers=(0,), memory=KNN(2, 12, 4, 1), pattern=Window(3)
    ),
    "attention below GRU": replace(small_core(), recurrence=GRU(), attention_layers=(0,)),
    "CALM": recurrent_core(layers=3, depth=CALM("state", 0.5)),
}
"""Cores with recurrent layers: pure and mixed ones."""


def small_agent(env: Any, policy: str = "MlpGTrXLPolicy", loud: bool = True, **changes: Any) -> GTrXLPPO:
    """Return an agent with random heads, so that actions depend on observations and memory."""
    settings = {"n_steps": 16, "segment_length": 4, "batch_size": 16, "n_epochs": 2, "seed": 3}
    settings |= {"n_envs": 3} if isinstance(env, str) else {}
    settings |= {"core": small_core(), "device": "cpu", "policy_kwargs": SMALL_EXTRACTOR[policy]}
    agent = GTrXLPPO(policy, env, **(settings | changes))
    return make_loud(agent) if loud else agent


def with_eager_updates(agent: GTrXLPPO) -> GTrXLPPO:
    """Let an agent with compiled or captured steps update its policy operation by operation."""
    agent._algorithm = PPOTraining(agent.policy, agent.order)
    return agent


def make_loud(agent: GTrXLPPO, scale: float = 0.2) -> GTrXLPPO:
    """Add noise to every weight, since new heads are near 0 and would hide differences."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return agent


def rollouts(agent: GTrXLPPO, number: int) -> Iterator[Any]:
    """Yield the agent's buffer after each rollout; update the agent between rollouts, not after the last."""
    _, callback = agent._setup_learn(10**6)
    for rollout in range(number):
        if rollout:
            agent.train()
        agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
        yield agent.rollout_buffer


def all_segments(buffer: Any) -> Any:
    """Return all segments of a rollout, in order."""
    number = buffer.n_envs * buffer.n_steps // buffer.segment_length
    return buffer.segments(torch.arange(number), buffer.advantages)


def last_outputs(policy: GTrXLPolicy, *segments: Any) -> torch.Tensor:
    """Return the outputs (B T, C) of all layers; arguments as in `GTrXLPolicy.exit_outputs`."""
    return policy.exit_outputs(*segments).outputs[-1].flatten(0, 1)


def parameters(agent: GTrXLPPO) -> list[torch.Tensor]:
    """Return a copy of all weights."""
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _copies(observation_space: spaces.Space, action_space: spaces.Space) -> Any:
    return copy.deepcopy(observation_space), copy.deepcopy(action_space)
