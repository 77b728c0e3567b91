"""How a GTrXL remembers logged trajectories."""

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
    """What a policy does by itself where actions are a Box: as the environment gets them, within its bounds.

    Data hold such actions, too. A Gaussian whose mean is far outside would count more than its share.
    """

    policy: "GTrXLPolicy"
    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Actions (E, A) for outputs y (E, C)."""
        own: Tensor = self.policy.heads(y)[0].get_actions(deterministic=deterministic)
        space = self.policy.action_space
        assert isinstance(space, spaces.Box)
        low, high = (torch.as_tensor(bound).flatten().to(own) for bound in (space.low, space.high))
        return own.clamp(low, high)


@dataclass(eq=False)
class PolicyChoices:
    """What a policy does by itself where actions are Discrete, MultiDiscrete or MultiBinary."""

    policy: "GTrXLPolicy"
    actions: ChoiceActions

    @property
    def net(self) -> nn.Linear:
        """Gives the logits of all choices, one behind the other."""
        net = self.policy.action_net
        assert isinstance(net, nn.Linear)
        return of_two(net) if isinstance(self.policy.action_space, spaces.MultiBinary) else net


def of_two(net: nn.Linear) -> nn.Linear:
    """Logits x of bits as logits (0, x) of choices of two; without gradient."""
    pairs = nn.Linear(net.in_features, 2 * net.out_features).requires_grad_(False).to(net.weight)
    for given, of_pairs in ((net.weight, pairs.weight), (net.bias, pairs.bias)):
        of_pairs[0::2], of_pairs[1::2] = 0.0, given.detach()
    return pairs


def with_memory(policy: "GTrXLPolicy", memory: Memory) -> Remembering:
    """What a policy does by itself, and what is remembered."""
    actions = action_form(policy.action_space).to(policy.device)
    if isinstance(actions, BoxActions):
        return RememberingNumbers(PolicyNumbers(policy, actions), memory)
    return RememberingChoices(PolicyChoices(policy, actions), memory)


def remembered(agent: "GTrXLPPO", data: Trajectories, head: OutputHead, progress_bar: bool) -> Remembering:
    """All steps of the data as a memory to act by; see `GTrXLPPO.remember`.

    Raises:
        DatasetError: if the spaces of the data are not the agent's.
        ValueError: if head asks for more neighbours than there are.
        ImportError: if head asks for faiss, which is not installed.
    """
    check_rememberable(data, head, agent.observation_space, agent.action_space)
    agent.policy.set_training_mode(False)
    store = encoded(agent.policy, data, agent.get_vec_normalize_env(), progress_bar)
    remembering = partial(with_memory, agent.policy)
    return remembering(memory_with_gate(store, head, remembering, agent.seed))
