"""Retrieval of logged actions for GTrXL policies."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions, action_form
from rlxf.agents.gtrxl.encoding import encoded
from rlxf.agents.memory import Memory
from rlxf.agents.remembering import (
    Remembering,
    RememberingChoices,
    RememberingNumbers,
    check_rememberable,
    memory_with_gate,
)
from rlxf.attention.heads.base import OutputHead
from rlxf.envs.trajectories import Trajectories

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


@dataclass(eq=False)
class PolicyNumbers:
    """Action head of a policy with Box actions, without retrieval; actions are clipped to the bounds.

    Logged actions are within the bounds, too. Without clipping, a Gaussian with a mean far outside would
    dominate the mixture.
    """

    policy: "GTrXLPolicy"
    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions (E, A) for outputs y (E, C)."""
        own: Tensor = self.policy.heads(y)[0].get_actions(deterministic=deterministic)
        space = self.policy.action_space
        assert isinstance(space, spaces.Box)
        low, high = (torch.as_tensor(bound).flatten().to(own) for bound in (space.low, space.high))
        return own.clamp(low, high)


@dataclass(eq=False)
class PolicyChoices:
    """Action head of a policy with Discrete, MultiDiscrete or MultiBinary actions, without retrieval."""

    policy: "GTrXLPolicy"
    actions: ChoiceActions

    @property
    def net(self) -> nn.Linear:
        """Linear layer whose output concatenates the logits of all choices."""
        net = self.policy.action_net
        assert isinstance(net, nn.Linear)
        return of_two(net) if isinstance(self.policy.action_space, spaces.MultiBinary) else net


def of_two(net: nn.Linear) -> nn.Linear:
    """Convert a layer for logits x of bits to one for logits (0, x) of binary choices; without gradient."""
    pairs = nn.Linear(net.in_features, 2 * net.out_features).requires_grad_(False).to(net.weight)
    for source, target in ((net.weight, pairs.weight), (net.bias, pairs.bias)):
        target[0::2], target[1::2] = 0.0, source.detach()
    return pairs


def with_memory(policy: "GTrXLPolicy", memory: Memory) -> Remembering:
    """Return the retrieval policy that combines a policy with a memory."""
    actions = action_form(policy.action_space).to(policy.device)
    if isinstance(actions, BoxActions):
        return RememberingNumbers(PolicyNumbers(policy, actions), memory)
    return RememberingChoices(PolicyChoices(policy, actions), memory)


def remembered(agent: "GTrXLPPO", data: Trajectories, head: OutputHead, progress_bar: bool) -> Remembering:
    """Build the retrieval policy from all steps of the data; see `GTrXLPPO.remember`.

    Raises:
        DatasetError: if the spaces of the data differ from the agent's.
        ValueError: if head needs more neighbours than there are steps.
        ImportError: if head needs faiss, which is not installed.
    """
    check_rememberable(data, head, agent.observation_space, agent.action_space)
    agent.policy.set_training_mode(False)
    store = encoded(agent.policy, data, agent.get_vec_normalize_env(), progress_bar)
    remembering = partial(with_memory, agent.policy)
    return remembering(memory_with_gate(store, head, remembering, agent.seed))
