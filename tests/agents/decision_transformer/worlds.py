"""Small trajectories in memory, small agents with noisy weights, and small pre-training models."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.agents.token_masking import KINDS, MaskedWindows, Masking
from rlxf.attention import (
    RATE,
    RMT,
    XL,
    ALiBi,
    GatedDeltaNet,
    GRUGate,
    LearnedAbsolute,
    Mamba2,
    RoPE,
    StreamingXL,
    TransformerSpec,
    Window,
    XLRelative,
)
from rlxf.data import Trajectories, action_encoder, observation_encoder, return_to_go
from rlxf.data.encoders import has_image_extractor
from rlxf.data.spaces import discrete_sizes

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 2), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (5, 5, 3), np.uint8)
NESTED = spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR})
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "small image": SMALL_IMAGE, "nested": NESTED}
ACTIONS = {
    "Box": spaces.Box(np.array([-1, 0], np.float32), np.array([2, 10], np.float32)),
    "Box of two axes": spaces.Box(-2.0, 2.0, (2, 2), np.float32),
    "Box without bounds": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "Discrete from 2": spaces.Discrete(3, start=2),
    "MultiDiscrete from elsewhere": spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    "MultiBinary": spaces.MultiBinary(3),
}
LENGTHS = (9, 1, 4, 14)
K = 5
SIZES: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 24}
CORES = {
    "published": TransformerSpec(**SIZES),
    "published with dropout": TransformerSpec(**SIZES, dropout=0.3),
    "learned positions": TransformerSpec(**SIZES, position=LearnedAbsolute(3 * K)),
    "RoPE": TransformerSpec(**SIZES, position=RoPE()),
    "ALiBi and a window": TransformerSpec(**SIZES, position=ALiBi(), pattern=Window(4)),
    "memory": TransformerSpec(**SIZES, position=XLRelative(), memory=XL(7)),
    "GTrXL": TransformerSpec(
        **SIZES, position=XLRelative(), memory=XL(6), pattern=Window(7), residual=GRUGate()
    ),
    "attention sinks": TransformerSpec(**SIZES, position=XLRelative(), memory=StreamingXL(6, 3)),
    "memory tokens": TransformerSpec(**SIZES, position=XLRelative(), memory=RMT(6, 2)),
    "retention valve": TransformerSpec(**SIZES, position=XLRelative(), memory=RATE(6, 2)),
    "Gated DeltaNet": TransformerSpec(**SIZES, recurrence=GatedDeltaNet()),
    "Mamba-2 below attention": TransformerSpec(
        **SIZES, recurrence=Mamba2(state=4), attention_layers=(1,), position=XLRelative(), memory=XL(7)
    ),
}


def some_trajectories(
    observation_space: spaces.Space = VECTOR,
    action_space: spaces.Space = ACTIONS["Box"],
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
    **changes: Any,
) -> Trajectories:
    """Return trajectories of random observations, actions and rewards."""
    rng = np.random.default_rng(seed)
    steps = sum(lengths)
    rewards = rng.normal(size=steps).astype(np.float32)
    observations = rows(observation_space, steps, rng)
    large = has_image_extractor(observations.shape[1:])
    offsets = np.cumsum([0, *lengths])
    values: dict[str, Any] = {
        "observations": observations,
        "actions": rows(action_space, steps, rng, is_action=True),
        "rewards": rewards,
        "return_to_go": np.concatenate([return_to_go(part) for part in np.split(rewards, offsets[1:-1])]),
        "offsets": offsets,
        "terminated": np.ones(len(lengths), bool),
        "truncated": np.zeros(len(lengths), bool),
        "observation_mean": None if large else observations.mean(0, np.float32),
        "observation_std": None if large else observations.std(0, np.float32) + 0.1,
        "observation_space": observation_space,
        "action_space": action_space,
        "dataset_ids": ("test/small-v0",),
    }
    return Trajectories(**(values | {"return_to_go": values["return_to_go"].astype(np.float32)} | changes))


def rows(space: spaces.Space, number: int, rng: Any, is_action: bool = False) -> NDArray[Any]:
    """Return random values in the encoding of the dataset."""
    encoder = action_encoder(space) if is_action else observation_encoder(space)
    if np.issubdtype(encoder.dtype, np.floating):
        wide = isinstance(space, spaces.Box) and space.is_bounded()
        low, high = (space.low.ravel(), space.high.ravel()) if wide else (-1, 1)
        return rng.uniform(low, high, (number, *encoder.shape)).astype(np.float32)
    sizes = discrete_sizes(space) if is_action else 256
    shape = (number, *(encoder.shape or (1,)))
    return rng.integers(0, sizes, shape).reshape(number, *encoder.shape).astype(encoder.dtype)


def small_agent(trajectories: Trajectories | None = None, **changes: Any) -> DecisionTransformer:
    """Return an agent with noise on every weight, so that actions depend on observations."""
    settings = {"context_length": K, "batch_size": 8, "seed": 3, "device": "cpu"}
    settings |= {"core": decision_transformer(width=16, layers=2, heads=2, dropout=0.0)}
    data = some_trajectories() if trajectories is None else trajectories
    return make_loud(DecisionTransformer(data, **(settings | changes)))


def make_loud(agent: DecisionTransformer, scale: float = 0.3) -> DecisionTransformer:
    """Add noise to every weight, since initial weights are small and would conceal differences."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in agent.policy.named_parameters():
            if not name.startswith("features"):
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return agent


