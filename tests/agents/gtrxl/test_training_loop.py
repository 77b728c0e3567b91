"""Schedules, environments and values of a training, from the first rollout to the last."""

import copy
import re
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import GTrXLPPO, evaluate
from rlxf.attention import LearnedAbsolute
from rlxf.envs import Curriculum, make_vec_env
from rlxf.training.schedules import CosineSchedule
from tests.agents.gtrxl.worlds import (
    DICT,
    MIXED,
    Scripted,
    parameters,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ENVS, STEPS = 3, 16
ROLLOUT = ENVS * STEPS


def test_schedules_end_at_zero_if_the_last_rollout_exceeds_the_total():
    seen = []

    def schedule(progress):
        seen.append(progress)
        return 1e-3 * progress

    agent = small_agent(
        scripts(shifted(ENVS)), learning_rate=schedule, ent_coef=schedule, clip_range=schedule
    )
    agent.learn(ROLLOUT + 1)
    assert agent.num_timesteps == 2 * ROLLOUT
    assert min(seen) == 0.0
    assert agent.objective().clip_range == 0.0


def test_cosine_schedule_stays_at_its_end():
    assert CosineSchedule(1e-3, 1e-4)(-1.0) == pytest.approx(1e-4)


def test_training_of_one_rollout_without_learning_rate_warns():
    agent = small_agent(scripts(shifted(ENVS)), loud=False)
    before = [x.clone() for x in parameters(agent)]
    with pytest.warns(UserWarning, match="the weights will not change: 48 steps are one rollout"):
        agent.learn(ROLLOUT)
    assert same(before, parameters(agent))


@pytest.mark.parametrize("verbose", [0, 1])
def test_an_update_that_target_kl_ends_is_printed(capsys, verbose):
    agent = small_agent(scripts(shifted(ENVS)), learning_rate=1e-3, target_kl=1e-9, verbose=verbose)
    agent.learn(ROLLOUT, log_interval=None)
    message = (
        r"Early end of the update in pass 1 of 2: the KL divergence \S+ exceeds 1.5 times target_kl=1e-09\n"
    )
    assert len(re.findall(message, capsys.readouterr().out)) == verbose


@pytest.mark.filterwarnings("error:the weights will not change")
@pytest.mark.parametrize(("rate", "steps"), [(1e-3, ROLLOUT), ("linear", 2 * ROLLOUT)])
def test_training_that_changes_weights_does_not_warn(rate, steps):
    agent = small_agent(scripts(shifted(ENVS)), **({} if rate == "linear" else {"learning_rate": rate}))
    before = [x.clone() for x in parameters(agent)]
    agent.learn(steps)
    assert not same(before, parameters(agent))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_positions_up_to_the_length_of_an_episode_are_sufficient(mode):
    """A rollout of any length may end with a reset step."""
    limit = 5
    makes = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=limit)] * ENVS
    core = replace(small_core(), position=LearnedAbsolute(max_length=limit + 1))
    for steps in (8, 12):
        env = SyncVectorEnv(makes, autoreset_mode=mode)
        agent = small_agent(env, core=core, n_steps=steps, batch_size=12)
        agent.learn(4 * ENVS * steps)


class OtherInfos(Scripted):
    """Environment whose infos have an entry ``episode`` that is the number of the step."""

    def step(self, action):
        *results, info = super().step(action)
        success = np.array([True]) if results[2] or results[3] else "running"
        return *results, info | {"episode": self.life, "is_success": success}


def test_an_entry_episode_of_another_meaning_is_not_logged(tmp_path):
    agent = small_agent(Monitor(OtherInfos()), tensorboard_log=str(tmp_path))
    agent.learn(64, log_interval=1)
    assert {info.keys() >= {"r", "l", "t"} for info in agent.ep_info_buffer} == {True}
    assert sum(end != 0 for end in (MIXED * 6)[:64]) == len(agent.ep_info_buffer)
    assert set(agent.ep_success_buffer) == {1.0}


