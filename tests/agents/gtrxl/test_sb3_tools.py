"""Unmodified tools of Stable-Baselines3 work with the agent."""

import csv
import pickle
import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecFrameStack, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlxf.envs
from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.training_algorithm import PolicyUpdate
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.envs.tmaze_vector import TMazeVector
from rlxf.training import linear
from rlxf.utils.errors import FaultyEnvironmentError
from tests.agents.gtrxl.worlds import (
    GOES_ON,
    VECTOR,
    Scripted,
    all_segments,
    last_outputs,
    next_step_scripts,
    parameters,
    rollouts,
    same,
    scripts,
    shifted,
    small_agent,
)

TMAZE = "rlxf/TMaze-v0"
ROLLOUT = 3 * 16


class Notes(KVWriter):
    """Store every table that the logger dumps."""

    def __init__(self):
        self.tables = []

    def write(self, key_values, key_excluded, step=0):
        self.tables.append(dict(key_values))

    def close(self):
        pass


def recorded_logs(agent):
    notes = Notes()
    agent.set_logger(Logger(None, [notes]))
    return notes


def tmaze(n_envs=2, corridor=3, **options):
    return make_vec_env(TMAZE, n_envs, seed=0, env_kwargs={"corridor_length": corridor}, **options)


def test_evaluate_policy_keeps_memory_within_episodes():
    """Returns equal those of a loop over one environment that starts each episode without a state."""
    agent = small_agent(tmaze())
    returns, lengths = evaluate_policy(agent, tmaze(1), 6, return_episode_rewards=True)
    assert lengths == [4] * 6
    env = tmaze(1)
    expected = []
    obs = env.reset()
    for _ in range(6):
        total, state, done = 0.0, None, False
        while not done:
            action, state = agent.predict(obs, state=state, deterministic=True)
            obs, reward, (done,), _ = env.step(action)
            total += reward[0]
        expected.append(total)
    assert returns == pytest.approx(expected)


