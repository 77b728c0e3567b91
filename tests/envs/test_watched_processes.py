"""A dead process of a ``SubprocVecEnv`` raises an error with its index, instead of a wait without end."""

import os
import signal
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from rlxf import GTrXLPPO, evaluate
from rlxf.envs import BrokenEnvironmentError
from rlxf.envs.workers.process_watch import watch_processes

pytestmark = pytest.mark.faults


class Dies(gymnasium.Wrapper):
    """Wrapper whose process ends at a given step."""

    def __init__(self, env, step, end):
        super().__init__(env)
        self.left, self.end = step, end

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            self.end()
        return self.env.step(action)


def leave():
    os._exit(3)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def made(step, end):
    env = gymnasium.make("CartPole-v1")
    return env if step is None else Dies(env, step, end)


@pytest.fixture
def envs():
    """Create three environments, of which the second dies; a timer limits the time of the test."""
    opened = []

    def make(step, end=leave):
        makes = [partial(made, at, end) for at in (None, step, None)]
        opened.append(SubprocVecEnv(makes, start_method="fork"))
        return opened[-1]

    hanging = threading.Timer(60, lambda: os._exit(1))
    hanging.start()
    yield make
    hanging.cancel()
    for env in opened:
        for process in env.processes:
            process.kill()


@pytest.mark.parametrize(("end", "code"), [(leave, 3), (kill, -9)], ids=["left", "killed"])
def test_training_raises_with_index_and_exit_code(envs, end, code):
    env = envs(20, end)
    agent = GTrXLPPO(
        "MlpGTrXLPolicy", env, memory_length=8, n_steps=16, segment_length=8, batch_size=24, device="cpu"
    )
    with pytest.raises(BrokenEnvironmentError, match=rf"environment 1 ended with exit code {code}"):
        agent.learn(200)
    env.close()


def test_evaluation_through_wrappers_raises(envs):
    agent = GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=2, memory_length=8, device="cpu")
    with pytest.raises(BrokenEnvironmentError, match="environment 1 ended with exit code"):
        evaluate(agent, VecNormalize(envs(3), training=False), 30)


def test_process_that_died_before_a_call_raises(envs):
    env = envs(None)
    watch_processes(env)
    watch_processes(env)
    env.processes[1].kill()
    env.processes[1].join()
    with pytest.raises(BrokenEnvironmentError, match="environment 1 ended with exit code"):
        env.reset()
    env.close()


def test_living_processes_reply_as_without_the_watch(envs):
    env, plain = envs(None), DummyVecEnv([partial(made, None, leave)] * 3)
    watch_processes(env)
    watch_processes(plain)
    for each in (env, plain):
        each.seed(1)
    np.testing.assert_array_equal(env.reset(), plain.reset())
    for one, other in zip(env.step([0, 1, 0])[:3], plain.step([0, 1, 0])[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert env.get_attr("spec")[0].id == "CartPole-v1"
    env.close()