class MoreParts(Scripted):
    """Environment whose observations have a part that its space lacks."""

    def reset(self, **options):
        observation, info = super().reset(**options)
        return observation | {"other": 0}, info

    def step(self, action):
        observation, *results = super().step(action)
        return observation | {"other": 0}, *results


def test_parts_that_the_space_of_observations_lacks_are_ignored():
    """Also in the last observation of a truncated episode."""
    values = []
    for kind in (Scripted, MoreParts):
        agent = small_agent(kind(observation_space=copy.deepcopy(DICT)), "MultiInputGTrXLPolicy")
        agent.learn(64)
        values.append(agent.rollout_buffer.returns.clone())
    assert torch.equal(*values)


def mazes():
    return make_vec_env("rlxf/TMaze-v0", ENVS, seed=0, env_kwargs={"corridor_length": 30})


def vectors():
    return gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode="sync")


def single():
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize("passes_env", [False, True], ids=["agent's", "given"])
@pytest.mark.parametrize("make", [partial(make_vec_env, "CartPole-v1", ENVS), mazes, vectors, single])
def test_evaluation_in_the_training_environment_ends_its_episodes(make, passes_env):
    env = make()
    agent = small_agent(env)
    agent.learn(2 * ROLLOUT)
    evaluate(agent, env if passes_env else None, episodes=4, seed=1)
    positions = []

    def record(names, _):
        positions.append(names["index"].position)
        return True

    agent.learn(2 * ROLLOUT, record, reset_num_timesteps=False)
    assert (positions[0] == 0).all(), "each environment starts a new episode"


def test_interrupted_evaluation_ends_the_episodes_of_the_training():
    agent = small_agent(make_vec_env("CartPole-v1", ENVS))
    agent.learn(2 * ROLLOUT)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(agent, episodes=4, on_step=interrupt)
    assert agent._last_obs is None


def test_an_error_in_a_callback_ends_the_episodes_of_the_training():
    """The environments have taken a step that is not stored; an episode without it would be wrong."""
    agent = small_agent(make_vec_env("CartPole-v1", ENVS))

    def interrupt(*_):
        if agent.num_timesteps == 4 * ENVS:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        agent.learn(2 * ROLLOUT, interrupt)
    agent.learn(ROLLOUT, reset_num_timesteps=False)
    index = agent.rollout_buffer.steps_index
    assert (index.position[:, 0] == 0).all(), "each environment starts a new episode"
    assert agent.rollout_buffer.obs[:, 0].abs().max() < 0.05  # as the first observation of a CartPole


def test_evaluation_in_other_environments_does_not_end_episodes():
    agent = small_agent(make_vec_env("CartPole-v1", ENVS, seed=0))
    agent.learn(2 * ROLLOUT)
    evaluate(agent, make_vec_env("CartPole-v1", ENVS), episodes=4)
    assert agent._last_obs is not None


def test_training_episodes_after_an_evaluation_are_not_those_of_evaluations():
    env = make_vec_env("CartPole-v1", ENVS, seed=0)
    agent = small_agent(env)
    agent.learn(2 * ROLLOUT)
    evaluate(agent, episodes=4)
    evaluated = make_vec_env("CartPole-v1", ENVS)
    agent._setup_learn(ROLLOUT, reset_num_timesteps=False)
    first = agent.collector.obs
    for seed in (0, 1_000_000, 1_000_000 + ENVS):
        evaluated.seed(seed)
        assert not np.isin(first, evaluated.reset()).any()


def test_evaluation_in_the_training_environment_uses_the_task_of_a_curriculum():
    mazes = Curriculum(({"corridor_length": 2},), advance_return=-9.0, episodes=1)
    env = make_vec_env("rlxf/TMaze-v0", ENVS, env_kwargs={"corridor_length": 8}, curriculum=mazes)
    agent = small_agent(env)
    assert evaluate(agent, episodes=6).lengths.min() > 8
    assert env.get_attr("stage") == [1] * ENVS
    env.reset()
    actions, ends = np.zeros(ENVS, int), []
    while not ends:
        _, _, dones, infos = env.step(actions)
        ends = [info["curriculum_stage"] for info, done in zip(infos, dones, strict=True) if done]
    assert set(ends) == {1}