class Keep(BaseCallback):
    """Store the weights of every new best agent."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def _on_step(self):
        self.kept.append(parameters(self.model))
        return True


def test_eval_callback_keeps_the_best_agent(tmp_path):
    agent, bests = small_agent(tmaze(3)), Keep()
    callback = EvalCallback(
        tmaze(2),
        callback_on_new_best=bests,
        n_eval_episodes=4,
        eval_freq=16,
        best_model_save_path=str(tmp_path),
        log_path=str(tmp_path),
        verbose=0,
    )
    agent.learn(3 * ROLLOUT, callback=callback)
    results = np.load(tmp_path / "evaluations.npz")["results"]
    assert results.shape == (3, 4)
    assert callback.best_mean_reward == pytest.approx(results.mean(axis=1).max())
    assert same(parameters(GTrXLPPO.load(tmp_path / "best_model.zip", device="cpu")), bests.kept[-1])


@pytest.mark.parametrize("env", [lambda: tmaze(1), lambda: TMazeVector(1)], ids=["VecEnv", "VectorEnv"])
@pytest.mark.parametrize("other", [evaluate_policy, lambda _, env, **__: env.reset()], ids=["step", "reset"])
def test_training_continues_with_new_episodes_after_other_steps(env, other):
    agent = small_agent(env(), learning_rate=1e-3).learn(16)
    other(agent, agent.get_env(), n_eval_episodes=1)
    with pytest.warns(UserWarning, match="stepped or reset after the last training.*new episodes"):
        agent.learn(16, reset_num_timesteps=False)
    assert agent.rollout_buffer.index.position[0, agent.rollout_buffer.memory_length] == 0


@pytest.mark.parametrize("env", [lambda: tmaze(1), lambda: TMazeVector(1)], ids=["VecEnv", "VectorEnv"])
def test_training_continues_within_its_episodes(env):
    agent = small_agent(env(), learning_rate=1e-3).learn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.learn(0, reset_num_timesteps=False).learn(16, reset_num_timesteps=False)
        agent.learn(16)


def test_eval_callback_needs_another_environment():
    agent = small_agent(tmaze(3))
    with pytest.raises(ValueError, match="EvalCallback needs an environment of its own"):
        agent.learn(ROLLOUT, [EvalCallback(agent.get_env(), verbose=0)])
    assert agent.num_timesteps == 0


def test_a_reached_threshold_stops_training():
    stop = StopTrainingOnRewardThreshold(reward_threshold=-100, verbose=0)
    callback = EvalCallback(tmaze(1), callback_on_new_best=stop, eval_freq=16, n_eval_episodes=1, verbose=0)
    agent = small_agent(tmaze(3)).learn(10 * ROLLOUT, callback=callback)
    assert agent.num_timesteps == ROLLOUT


def test_checkpoint_callback(tmp_path):
    agent = small_agent(tmaze(3))
    agent.learn(2 * ROLLOUT, callback=CheckpointCallback(8, str(tmp_path), name_prefix="a"))
    assert {path.name for path in tmp_path.iterdir()} == {f"a_{n}_steps.zip" for n in (24, 48, 72, 96)}
    assert GTrXLPPO.load(tmp_path / "a_72_steps", device="cpu").num_timesteps == 72
    assert same(
        parameters(GTrXLPPO.load(tmp_path / "a_96_steps")), parameters(GTrXLPPO.load(tmp_path / "a_72_steps"))
    )


def test_vec_normalize():
    env = VecNormalize(tmaze(3), gamma=0.9)
    agent = small_agent(env)
    for buffer in rollouts(agent, 2):
        batch = all_segments(buffer)
        with torch.no_grad():
            values = agent.policy.heads(
                last_outputs(agent.policy, batch.obs, batch.previous, batch.index, batch.state)
            )[1]
        torch.testing.assert_close(values, batch.values, atol=1e-4, rtol=0)
    assert env.obs_rms.count > 2 * ROLLOUT
    assert agent.get_vec_normalize_env() is env
    evaluate_policy(agent, VecNormalize(tmaze(1), training=False), 1)


def test_make_vec_env_writes_monitor_files(tmp_path):
    agent = small_agent(tmaze(2, monitor_dir=str(tmp_path)), n_envs=2)
    agent.learn(2 * 16)
    agent.env.close()
    for number in (0, 1):
        with open(tmp_path / f"{number}.monitor.csv") as file:
            next(file)  # the header in JSON
            assert [int(row["l"]) for row in csv.DictReader(file)] == [4] * 4


def test_logged_names_and_numbers():
    agent = small_agent(tmaze(3), reconstruction_coef=0.1)
    notes = recorded_logs(agent)
    agent.learn(2 * ROLLOUT)
    first, second = notes.tables
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean", "rollout/success_rate", "time/fps"} <= first.keys()
    names = "loss policy_gradient_loss value_loss entropy_loss approx_kl clip_fraction explained_variance"
    names += " learning_rate clip_range ent_coef n_updates grad_norm reconstruction_loss"
    assert {f"train/{name}" for name in names.split()} | {"memory/filled"} <= second.keys()
    assert first["rollout/ep_len_mean"] == 4
    assert second["train/n_updates"] == agent.n_epochs
    assert second["time/total_timesteps"] == 2 * ROLLOUT
    assert all(np.isfinite(value) for value in second.values())


def test_tensorboard_events(tmp_path):
    agent = small_agent(tmaze(3), tensorboard_log=str(tmp_path))
    agent.learn(3 * ROLLOUT, tb_log_name="run")
    events = EventAccumulator(str(tmp_path / "run_1"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"rollout/ep_rew_mean", "time/fps", "train/loss", "train/approx_kl", "memory/filled"} <= tags
    assert [event.step for event in events.Scalars("rollout/ep_rew_mean")] == [
        ROLLOUT,
        2 * ROLLOUT,
        3 * ROLLOUT,
    ]


def test_progress_bar(capsys):
    assert small_agent(tmaze(3)).learn(ROLLOUT, progress_bar=True).num_timesteps == ROLLOUT
    assert f"{ROLLOUT}/{ROLLOUT}" in "".join(capsys.readouterr())


def test_logged_values_follow_schedules():
    rate, clip, entropy = linear(1e-3, 1e-4), linear(0.3, 0.1), lambda progress: 0.02 * progress**2
    agent = small_agent(tmaze(3), learning_rate=rate, clip_range=clip, ent_coef=entropy)
    notes = recorded_logs(agent)
    agent.learn(4 * ROLLOUT)
    for number, table in enumerate(notes.tables[1:], start=1):
        progress = 1 - number / 4
        assert table["train/learning_rate"] == pytest.approx(rate(progress))
        assert table["train/clip_range"] == pytest.approx(clip(progress))
        assert table["train/ent_coef"] == pytest.approx(entropy(progress))
    assert agent.policy.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_target_kl_ends_an_update_early():
    def steps(target_kl):
        agent = small_agent(tmaze(3), learning_rate=0.05, n_epochs=5, target_kl=target_kl)
        agent.learn(ROLLOUT)
        return int(agent.policy.optimizer.state_dict()["state"][0]["step"])

    assert steps(None) == 5 * 3
    assert 1 <= steps(1e-4) < 5 * 3


@pytest.mark.parametrize(("target_kl", "goes_on"), [(0.0126, True), (0.0124, False)])
def test_an_update_ends_above_one_and_a_half_times_the_target_kl(target_kl, goes_on):
    """As in SB3. Log probabilities that decrease by 0.2 have the estimate exp(-0.2) - 1 + 0.2 = 0.0187."""
    agent = small_agent(scripts(shifted(3)))
    batch = all_segments(next(rollouts(agent, 1)))
    batch = replace(batch, log_probs=batch.log_probs + 0.2)
    before = parameters(agent)
    update = PolicyUpdate(agent.policy, agent.objective(), max_grad_norm=0.5, target_kl=target_kl)
    assert update.epoch([batch]) == goes_on
    assert update.metrics()["approx_kl"] == pytest.approx(0.0187, abs=1e-4)
    assert same(before, parameters(agent)) != goes_on


class Doubled(BaseFeaturesExtractor):
    """User-defined features extractor."""

    def __init__(self, observation_space, size=5):
        super().__init__(observation_space, size)
        self.net = torch.nn.Linear(observation_space.shape[0], size)

    def forward(self, observations):
        return self.net(2 * observations)


def test_user_defined_features_extractor():
    kwargs = {"features_extractor_class": Doubled, "features_extractor_kwargs": {"size": 7}}
    agent = small_agent(tmaze(3), policy_kwargs=kwargs)
    before = agent.policy.features_extractor.net.weight.detach().clone()
    agent.learn(ROLLOUT * 2)
    assert agent.policy.token.in_features == 7
    assert not torch.equal(agent.policy.features_extractor.net.weight, before)


class StopAtCall(BaseCallback):
    """Callback that stops the training at a call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def _on_step(self):
        return self.n_calls != self.call


