"""How agents act by logged actions: what they would do, mixed with what was done where they thought alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions, picked
from rlxf.agents.losses import cross_entropies, squared_error
from rlxf.agents.memory import Memory
from rlxf.attention.depth.base import Depth
from rlxf.attention.depth.exits import ExitDepth
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore, Neighbours
from rlxf.attention.with_faiss import check_index
from rlxf.envs.trajectories import DatasetError, Trajectories
from rlxf.envs.trajectories.matching import action_mismatch, observation_mismatch


class OwnNumbers(Protocol):
    """What an agent does by itself where actions are a Box."""

    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions (E, A) for outputs y (E, C), in units of the environment."""


class OwnChoices(Protocol):
    """What an agent does by itself where actions are Discrete, MultiDiscrete or MultiBinary."""

    actions: ChoiceActions

    @property
    def net(self) -> nn.Linear:
        """Gives the logits of all choices, one behind the other."""


@dataclass(frozen=True, eq=False)
class RememberingNumbers:
    """Box actions: the agent's own, and those that were taken where it thought alike.

    They are mixed in units of the environment, as a whole: no number of one is joined with one of another.

    Args:
        own: the agent's head.
        memory: what was taken.
    """

    own: OwnNumbers
    memory: Memory

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions for y (E, C): a mean, or a sample of the mixture.

        The mean is that of the neighbours' actions and of what the agent's head does by itself when it does
        not sample. With a head that always acts alike that is the mean of the mixture; with a Gaussian, its
        likeliest action stands for its mean.
        """
        near, own = self.memory.near(y), self.own.choose(y, deterministic)
        return self.memory.mean(y, near, own) if deterministic else self.memory.sample(y, near, own)

    def error(self, y: Tensor, near: Neighbours, actions: Tensor) -> Tensor:
        """Squared error of the mean, between actions scaled to [-1, 1]: (B, C), (B, A) -> (B,)."""
        with torch.no_grad():
            own = self.own.choose(y, deterministic=True)
        scaled = self.own.actions
        return squared_error(scaled(self.memory.mean(y, near, own)), scaled(actions))


@dataclass(frozen=True, eq=False)
class RememberingChoices:
    """Actions that are choices, or bits: for each of them a distribution with its share of the memory.

    Args:
        own: the agent's head.
        memory: what was taken.
    """

    own: OwnChoices
    memory: Memory

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions for y (E, C): the most likely ones, or a sample."""
        return self.own.actions.back(picked(self.logits(y), deterministic))

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities for y (E, C): one (E, A) for each choice."""
        return self._log_probs(y, self.memory.near(y))

    def error(self, y: Tensor, near: Neighbours, actions: Tensor) -> Tensor:
        """Cross-entropy of actions (B, ...) -> (B,)."""
        return cross_entropies(self._log_probs(y, near), self.own.actions.choices(actions))

    def _log_probs(self, y: Tensor, near: Neighbours) -> tuple[Tensor, ...]:
        net, sizes = self.own.net, self.own.actions.sizes
        layers = zip(net.weight.detach().split(sizes), net.bias.detach().split(sizes), strict=True)
        taken = self.own.actions.choices(near.values).unbind(-1)
        return tuple(
            self.memory.reader.log_prob(y, near._replace(values=values), weight, bias)
            for values, (weight, bias) in zip(taken, layers, strict=True)
        )


Remembering: TypeAlias = RememberingNumbers | RememberingChoices


def memory_with_gate(
    store: Datastore, head: OutputHead, remembering: Callable[[Memory], Remembering], seed: int | None
) -> Memory:
    """Steps that are stored as a memory that is read by this head, its gate learned.

    Args:
        store: the steps.
        head: how they are read.
        remembering: what acts by a memory.
        seed: of the order in which the gate is learned.
    """
    memory = Memory(store, head)
    memory.learn_gate(remembering(memory).error, torch.Generator().manual_seed(seed or 0))
    return memory


def check_rememberable(
    data: Trajectories,
    head: OutputHead,
    observation_space: spaces.Space,
    action_space: spaces.Space,
) -> None:
    """Refuse what an agent of these spaces cannot remember, before anything is read.

    Raises:
        DatasetError: if the spaces of the data are others.
        ValueError: if head asks for more neighbours than there are steps.
        ImportError: if head asks for faiss, which is not installed.
    """
    check_index(head.index)
    pairs = {
        "observation": observation_mismatch(observation_space, data.observation_space),
        "action": action_mismatch(action_space, data.action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"the agent cannot remember {', '.join(data.dataset_ids)}: {kind} space: {mismatch}. Give it "
                f"trajectories of the environment that it learned to act in"
            )
    if head.k > data.steps:
        raise ValueError(
            f"{type(head).__name__} k={head.k} neighbours, but the data have {data.steps} steps: lower k"
        )


def check_depth(depth: Depth) -> None:
    """Raise ValueError if tokens may leave early: their outputs would be of many depths."""
    if isinstance(depth, ExitDepth):
        raise ValueError(f"{depth} leaves early, and what is remembered is of one depth")


def check_remembered(memory: Memory, width: int, actions: BoxActions | ChoiceActions) -> None:
    """Raise ValueError unless the keys are as wide as a transformer and the values are such actions."""
    keys, values = memory.store.keys, memory.store.values
    if keys.shape[1] != width:
        raise ValueError(f"its memory is of width {keys.shape[1]}, the transformer of {width}")
    if not actions.holds(values):
        raise ValueError(f"its memory holds {tuple(values.shape)} {values.dtype}, which are not its actions")


def check_forgotten(memory: Memory | None) -> None:
    """Raise ValueError if there is a memory: its agent must not change."""
    if memory is not None:
        raise ValueError(
            "an agent that remembers cannot learn: what it stored would be stale. Call forget() first, "
            "and remember(...) again behind"
        )


def check_teaches_by_itself(memory: Memory | None) -> None:
    """Raise ValueError if there is a memory: its agent would teach without it, and acts by it."""
    if memory is not None:
        raise ValueError(
            "a teacher that remembers acts otherwise than it teaches, since a student learns from its head "
            "alone: call its forget() first"
        )
