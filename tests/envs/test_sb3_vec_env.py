"""Tests of paused environments, and of dead processes of a ``SubprocVecEnv``."""

import os
import signal
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from rlxf import GTrXLPPO, evaluate
from rlxf.envs import BrokenEnvironmentError, make_vec_env
from rlxf.envs.sb3_vec_env import make_sync_vec_env, pause_envs, resume_envs_at_exit, watch_processes
from tests.evaluation.worlds import Countdown, Idle


class Stepped(gymnasium.Wrapper):
    """Wrapper that counts its steps."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return self.env.step(action)


def steps_of(env):
    return env.get_attr("steps")


def test_environments_are_closed_if_a_later_one_cannot_be_created(monkeypatch):
    closed = []
    monkeypatch.setattr(Countdown, "close", lambda self: closed.append(self))
    with pytest.raises(ZeroDivisionError):
        make_sync_vec_env([Countdown, Countdown, lambda: 1 / 0])
    assert len(closed) == 2


@pytest.fixture
def env():
    made = make_vec_env("CartPole-v1", 3, seed=0, wrapper_class=Stepped)
    yield made
    made.close()


def test_paused_environment_is_not_stepped(env):
    before = env.reset()
    pause_envs(env, [1])
    for _ in range(5):
        observations, rewards, dones, _ = env.step(np.ones(3, int))
        assert np.array_equal(observations[1], before[1])
        assert (rewards[1], dones[1]) == (0.0, False)
    assert steps_of(env) == [5, 0, 5]
    assert not np.array_equal(observations[0], before[0])


def test_pausing_does_not_change_the_other_environments(env):
    reference = make_vec_env("CartPole-v1", 3, seed=0)
    assert np.array_equal(env.reset(), reference.reset())
    pause_envs(env, [0])
    for _ in range(30):  # episodes end meanwhile
        actual, expected = env.step(np.ones(3, int)), reference.step(np.ones(3, int))
        for one, other in zip(actual[:3], expected[:3], strict=True):
            assert np.array_equal(one[1:], other[1:])
    reference.close()


def test_reset_resumes_all_environments(env):
    env.reset()
    pause_envs(env, [0, 2])
    env.reset()
    env.step(np.zeros(3, int))
    assert steps_of(env) == [1, 1, 1]


def test_environments_without_the_wrapper_are_stepped():
    env = DummyVecEnv([lambda: Stepped(gymnasium.make("CartPole-v1"))])
    env.reset()
    pause_envs(env, [0])
    env.step(np.zeros(1, int))
    assert steps_of(env) == [1]


def test_evaluation_pauses_environments_with_enough_episodes(env):
    report = evaluate(Idle(), env, 7)
    assert sum(steps_of(env)) == report.lengths.sum()


def test_all_environments_are_resumed_after_an_evaluation(env):
    """A training in the same environments can continue without a reset."""
    evaluate(Idle(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_all_environments_are_resumed_after_an_interrupted_evaluation(env):
    class Interrupting(Idle):
        def predict(self, *args, **kwargs):
            if len(set(steps_of(env))) > 1:  # an environment is paused
                raise KeyboardInterrupt
            return super().predict(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        evaluate(Interrupting(), env, 7)
    before = steps_of(env)
    env.step(np.ones(3, int))
    assert steps_of(env) == [steps + 1 for steps in before]


def test_original_error_is_raised_even_if_resuming_fails(env, monkeypatch):
    def fails(*arguments):
        raise ValueError("no reply")

    monkeypatch.setattr(env, "env_method", fails)
    with pytest.raises(KeyboardInterrupt), resume_envs_at_exit(env):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no reply"), resume_envs_at_exit(env):
        pass


def test_single_environment_is_resumed_after_an_evaluation():
    env = Stepped(Countdown(3))
    evaluate(Idle(), env, 2)
    env.reset()
    env.step(env.action_space.sample())
    assert env.steps == 7


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


@pytest.mark.first_cases(1)
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