def test_callback_stops_training_before_update():
    agent = small_agent(tmaze(3))
    before = parameters(agent)
    agent.learn(10 * ROLLOUT, callback=StopAtCall(5))
    assert agent.num_timesteps == 3 * 5
    assert same(parameters(agent), before)


@pytest.mark.parametrize("stop", range(1, 8))
def test_steps_before_a_stop_stay_in_memory(stop):
    agent = small_agent(scripts(shifted(3)))
    agent.learn(ROLLOUT, callback=StopAtCall(stop))
    _, callback = agent._setup_learn(ROLLOUT, reset_num_timesteps=False)
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    life = [[*script, *script] for script in shifted(3)]
    for env, ends in enumerate(life):
        episode, position = 0, 0
        for end in ends[:stop]:
            episode, position = (episode + 1, 0) if end != GOES_ON else (episode, position + 1)
        assert agent.rollout_buffer.index.position[env, 8] == position
        assert agent.rollout_buffer.index.episode[env, 8] == episode
        assert (agent.rollout_buffer.index.episode[env, :8] >= 0).sum() == stop


def test_second_learn_continues():
    once = small_agent(scripts(shifted(3)), learning_rate=1e-3, ent_coef=0.01).learn(4 * ROLLOUT)
    twice = small_agent(scripts(shifted(3)), learning_rate=1e-3, ent_coef=0.01).learn(2 * ROLLOUT)
    twice.learn(2 * ROLLOUT, reset_num_timesteps=False)
    assert twice.num_timesteps == 4 * ROLLOUT
    assert same(parameters(once), parameters(twice))


@pytest.mark.parametrize("again", ["learn", "set_env"])
def test_reset_discards_pending_filler_row(again):
    ends = [[0] * 15 + [1], [0] * 16, [0] * 15 + [1]]
    agent = small_agent(next_step_scripts(ends)).learn(ROLLOUT)
    if again == "set_env":
        agent.set_env(as_vec_env(next_step_scripts(ends)))
    _, callback = agent._setup_learn(ROLLOUT, reset_num_timesteps=again == "learn")
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    index = agent.rollout_buffer.index
    assert index.position[:, 8].tolist() == [0, 0, 0]
    assert (index.episode[:, 8] > index.episode[:, 7]).all()
    assert agent.rollout_buffer.weight.min() == 1