def test_values_assigned_by_a_callback_take_effect():
    """As in SB3, whose PPO reads numbers and schedules in each update."""
    agent = small_agent(scripts(shifted(ENVS)), clip_range_vf=0.2)
    agent.ent_coef, agent.clip_range, agent.clip_range_vf = 0.5, lambda progress: 0.1 * progress, None
    assert agent.objective().ent_coef == 0.5
    assert agent.objective().clip_range == pytest.approx(0.1)
    assert agent.objective().clip_range_vf is None


def test_a_seed_after_the_construction_determines_the_training():
    trained = []
    for _ in range(2):
        agent = small_agent(scripts(shifted(ENVS)), seed=None)
        agent.set_parameters(trained[0][0]) if trained else None
        first = copy.deepcopy(agent.get_parameters())
        agent.set_random_seed(5)
        trained.append((first, parameters(agent.learn(2 * ROLLOUT))))
    assert same(trained[0][1], trained[1][1])


@pytest.mark.parametrize("nested", [False, True])
def test_normalized_integers_are_stored_as_they_are_seen(nested):
    """SB3's ``VecNormalize`` returns float32 numbers, and keeps the integer space."""
    integers = spaces.Box(0, 200, (3,), np.uint8)
    space = spaces.Dict({"a": integers, "b": spaces.Discrete(3)}) if nested else integers
    policy = "MultiInputGTrXLPolicy" if nested else "MlpGTrXLPolicy"
    env = VecNormalize(scripts(shifted(ENVS), space), norm_obs_keys=["a"] if nested else None)
    agent = small_agent(env, policy).learn(ROLLOUT)
    stored = agent.rollout_buffer.obs["a"] if nested else agent.rollout_buffer.obs
    assert stored.dtype == torch.float32
    assert (stored != stored.round()).any()
    if nested:
        assert agent.rollout_buffer.obs["b"].dtype == torch.int64


def test_a_normalized_environment_that_replaces_another_one_has_its_own_buffer():
    space = spaces.Box(0, 200, (3,), np.uint8)
    agent = small_agent(scripts(shifted(ENVS), space)).learn(ROLLOUT)
    assert agent.rollout_buffer.obs.dtype == torch.uint8
    agent.set_env(VecNormalize(scripts(shifted(ENVS), space)))
    agent.learn(ROLLOUT, reset_num_timesteps=False)
    assert agent.rollout_buffer.obs.dtype == torch.float32
    assert (agent.rollout_buffer.obs != agent.rollout_buffer.obs.round()).any()


def test_clipped_values_learn_from_the_first_rollout():
    """The values of a new agent become the mean of the returns, far from those of the first rollout."""
    agent = GTrXLPPO(
        "MlpGTrXLPolicy",
        "CartPole-v1",
        clip_range_vf=0.2,
        n_steps=64,
        n_envs=4,
        batch_size=64,
        seed=0,
        device="cpu",
    )
    assert not agent.policy.value_net.weight.any()
    agent.learn(2 * 256)
    assert agent.policy.value_net.weight.any()
    assert agent.policy.value_net.rollouts == 2


@pytest.mark.parametrize("start", [True, False])
def test_predict_with_tensors(start):
    agent = small_agent(scripts(shifted(ENVS)))
    obs = agent.env.reset()
    _, state = agent.predict(obs)
    mask = np.array([start] * ENVS)
    expected, _ = agent.predict(obs, state, mask, deterministic=True)
    tensor = torch.as_tensor(obs).requires_grad_()
    for given in (tensor, tensor.detach().double()):
        actions, _ = agent.predict(given, state, torch.as_tensor(mask), deterministic=True)
        assert (actions == expected).all()
    agent.predict(tensor.bfloat16(), state, torch.as_tensor(mask))


def test_result_of_a_gymnasium_reset_is_refused():
    agent = small_agent(scripts(shifted(ENVS)))
    with pytest.raises(ValueError, match="pass the observation only"):
        agent.predict((agent.env.reset(), {}))
