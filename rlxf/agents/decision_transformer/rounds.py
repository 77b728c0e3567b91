"""Playing and learning by turns."""

import math
from typing import TYPE_CHECKING

import numpy as np
from stable_baselines3.common.utils import safe_mean

from rlxf.agents.decision_transformer.collector import Collector
from rlxf.agents.decision_transformer.replay import Replay

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


class Rounds:
    """Rounds of steps in the environments, each with updates behind it.

    Args:
        agent: plays in its own environments, and learns.
        replay: what it learns from.
        steps: of the environments in a round, at least.
        updates: in a round.
        log_interval: rounds from one line of the log to the next.
    """

    def __init__(
        self, agent: "DecisionTransformer", replay: Replay, steps: int, updates: int, log_interval: int
    ):
        assert agent.env is not None
        self.agent, self.replay = agent, replay
        self.steps, self.updates, self.log_interval = steps, updates, log_interval
        self.collector = Collector(agent, agent.env)
        self._played = self._rounds = 0

    def play(self) -> None:
        """One step of every environment."""
        episodes, dones, infos = self.collector.step()
        self.replay.episodes.extend(episodes)
        self.agent._update_info_buffer(infos, dones)
        self.agent.num_timesteps += len(dones)
        self._played += len(dones)

    def learn_if_due(self) -> None:
        """The updates of a round, if its steps are played."""
        if self._played >= self.steps:
            self._played -= self.steps
            self._learn(self.updates)

    def learn_rest(self) -> None:
        """The updates of a last round that was cut short, as many as its steps are worth."""
        if self._played:
            self._learn(math.ceil(self.updates * self._played / self.steps))

    def _learn(self, updates: int) -> None:
        self._rounds += 1
        windows = self.agent.windows(self.replay.trajectories())
        rate = self.agent.lr_schedule(self.agent.progress_remaining)
        for _ in range(updates):
            self.agent.train(windows, rate)
        if self._rounds % self.log_interval == 0:
            self._log()

    def _log(self) -> None:
        played = self.agent.ep_info_buffer or ()
        if played:
            returns, lengths = zip(*((info["r"], info["l"]) for info in played), strict=True)
            self.agent.logger.record("rollout/ep_rew_mean", safe_mean(np.array(returns)))
            self.agent.logger.record("rollout/ep_len_mean", safe_mean(np.array(lengths)))
        self.agent.dump_logs()
