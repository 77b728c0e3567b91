"""How a Decision Transformer remembers logged trajectories."""

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
    check_rememberable(data, head, agent.facts.observation_space, agent.facts.action_space)
    store = encoded(agent.policy.eval(), agent.windows(data), agent.device, progress_bar)
    return memory_of(agent, store, head)


def memory_of(agent: "DecisionTransformer", store: Datastore, head: OutputHead) -> Memory:
    """Steps that are stored as a memory that is read by this head, its gate learned."""
    return memory_with_gate(store, head, partial(with_memory, agent.policy.loss.head), agent.seed)
