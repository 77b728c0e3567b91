"""Agents with random settings: each is trained, or rejected before any environment is created."""

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from rich.progress import track

from rlxf import BehaviorCloning, DecisionTransformer, GTrXLPPO, ReturnConditionedMLP
from rlxf.agents.offline.objectives import MaximumEntropy, QRegularized
from rlxf.attention import XL, RoPE, TransformerSpec, Window
from rlxf.attention.registry import OPTIONAL, TECHNIQUES
from rlxf.data import Trajectories, action_encoder, return_to_go

NUMBERS = (-1, 0, 1, 2, 3, 4, 8, 16, 0.5)
"""Numbers, valid or not, that occasionally replace a numeric option of a technique."""
SIZES: dict[str, tuple[Any, ...]] = {
    "width": (8, 16, 24),
    "layers": (1, 2, 3),
    "heads": (1, 2, 2, 4),
    "norm": ("pre", "post"),
    "activation": ("relu", "gelu"),
    "dropout": (*[0.0] * 9, 0.1),
}
ONLINE: dict[str, tuple[Any, ...]] = {
    "n_envs": (1, 2, 3),
    "n_steps": (8, 8, 16, 12),
    "segment_length": (2, 4, 4, 8),
    "batch_size": (8, 8, 16, 3),
    "n_epochs": (1, 2),
    "gamma": (0.9, 0.95, 0.99, 0.99, 0.999, 1.0, 1.5),
    "learning_rate": (*[1e-3] * 9, -1.0),
    "previous_action": (True, False),
    "recompute_memory": (False, True),
    "persist_memory_across_episodes": (False, True),
    "reconstruction_coef": (0.0, 0.1),
}
OFFLINE: dict[str, tuple[Any, ...]] = {
    "context_length": (1, 2, 5, 9),
    "batch_size": (1, 4, 8),
    "learning_rate": (*[1e-3] * 9, -1.0),
    "warmup_updates": (*[0, 1, 2] * 3, -1),
    "return_scale": (*[1.0, 10.0, 1000.0] * 3, 0.0),
}
PERCEPTRONS: dict[str, tuple[Any, ...]] = {
    "context_length": (1, 1, 2, 5, 0),
    "hidden_sizes": (*[(8,), (8, 4), ()] * 3, (0,)),
    "dropout": (*[0.0, 0.1] * 4, 1.0),
    "batch_size": (1, 4, 8),
    "learning_rate": (*[1e-3] * 9, -1.0),
    "objective": (*[None, MaximumEntropy()] * 4, QRegularized()),
    "warmup_updates": (None, 0, 1, 2),
}
ACTIONS = (spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,), np.float32))
OBSERVATIONS = (
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(4)}),
)


@dataclass
class SettingsOutcomes:
    """Outcomes of agents with random settings.

    Args:
        cases: number of agents.
        trained: agents that completed two updates.
        refused: agents that were rejected with a message before any environment was created.
        wrong: all other agents.
    """

    cases: int = 0
    trained: int = 0
    refused: int = 0
    wrong: int = 0

    def missed(self) -> list[str]:
        """Return the violated expectations."""
        return [f"{self.wrong} of {self.cases} broke"] * (self.wrong > 0)


