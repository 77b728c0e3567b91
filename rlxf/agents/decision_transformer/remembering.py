"""kNN datastore of logged trajectories for a Decision Transformer."""

from functools import partial
from typing import TYPE_CHECKING

from rlxf.agents.decision_transformer.encoding import encoded
from rlxf.agents.decision_transformer.heads import Categorical, Gaussian, Head, Point
from rlxf.agents.memory import Memory
from rlxf.agents.remembering import (
    Remembering,
    RememberingChoices,
    RememberingNumbers,
    check_rememberable,
    memory_with_gate,
)
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore
from rlxf.envs.trajectories import Trajectories

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


def with_memory(head: Head, memory: Memory) -> Remembering:
    """Return a head that mixes the given head with actions retrieved from the datastore."""
    if isinstance(head, Categorical):
        return RememberingChoices(head, memory)
    assert isinstance(head, Point | Gaussian)
    return RememberingNumbers(head, memory)


def remembered(
    agent: "DecisionTransformer", data: Trajectories, head: OutputHead, progress_bar: bool
) -> Memory:
    """Encode all steps of the data as a datastore; see `DecisionTransformer.remember`.

    Raises:
        DatasetError: if the spaces differ from those of the agent's dataset.
        ValueError: if the head needs more neighbours than there are steps.
        ImportError: if the head needs faiss, which is not installed.
    """
    check_rememberable(data, head, agent.facts.observation_space, agent.facts.action_space)
    store = encoded(agent.policy.eval(), agent.windows(data), agent.device, progress_bar)
    return memory_of(agent, store, head)


def memory_of(agent: "DecisionTransformer", store: Datastore, head: OutputHead) -> Memory:
    """Combine a datastore with this head; train the gate of the head if it has one."""
    return memory_with_gate(store, head, partial(with_memory, agent.policy.loss.head), agent.seed)
