"""Truncated episodes are bootstrapped with the value of the last observation, given their memory."""

import warnings

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from rlxf.attention import State, TokenIndex
from rlxf.envs.spaces import row_of
from rlxf.envs.tensor_vec_env import as_vec_env
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    DICT,
    MIXED,
    TRUNCATED,
    VECTOR,
    Scripted,
    last_outputs,
    next_step_scripts,
    rollouts,
    scripts,
    shifted,
    small_agent,
)

ENVS, STEPS, MEMORY = 3, 16, 8


class Recorder(VecEnvWrapper):
    """Record rewards and infos of the last steps."""

    def __init__(self, venv):
        super().__init__(venv)
        self.steps = []

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        step = self.venv.step_wait()
        self.steps.append((step[1].copy(), step[3]))
        return step


def slow_value(agent, buffer, env, t, last):
    """Compute V(last) after step t of an environment by a one-token segment over the stored memory."""
    place = MEMORY + t + 1
    hidden = buffer.hidden[:, [env], place - MEMORY : place]
    position, episode = (
        x[[env], place - MEMORY : place] for x in (buffer.index.position, buffer.index.episode)
    )
    state = State(hidden, TokenIndex(position, episode))
    obs, _ = agent.policy.obs_to_tensor(last)
    previous = agent.policy.encode_actions(buffer.actions[[env], t])
    index = TokenIndex(position[:, -1:] + 1, episode[:, -1:])
    with torch.no_grad():
        return agent.policy.heads(last_outputs(agent.policy, obs, previous, index, state))[1].item()


class ObjectsAtTheEnd(VecEnvWrapper):
    """Last observations of episodes are arrays of Python objects."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        *results, infos = self.venv.step_wait()
        ended = [info for info in infos if "terminal_observation" in info]
        for info in ended:
            info["terminal_observation"] = info["terminal_observation"].astype(object)
        return *results, infos


def test_last_observations_may_be_objects():
    rewards = []
    for wrap in (ObjectsAtTheEnd, Recorder):
        agent = small_agent(wrap(scripts(shifted(ENVS))), seed=0)
        agent.learn(2 * ENVS * agent.n_steps)
        rewards.append(agent.rollout_buffer.rewards)
    assert torch.equal(*rewards)


class ReplacedAtTheEnd(VecEnvWrapper):
    """Last observations are the first ones, as in processes of environments that reuse their array."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, *results, infos = self.venv.step_wait()
        for i, info in enumerate(infos):
            if "terminal_observation" in info:
                info["terminal_observation"] = row_of(observations, i)
        return observations, *results, infos


REUSED = "last observations of 3 truncated episodes equal the first ones.*return a copy"


@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["Box", "Dict"])
def test_environments_that_reuse_their_array(space):
    policy = "MlpGTrXLPolicy" if space is VECTOR else "MultiInputGTrXLPolicy"
    agent = small_agent(ReplacedAtTheEnd(scripts(shifted(ENVS), space)), policy, learning_rate=1e-3)
    with pytest.warns(UserWarning, match=REUSED) as warned:
        agent.learn(4 * ENVS * STEPS)
    assert len([each for each in warned if "return a copy" in str(each.message)]) == 1


class Still(Scripted):
    """Environment whose observations are all equal."""

    def reset(self, **options):
        return np.zeros(3, np.float32), super().reset(**options)[1]

    def step(self, action):
        return np.zeros(3, np.float32), *super().step(action)[1:]


@pytest.mark.parametrize(
    "env",
    [
        lambda: scripts(shifted(ENVS)),
        lambda: as_vec_env(next_step_scripts(shifted(ENVS))),
        lambda: DummyVecEnv([lambda: Still([TRUNCATED] * 5)] * ENVS),
    ],
    ids=["own arrays", "NEXT_STEP", "equal observations"],
)
def test_other_environments_give_no_warning(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(env(), learning_rate=1e-3).learn(4 * ENVS * STEPS)


CASES = {
    "vector": lambda: scripts(shifted(ENVS)),
    "Dict and MultiDiscrete": lambda: scripts(shifted(ENVS), DICT, ACTIONS["MultiDiscrete"]),
    "reset steps": lambda: as_vec_env(next_step_scripts(shifted(ENVS))),
}


@pytest.mark.parametrize("case", CASES)
def test_truncated_step_is_bootstrapped_with_last_observation(case):
    env = Recorder(CASES[case]())
    policy = "MultiInputGTrXLPolicy" if "Dict" in case else "MlpGTrXLPolicy"
    agent = small_agent(env, policy, gamma=0.9)
    for buffer in rollouts(agent, 3):
        cuts = []
        for t, (rewards, infos) in enumerate(env.steps):
            for e, info in enumerate(infos):
                value = 0.0
                if info.get("TimeLimit.truncated"):
                    value = slow_value(agent, buffer, e, t, info["terminal_observation"])
                    cuts.append(abs(value))
                assert buffer.rewards[e, t].item() == pytest.approx(rewards[e] + 0.9 * value, abs=1e-4)
        assert len(cuts) > 2
        assert max(cuts) > 0.05
        env.steps.clear()


def counted(agent):
    """Record the batch sizes of the transformer's steps."""
    sizes, step = [], agent.policy.transformer.step

    def recorded(x, index, cache):
        sizes.append(len(x))
        return step(x, index, cache)

    agent.policy.transformer.step = recorded
    return sizes


@pytest.mark.parametrize("together", [True, False])
def test_truncated_environments_are_evaluated_in_one_batch(together):
    script = [0, 0, TRUNCATED, 0]
    agent = small_agent(scripts([script] * ENVS if together else shifted(ENVS, script)))
    sizes = counted(agent)
    next(iter(rollouts(agent, 1)))
    cuts = [ENVS] * (STEPS // 4) if together else [1] * (3 * STEPS // 4)
    assert sorted(sizes) == sorted([ENVS] * (STEPS + 1) + cuts)


def test_no_extra_pass_without_truncation():
    agent = small_agent(scripts([[end if end != TRUNCATED else 1 for end in MIXED]] * ENVS))
    sizes = counted(agent)
    next(iter(rollouts(agent, 1)))
    assert sizes == [ENVS] * (STEPS + 1)


def test_last_value_is_of_observation_after_rollout():
    agent = small_agent(scripts([[0]] * ENVS), gamma=0.9, gae_lambda=0.8)
    for buffer in rollouts(agent, 2):
        for e in range(ENVS):
            last = slow_value(agent, buffer, e, STEPS - 1, agent._last_obs[e])
            expected = buffer.rewards[e, -1] + 0.9 * last - buffer.values[e, -1]
            assert buffer.advantages[e, -1].item() == pytest.approx(expected.item(), abs=1e-4)
