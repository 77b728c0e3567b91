"""How a Decision Transformer remembers logged trajectories: what it stores, and how it acts by that."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.actions import BoxActions, ChoiceActions
from rlxf.agents.decision_transformer.encoding import encoded
from rlxf.agents.decision_transformer.heads import Categorical, Gaussian, Head, Point, picked
from rlxf.agents.decision_transformer.objective import cross_entropies, squared_error
from rlxf.agents.memory import Memory
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore, Neighbours
from rlxf.attention.heads.search import check_index
from rlxf.envs.trajectories import DatasetError, Trajectories
from rlxf.envs.trajectories.matching import action_mismatch, observation_mismatch

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


@dataclass(frozen=True, eq=False)
class RememberingNumbers:
    """Box actions: the agent's own, and those that were taken where it thought alike.

    They are mixed in units of the environment, as a whole: no number of one is joined with one of another.

    Args:
        own: the agent's head.
        memory: what was taken.
    """

    own: Point | Gaussian
    memory: Memory

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions for y (E, C): a mean, or a sample of the mixture.

        The mean is that of the neighbours' actions and of what the agent's head does by itself when it does
        not sample. With a `Point` that is the mean of the mixture; with a `Gaussian`, its likeliest action
        stands for its mean.
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
    """Discrete and MultiDiscrete actions: for each choice a distribution with its share of the memory.

    Args:
        own: the agent's head.
        memory: what was taken.
    """

    own: Categorical
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


def with_memory(head: Head, memory: Memory) -> Remembering:
    """A head that acts by what is remembered, too."""
    if isinstance(head, Categorical):
        return RememberingChoices(head, memory)
    assert isinstance(head, Point | Gaussian)
    return RememberingNumbers(head, memory)


def remembered(
    agent: "DecisionTransformer", data: Trajectories, head: OutputHead, progress_bar: bool
) -> Memory:
    """All steps of the data as a memory; see `DecisionTransformer.remember`.

    Raises:
        DatasetError: if its spaces are not those of the agent's data.
        ValueError: if head asks for more neighbours than there are.
        ImportError: if head asks for faiss, which is not installed.
    """
    check_index(head.index)
    _check_spaces(agent, data)
    if head.k > data.steps:
        raise ValueError(
            f"{type(head).__name__} k={head.k} neighbours, but the data have {data.steps} steps: lower k"
        )
    return memory_of(
        agent, encoded(agent.policy.eval(), agent.windows(data), agent.device, progress_bar), head
    )


def memory_of(agent: "DecisionTransformer", store: Datastore, head: OutputHead) -> Memory:
    """Steps that are stored as a memory that is read by this head, its gate learned."""
    memory = Memory(store, head)
    generator = torch.Generator().manual_seed(agent.seed or 0)
    memory.learn_gate(with_memory(agent.policy.loss.head, memory).error, generator)
    return memory


def _check_spaces(agent: "DecisionTransformer", data: Trajectories) -> None:
    pairs = {
        "observation": observation_mismatch(agent.facts.observation_space, data.observation_space),
        "action": action_mismatch(agent.facts.action_space, data.action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"the agent cannot remember {', '.join(data.dataset_ids)}: {kind} space: {mismatch}. Give it "
                f"trajectories of the environment that it learned to act in"
            )


def check_remembered(memory: Memory, width: int, actions: BoxActions | ChoiceActions) -> None:
    """Raise ValueError unless the keys are as wide as a transformer and the values are such actions."""
    keys, values = memory.store.keys, memory.store.values
    if keys.shape[1] != width:
        raise ValueError(f"its memory is of width {keys.shape[1]}, the transformer of {width}")
    if not actions.holds(values):
        raise ValueError(f"its memory holds {tuple(values.shape)} {values.dtype}, which are not its actions")
