"""Rounds of online fine-tuning: collection of episodes alternates with updates."""

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.utils import safe_mean

from rlxf.agents.decision_transformer.collector import Collector
from rlxf.agents.decision_transformer.replay import Replay

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


class Rounds:
    """Rounds of environment steps, each followed by updates.

    Args:
        agent: agent with its environments.
        replay: replay buffer that updates sample from.
        options: options of `learn_online` that affect the result. ``round_steps`` is the minimum number of
            environment steps in a round, ``round_updates`` the number of updates. Others are only stored.
        log_interval: number of rounds between log outputs.

    Attributes:
        finished: True if the updates after the last step are done.
    """

    def __init__(
        self, agent: "DecisionTransformer", replay: Replay, options: Mapping[str, Any], log_interval: int
    ):
        assert agent.env is not None
        self.agent, self.replay, self.options = agent, replay, dict(options)
        self.steps, self.updates = options["round_steps"], options["round_updates"]
        self.log_interval = log_interval
        self.collector = Collector(agent, agent.env)
        self._steps_taken = self._rounds = 0
        self.finished = False

    def state(self) -> dict[str, Any]:
        """Return the progress of the rounds and the episode statistics of the log, as JSON."""
        infos = [
            {name: float(each[name]) for name in ("r", "l", "t")} for each in self.agent.ep_info_buffer or ()
        ]
        return {
            "played": self._steps_taken,
            "rounds": self._rounds,
            "added": self.replay.added,
            "episodes": infos,
            "successes": [float(each) for each in self.agent.ep_success_buffer or ()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._steps_taken, self._rounds = state["played"], state["rounds"]
        size = self.agent._stats_window_size
        self.agent.ep_info_buffer = deque(state["episodes"], maxlen=size)
        self.agent.ep_success_buffer = deque(state["successes"], maxlen=size)

    def play(self) -> None:
        """Step every environment once and add the completed episodes to the replay buffer."""
        episodes, dones, infos = self.collector.step()
        self.replay.extend(episodes)
        self.agent._update_info_buffer(infos, dones)
        self.agent.num_timesteps += len(dones)
        self._steps_taken += len(dones)

    def learn_if_due(self) -> None:
        """Run the updates of a round if its environment steps are complete."""
        if self._steps_taken >= self.steps:
            self._steps_taken -= self.steps
            self._learn(self.updates)

    def learn_rest(self) -> None:
        """Run the updates of an incomplete last round, in proportion to its environment steps."""
        self.finished = True
        if self._steps_taken:
            self._learn(math.ceil(self.updates * self._steps_taken / self.steps))

    def _learn(self, updates: int) -> None:
        self._rounds += 1
        windows = self.agent.windows(self.replay.trajectories())
        rate = self.agent.lr_schedule(self.agent.progress_remaining)
        for _ in range(updates):
            self.agent.train(windows, rate)
        if self._rounds % self.log_interval == 0:
            self._log()

    def _log(self) -> None:
        infos = self.agent.ep_info_buffer or ()
        if infos:
            returns, lengths = zip(*((info["r"], info["l"]) for info in infos), strict=True)
            self.agent.logger.record("rollout/ep_rew_mean", safe_mean(np.array(returns)))
            self.agent.logger.record("rollout/ep_len_mean", safe_mean(np.array(lengths)))
        self.agent.dump_logs()