@pytest.mark.parametrize(
    "env",
    [
        lambda: scripts(shifted(3)),
        lambda: next_step_scripts(shifted(3)),
        lambda: TMAZE,
        lambda: TMazeVector(3),
    ],
    ids=["VecEnv", "VectorEnv", "id", "TMazeVector"],
)
def test_set_env_accepts_types_of_constructor(env):
    new = env()
    agent = small_agent(TMAZE if new == TMAZE or isinstance(new, TMazeVector) else scripts(shifted(3)))
    agent.set_env(new)
    agent.learn(ROLLOUT)
    assert agent.num_timesteps == ROLLOUT


def test_set_env_refuses_other_spaces_and_numbers():
    agent = small_agent(scripts(shifted(3)))
    with pytest.raises(ValueError, match="Observation spaces do not match"):
        agent.set_env(tmaze(3))
    with pytest.raises(ValueError, match="the agent trains in 3 environments, got 2"):
        agent.set_env(scripts(shifted(2)))


def test_get_and_set_parameters():
    first, second = small_agent(tmaze(3)).learn(ROLLOUT), small_agent(tmaze(3), seed=8)
    assert not same(parameters(first), parameters(second))
    second.set_parameters(first.get_parameters())
    assert same(parameters(first), parameters(second))


@pytest.mark.parametrize(
    ("env", "number"),
    [
        (lambda: TMAZE, 3),
        (lambda: gymnasium.make(TMAZE, corridor_length=3), 1),
        (lambda: Scripted(observation_space=VECTOR), 1),
        (lambda: DummyVecEnv([lambda: gymnasium.make(TMAZE)] * 2), 2),
        (lambda: TMazeVector(4, corridor_length=3, autoreset_mode="SameStep"), 4),
        (lambda: TMazeVector(4, corridor_length=3, autoreset_mode="NextStep"), 4),
        (lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"), 2),
    ],
    ids=["id", "Env", "own Env", "VecEnv", "SAME_STEP", "NEXT_STEP", "Gymnasium's"],
)
def test_every_kind_of_environment(env, number):
    agent = small_agent(env())
    initial = parameters(agent)
    agent.learn(2 * number * 16)
    assert agent.n_envs == number
    assert agent.num_timesteps == 2 * number * 16
    assert not same(initial, parameters(agent))


@pytest.mark.parametrize(("mode", "length"), [("SameStep", 4), ("NextStep", 5)])
def test_filler_rows_count_in_no_episode(mode, length):
    agent = small_agent(TMazeVector(3, corridor_length=3, autoreset_mode=mode), n_steps=20)
    agent.learn(20 * 3)
    assert {info["l"] for info in agent.ep_info_buffer} == {4}
    assert len(agent.ep_info_buffer) == 3 * 20 // length
    assert agent.rollout_buffer.weight.mean().item() == pytest.approx(4 / length)


@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: VecFrameStack(env, 2)], ids=["plain", "stacked"]
)
def test_a_second_training_starts_with_empty_memory(wrap):
    """``VecFrameStack`` returns the same array from a reset and from a step."""
    agent = small_agent(wrap(make_vec_env("CartPole-v1", 2, seed=0)), n_envs=2)
    agent.learn(2 * 16)
    agent.learn(2 * 16)
    buffer = agent.rollout_buffer
    assert buffer.steps_index.position[:, 0].tolist() == [0, 0]
    first = buffer.steps_index.episode[:, :1]
    assert not (buffer.index.episode[:, : buffer.memory_length] == first).any()


class WithoutLastObservations(VecEnvWrapper):
    """Environments that report truncations, but not the last observations."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        obs, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            info.pop("terminal_observation", None)
        return obs, rewards, dones, infos


def test_a_truncation_without_last_observation_is_named():
    env = make_vec_env("CartPole-v1", 2, seed=0, env_kwargs={"max_episode_steps": 3})
    with pytest.raises(
        FaultyEnvironmentError, match=r"environment 0 reports a truncation at step \d+ without"
    ):
        small_agent(WithoutLastObservations(env), n_envs=2).learn(2 * 16)


def test_pickled_agents_continue_as_those_of_sb3():
    """Libraries for parallel computation pickle an agent with its environments, in the middle of episodes.

    Environments that Gymnasium pickles by their arguments, such as those of MuJoCo, restart.
    """
    agent = small_agent(rlxf.envs.make_vec_env("CartPole-v1", 3, seed=0)).learn(2 * ROLLOUT)
    before = [x.clone() for x in parameters(agent)]
    unpickled = pickle.loads(pickle.dumps(agent))  # noqa: S301
    weights = []
    for each in (agent, unpickled):
        torch.manual_seed(0)
        weights.append(parameters(each.learn(2 * ROLLOUT, reset_num_timesteps=False)))
    assert same(*weights)
    assert not same(weights[0], before)
