"""Schedule and agent type of rollout callbacks."""

import pytest
from stable_baselines3 import PPO

from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.agents.gtrxl.callbacks.base import RolloutCallback
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent

ROLLOUT = 4 * 2


def quick():
    return small_agent(scripts(shifted(2)), n_steps=4, batch_size=4, n_epochs=1)


class Looks(RolloutCallback):
    """Record the rollouts at which the callback runs."""

    def __init__(self, every: int):
        super().__init__(every)
        self.steps: list[int] = []

    def record(self) -> None:
        self.steps.append(self.num_timesteps // ROLLOUT)


@pytest.mark.parametrize(("every", "rollouts"), [(3, [1, 4, 7, 8]), (1, [*range(1, 9)]), (100, [1, 8])])
def test_callback_runs_at_first_every_nth_and_last_rollout(every, rollouts):
    callback = Looks(every)
    quick().learn(8 * ROLLOUT, callback)
    assert callback.steps == rollouts


def test_second_training_continues_count():
    callback, agent = Looks(3), quick()
    agent.learn(2 * ROLLOUT, callback)
    agent.learn(4 * ROLLOUT, callback, reset_num_timesteps=False)
    assert callback.steps == [1, 2, 4, 6]


@pytest.mark.parametrize("callback", [AttentionMapCallback, HistogramCallback, MemoryCallback])
def test_every_below_one_is_rejected(callback):
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        callback(every=0)


@pytest.mark.parametrize("callback", [AttentionMapCallback, HistogramCallback, MemoryCallback])
def test_other_agent_is_rejected_before_training(callback):
    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(TypeError, match=f"{callback.__name__} needs a GTrXLPPO agent, got PPO"):
        agent.learn(8, callback())
    assert agent.num_timesteps == 0