class Counted(gymnasium.Env):
    """Shows and pays rng, in episodes of five steps; counts how many of it were made."""

    made = 0

    def __init__(self, observation: int, action: int):
        Counted.made += 1
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        super().reset(seed=seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make one of five steps."""
        self.time += 1
        return self.observation_space.sample(), self.np_random.normal(), self.time == 5, False, {}


gymnasium.register("rlxf-bench/Counted-v0", lambda **options: Counted(**options))


def random_settings(name: str, cases: int, seed: int) -> SettingsOutcomes:
    """Train ``cases`` agents of one kind with random settings."""
    rng, outcomes = random.Random(seed), SettingsOutcomes()
    for _ in track(range(cases), f"settings of {name}"):
        outcomes.cases += 1
        outcome = outcome_of(partial_of(name, rng))
        setattr(outcomes, outcome, getattr(outcomes, outcome) + 1)
    return outcomes


def outcome_of(training: Callable[[], Any]) -> str:
    """Run a training and classify its outcome."""
    before = Counted.made
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training()
        return "trained"
    except (ValueError, TypeError) as error:
        if Counted.made == before and str(error):
            return "refused"
        print(f"after an environment was made: {error!r}", file=sys.stderr)
    except Exception as error:
        print(f"{error!r}", file=sys.stderr)
    return "wrong"


def partial_of(name: str, rng: random.Random) -> Callable[[], Any]:
    """Return a function that trains an agent with random settings."""
    state = rng.getrandbits(32)
    return lambda: TRAININGS[name](random.Random(state))


def online(rng: random.Random) -> None:
    """Make two updates of a GTrXLPPO."""
    settings = drawn(ONLINE, rng)
    kind = {"observation": rng.randrange(2), "action": rng.randrange(3)}
    policy = "MultiInputGTrXLPolicy" if kind["observation"] else "MlpGTrXLPolicy"
    core = spec(rng, memory=XL(8), pattern=Window(9), position=RoPE())
    gymnasium.registry["rlxf-bench/Counted-v0"].kwargs = kind
    agent = GTrXLPPO(policy, "rlxf-bench/Counted-v0", core=core, device="cpu", seed=0, **settings)
    train(agent, 2 * settings["n_steps"] * settings["n_envs"])


def offline(rng: random.Random) -> None:
    """Make two updates of a Decision Transformer."""
    data = trajectories(ACTIONS[rng.randrange(3)])
    agent = DecisionTransformer(data, core=spec(rng), device="cpu", seed=0, **drawn(OFFLINE, rng))
    train(agent, 2)


def cloning(rng: random.Random) -> None:
    """Make two updates of behavior cloning."""
    data = trajectories(ACTIONS[rng.randrange(3)])
    train(BehaviorCloning(data, device="cpu", seed=0, **drawn(PERCEPTRONS, rng)), 2)


def conditioned_cloning(rng: random.Random) -> None:
    """Make two updates of a return-conditioned perceptron."""
    data, settings = trajectories(ACTIONS[rng.randrange(3)]), drawn(PERCEPTRONS, rng)
    scale = rng.choice(OFFLINE["return_scale"])
    train(ReturnConditionedMLP(data, return_scale=scale, device="cpu", seed=0, **settings), 2)


TRAININGS: dict[str, Callable[[random.Random], None]] = {
    "GTrXLPPO": online,
    "DecisionTransformer": offline,
    "BehaviorCloning": cloning,
    "ReturnConditionedMLP": conditioned_cloning,
}


def spec(rng: random.Random, **others: Any) -> TransformerSpec:
    """Return a transformer with random techniques on some axes, and ``others`` on the remaining ones.

    A recurrence replaces attention in all layers but one, or in all; then others may be left out.
    """
    axes = rng.sample(list(TECHNIQUES), rng.choice((1, 2, 2, len(TECHNIQUES))))
    choices = {axis: technique(axis, rng) for axis in axes}
    if choices.get("recurrence") is not None:
        others, layers = rng.choice(((others, (0,)), (others, ()), ({}, ())))
        choices |= {"attention_layers": layers}
    return TransformerSpec(**others | drawn(SIZES, rng) | choices)


def technique(axis: str, rng: random.Random) -> Any:
    """Return a random technique of an axis, sometimes with a modified number."""
    kinds = [*TECHNIQUES[axis].values(), *([None] if axis in OPTIONAL else [])]
    kind = rng.choice(kinds)
    if kind is None:
        return None
    made = kind()
    numbers = [field.name for field in fields(made) if type(getattr(made, field.name)) in (int, float)]
    if not numbers or rng.random() < 0.5:
        return made
    return replace(made, **{rng.choice(numbers): rng.choice(NUMBERS)})


def drawn(options: dict[str, tuple[Any, ...]], rng: random.Random) -> dict[str, Any]:
    """Choose a random value of each option."""
    return {name: rng.choice(values) for name, values in options.items()}


def train(agent: Any, steps: int) -> None:
    """Make two updates.

    Raises:
        RuntimeError: if settings are rejected only during training, or the result is invalid.
    """
    try:
        agent.learn(steps)
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"rejected during training: {error}") from error
    check(agent)


def check(agent: Any) -> None:
    """Raise RuntimeError unless two updates were made and all weights are finite."""
    finite = all(torch.isfinite(weights).all() for weights in agent.policy.parameters())
    if agent._n_updates < 2 or not finite:
        raise RuntimeError(f"{agent._n_updates} updates, {'' if finite else 'not '}all weights finite")


def trajectories(actions: spaces.Space[Any]) -> Trajectories:
    """Return random trajectories with episodes of 1, 6 and 3 steps."""
    actions.seed(0)
    rng, offsets = np.random.default_rng(0), np.array([0, 1, 7, 10])
    rewards = rng.normal(size=10).astype(np.float32)
    return Trajectories(
        observations=rng.normal(size=(10, 3)).astype(np.float32),
        actions=action_encoder(actions)(np.stack([actions.sample() for _ in range(10)])),
        rewards=rewards,
        return_to_go=np.concatenate([*map(return_to_go, np.split(rewards, offsets[1:-1]))]).astype(
            np.float32
        ),
        offsets=offsets,
        terminated=np.ones(3, np.bool_),
        truncated=np.zeros(3, np.bool_),
        observation_mean=np.zeros(3, np.float32),
        observation_std=np.ones(3, np.float32),
        observation_space=OBSERVATIONS[0],
        action_space=actions,
    )
