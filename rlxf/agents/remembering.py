"""Acting with retrieval: mix an agent's own actions with logged actions of nearest neighbours."""

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
    """Action head of an agent with Box actions, without retrieval."""

    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions (E, A) for outputs y (E, C), in units of the environment."""


class OwnChoices(Protocol):
    """Action head of an agent with Discrete, MultiDiscrete or MultiBinary actions, without retrieval."""

    actions: ChoiceActions

    @property
    def net(self) -> nn.Linear:
        """Linear layer whose output concatenates the logits of all choices."""


@dataclass(frozen=True, eq=False)
class RememberingNumbers:
    """Retrieval policy for Box actions: a mixture of the agent's own actions and those of the neighbours.

    Actions are mixed in units of the environment. A sample is always one whole action vector: components of
    different actions are never combined.

    Args:
        own: action head of the agent.
        memory: datastore of logged actions.
    """

    own: OwnNumbers
    memory: Memory

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions for y (E, C): a sample of the mixture, or its mean if ``deterministic``.

        The mean combines the neighbours' actions with the deterministic action of the agent's head. For a
        deterministic head this is the mean of the mixture. For a Gaussian head its mode replaces its mean.
        """
        near, own = self.memory.near(y), self.own.choose(y, deterministic)
        return self.memory.mean(y, near, own) if deterministic else self.memory.sample(y, near, own)

    def error(self, y: Tensor, near: Neighbours, actions: Tensor) -> Tensor:
        """Return the squared error of the mean for actions scaled to [-1, 1]: (B, C), (B, A) -> (B,)."""
        with torch.no_grad():
            own = self.own.choose(y, deterministic=True)
        scaled = self.own.actions
        return squared_error(scaled(self.memory.mean(y, near, own)), scaled(actions))


@dataclass(frozen=True, eq=False)
class RememberingChoices:
    """Retrieval policy for discrete actions: mixes the distribution of each choice with the neighbours'.

    Args:
        own: action head of the agent.
        memory: datastore of logged actions.
    """

    own: OwnChoices
    memory: Memory

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions for y (E, C): a sample, or the most likely ones if ``deterministic``."""
        return self.own.actions.back(picked(self.logits(y), deterministic))

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return log probabilities for y (E, C): a tensor (E, A) for each choice."""
        return self._log_probs(y, self.memory.near(y))

    def error(self, y: Tensor, near: Neighbours, actions: Tensor) -> Tensor:
        """Return the cross-entropy of actions (B, ...), (B,)."""
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
    """Build a memory from a datastore and a head, and train the gate of the head.

    Args:
        store: outputs and actions of the logged steps.
        head: combines own and retrieved actions.
        remembering: builds the retrieval policy for a memory.
        seed: seed for the choice of pairs that the gate is trained on; None for 0.
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
    """Check that an agent with these spaces can use the data as its datastore, before reading them.

    Raises:
        DatasetError: if the spaces of the data differ from the agent's.
        ValueError: if head needs more neighbours than there are steps.
        ImportError: if head needs faiss, which is not installed.
    """
    check_index(head.index)
    pairs = {
        "observation": observation_mismatch(observation_space, data.observation_space),
        "action": action_mismatch(action_space, data.action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"the agent cannot remember {', '.join(data.dataset_ids)}: {kind} space: {mismatch}. Use "
                f"trajectories with the spaces of the agent's training environment"
            )
    if head.k > data.steps:
        raise ValueError(
            f"{type(head).__name__} needs k={head.k} neighbours, but the data have only {data.steps} steps: "
            f"lower k"
        )


def check_depth(depth: Depth) -> None:
    """Raise ValueError if the core has early exits, since stored outputs must come from one depth."""
    if isinstance(depth, ExitDepth):
        raise ValueError(
            f"remember needs outputs of one depth, but {depth} exits early; use a core without early exits"
        )


def check_remembered(memory: Memory, width: int, actions: BoxActions | ChoiceActions) -> None:
    """Raise ValueError unless keys have the width of the transformer and values are valid actions."""
    keys, values = memory.store.keys, memory.store.values
    if keys.shape[1] != width:
        raise ValueError(f"its memory has width {keys.shape[1]}, the transformer has width {width}")
    if not actions.holds(values):
        raise ValueError(
            f"its memory holds values of shape {tuple(values.shape)} and dtype {values.dtype}, which are no "
            f"actions of the agent"
        )


def check_forgotten(memory: Memory | None) -> None:
    """Raise ValueError if there is a memory, because training would make its keys stale."""
    if memory is not None:
        raise ValueError(
            "an agent that remembers trajectories cannot be trained, because its stored outputs would become "
            "stale. Call forget() before training and remember(...) again afterwards"
        )


def check_teaches_by_itself(memory: Memory | None) -> None:
    """Raise ValueError if a teacher has a memory, because distillation only uses its own head."""
    if memory is not None:
        raise ValueError(
            "the teacher remembers trajectories, but a student learns only from the teacher's own head: call "
            "the teacher's forget() first"
        )
