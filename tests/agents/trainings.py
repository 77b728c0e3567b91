"""Helpers of tests that stop, interrupt and compare trainings."""

import torch
from stable_baselines3.common.callbacks import BaseCallback


class StopAt(BaseCallback):
    """Callback that stops the training at a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def _on_step(self):
        return self.num_timesteps < self.step


def save_third_update(file, local, _):
    """Save the agent after its third update, and end the training."""
    agent = local["self"]
    if agent.num_timesteps == 3:
        agent.save(file)
    return agent.num_timesteps < 3


class InterruptedTrainingError(Exception):
    """Simulated interruption of a training run."""


def interrupt(agent, update):
    """Make the agent raise an error in place of an update."""
    train = agent.train

    def interrupted_train(windows, rate):
        if agent._n_updates == update:
            raise InterruptedTrainingError
        train(windows, rate)

    agent.train = interrupted_train
    return agent


def assert_equal_weights(one, other):
    """Assert that the weights of two agents are equal up to rounding."""
    for x, y in zip(one.policy.state_dict().values(), other.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
