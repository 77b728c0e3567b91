"""Training algorithms of a GTrXL: PPO here, distillation in `rlxf.agents.gtrxl.distillation`."""

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
    """Training algorithm: chooses the actions of a rollout, and updates the agent after it."""

    @abstractmethod
    def begin(self) -> None:
        """Start a rollout, and discard data of a previous one that had no update."""

    @abstractmethod
    def choose(self, obs: PyTorchObs, index: Index, own: Distribution) -> Tensor:
        """Sample the actions of one step of E environments.

        Args:
            obs: E observations.
            index: (E, 1), position and episode of the step.
            own: action distribution of the agent.
        """

    @abstractmethod
    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """Update the agent with the rollout in its buffer, and return the metrics to log."""


class Rewards(Lesson):
    """PPO: actions are sampled from the policy, which is trained with advantages."""

    def begin(self) -> None:
        """Do nothing: PPO stores no data outside of the rollout buffer."""

    def choose(self, obs: PyTorchObs, index: Index, own: Distribution) -> Tensor:
        """Sample from the distribution of the policy."""
        return own.get_actions()

    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """Train for ``n_epochs`` passes over the segments, fewer if ``target_kl`` is exceeded."""
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
        """Return the advantages (E, steps) of this process, normalised with those of all processes."""
        buffer, ranks = agent.rollout_buffer, agent.ranks
        advantages, weight = ranks.gathered(buffer.advantages), ranks.gathered(buffer.weight)
        return ranks.own(normalise(advantages, weight, epsilon))
