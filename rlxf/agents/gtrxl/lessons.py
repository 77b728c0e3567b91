"""What an agent learns from its rollouts: rewards, unless somebody teaches it."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.gtrxl.objective import normalise
from rlxf.agents.gtrxl.update import Update
from rlxf.attention import Index

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


class Lesson(ABC):
    """Chooses the actions of a rollout, and makes the updates behind it."""

    @abstractmethod
    def begin(self) -> None:
        """A rollout begins: what was noted of one that was not learned from is forgotten."""

    @abstractmethod
    def choose(self, obs: PyTorchObs, index: Index, own: Distribution) -> Tensor:
        """Actions of one step of E environments, sampled.

        Args:
            obs: E observations.
            index: (E, 1), where the step stands.
            own: what the agent would do.
        """

    @abstractmethod
    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """All updates of the rollout in the agent's buffer; gives what to log."""


class Rewards(Lesson):
    """PPO: the agent chooses for itself, and learns by its advantages."""

    def begin(self) -> None:
        """See `Lesson`: nothing is noted."""

    def choose(self, obs: PyTorchObs, index: Index, own: Distribution) -> Tensor:
        """See `Lesson`."""
        return own.get_actions()

    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """``n_epochs`` passes over the segments, fewer if the policy has moved far enough."""
        buffer, objective = agent.rollout_buffer, agent.objective()
        update = Update(agent.policy, objective, agent.max_grad_norm, agent.target_kl)
        epsilon = agent.advantage_epsilon * float(agent.policy.value_net.deviation)
        advantages = self._normalised(agent, epsilon) if agent.normalize_advantage else buffer.advantages
        segments = agent.batch_size // agent.segment_length
        for _ in range(agent.n_epochs):
            agent._n_updates += 1
            if not update.epoch(buffer.minibatches(segments, advantages, agent.order, agent.ranks)):
                break
        return update.means() | {"clip_range": objective.clip_range, "ent_coef": objective.ent_coef}

    @staticmethod
    def _normalised(agent: "GTrXLPPO", epsilon: float) -> Tensor:
        """Advantages (E, steps) of this process, in units of those of all."""
        buffer, ranks = agent.rollout_buffer, agent.ranks
        advantages, weight = ranks.gathered(buffer.advantages), ranks.gathered(buffer.weight)
        return ranks.own(normalise(advantages, weight, epsilon))