def shown(data: Trajectories, steps: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the observations of `ReturnToGo` at these steps of the dataset."""
    episode = np.searchsorted(data.offsets, steps, side="right") - 1
    first = data.offsets[episode]
    time_step = steps - first
    previous = data.actions[np.maximum(steps - 1, 0)].copy()
    previous[time_step == 0] = 0
    previous = previous + getattr(data.action_space, "start", 0)
    observations = data.observations[steps]
    if data.observation_space.shape == (*observations.shape[2:], *observations.shape[1:2]):
        observations = np.moveaxis(observations, 1, -1)  # images in the layout of the environment
    return {
        "observation": observations,
        "return_to_go": data.return_to_go[steps][:, None],
        "previous_action": previous.reshape(len(steps), *(data.action_space.shape or ())),
        "time_step": time_step[:, None],
    }


def replay(agent: DecisionTransformer, data: Trajectories) -> Iterator[tuple[NDArray[np.int64], Any, Any]]:
    """Replay all episodes in parallel; yield steps, chosen actions and states of the unfinished episodes."""
    state = None
    for t in range(int(data.lengths.max())):
        steps = np.minimum(
            data.offsets[:-1] + t, data.offsets[1:] - 1
        )  # finished episodes repeat their last step
        chosen, state = agent.predict(shown(data, steps), state, deterministic=True)
        active = t < data.lengths
        yield steps[active], chosen[active], state.rows(torch.from_numpy(active))


def replayed(agent: DecisionTransformer, data: Trajectories) -> NDArray[Any]:
    """Return the actions (steps, ...) that the agent chooses step by step on the dataset."""
    actions = np.zeros((data.steps, *(data.action_space.shape or ())), data.action_space.dtype)
    for steps, chosen, _ in replay(agent, data):
        actions[steps] = chosen
    return actions


TINY = decision_transformer(width=16, layers=2, heads=2, dropout=0.0)


def small_pretraining(trajectories: Trajectories | None = None, **changes: Any) -> MaskedPretraining:
    """Return a pre-training on all kinds of tokens, with noise on every weight."""
    settings = {"context_length": K, "batch_size": 8, "seed": 3, "device": "cpu", "core": TINY}
    settings["predicted_tokens"] = KINDS
    data = some_trajectories() if trajectories is None else trajectories
    return make_loud(MaskedPretraining(data, **(settings | changes)))


def some_windows(pretraining: MaskedPretraining, share: float = 0.4, seed: int = 0) -> MaskedWindows:
    """Return a batch of windows with padding and masked tokens."""
    data = pretraining.trajectories
    assert data is not None
    batch = pretraining.windows(data).starting_at([0, 2, 9, 14, 20, 27])
    assert not batch.mask.all()
    return MaskedWindows(batch, Masking.draw(batch.mask, share, torch.Generator().manual_seed(seed)))
