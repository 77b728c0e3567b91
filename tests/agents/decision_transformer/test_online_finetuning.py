"""Tests of online fine-tuning: replay buffer, episode collector and `learn_online`."""

from contextlib import closing, nullcontext

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.logger import configure

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.online_rounds import EpisodeCollector
from rlxf.agents.decision_transformer.replay_buffer import REMOVALS, ReplayBuffer, Transitions
from rlxf.data import DatasetError
from rlxf.envs import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.evaluation import EvaluationCallback
from rlxf.training import CheckpointFolder, CheckpointWriter
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import MIXED, next_step_scripts, scripts, shifted
from tests.envs.faulty_envs import breaking


def some_episode(data, *rewards):
    """Return an episode with these rewards, which terminates."""
    steps, ends = slice(0, len(rewards)), np.arange(len(rewards)) == len(rewards) - 1
    return Transitions(data.observations[steps], data.actions[steps], np.array(rewards, np.float32), ends)


def test_a_new_replay_holds_the_best_episodes():
    data = some_trajectories()
    best = np.sort(data.returns)[1:]
    np.testing.assert_allclose(ReplayBuffer(data, 3).trajectories().returns, best, atol=1e-6)


def test_a_full_replay_removes_the_oldest_episodes():
    data = some_trajectories()
    replay, logged = ReplayBuffer(data, 3, "oldest"), np.sort(data.returns)[-3:]
    replay.extend([some_episode(data, -1e3)])
    np.testing.assert_allclose(replay.trajectories().returns, [*logged[1:], -1e3], atol=1e-6)
    replay.extend([some_episode(data, 1e3)])
    replay.extend([some_episode(data, 1.0, 5.0), some_episode(data, 2.0)])
    np.testing.assert_allclose(replay.trajectories().returns, [1e3, 6.0, 2.0], atol=1e-6)


def test_a_full_replay_removes_the_worst_episodes():
    data = some_trajectories()
    replay, logged = ReplayBuffer(data, 3, "worst"), np.sort(data.returns)[-3:]
    replay.extend([some_episode(data, -1e3)])
    np.testing.assert_allclose(replay.trajectories().returns, logged, atol=1e-6)
    replay.extend([some_episode(data, 500.0, 500.0), some_episode(data, 1e4)])
    np.testing.assert_allclose(replay.trajectories().returns, [logged[-1], 1e3, 1e4], atol=1e-6)
    replay.extend([some_episode(data, 1e4), some_episode(data, 1e3)])
    assert [len(episode.rewards) for episode in replay.episodes] == [1, 1, 1]  # of equal returns, the newest


def test_a_full_replay_removes_the_oldest_episodes_of_the_worse_half():
    data = some_trajectories()
    replay, logged = ReplayBuffer(data, 4, "oldest-of-worse"), np.sort(data.returns)[-4:]
    replay.extend([some_episode(data, -1e3)])  # worse than all others, but the newest
    np.testing.assert_allclose(replay.trajectories().returns, [*logged[1:], -1e3], atol=1e-6)
    replay.extend([some_episode(data, -2e3), some_episode(data, 1e3)])
    np.testing.assert_allclose(replay.trajectories().returns, [logged[-1], -1e3, -2e3, 1e3], atol=1e-6)
    replay.extend([some_episode(data, -3e3), some_episode(data, 2e3)])
    np.testing.assert_allclose(replay.trajectories().returns, [-2e3, 1e3, -3e3, 2e3], atol=1e-6)


@pytest.mark.parametrize("capacity", [1, 2, 5, 8])
def test_the_worse_half_is_a_queue_of_the_episodes_below_the_best(capacity):
    """A slow model of the buffer: the best episodes ever seen, and the newest of the others."""
    data, rng = some_trajectories(), np.random.default_rng(capacity)
    replay, seen = ReplayBuffer(data, capacity, "oldest-of-worse"), list(np.sort(data.returns)[-capacity:])
    for _ in range(30):
        added = rng.integers(-5, 6, rng.integers(1, 4)).astype(np.float32)  # many are equal
        padding = [0.0] * len(seen)
        replay.extend([some_episode(data, each, *padding[:2]) for each in added])
        seen += list(added)
        best = sorted(range(len(seen)), key=lambda i: (seen[i], i))[-((capacity + 1) // 2) :]
        others = [i for i in range(len(seen)) if i not in best]
        kept = [seen[i] for i in sorted(best + others[max(len(others) - capacity // 2, 0) :])]
        np.testing.assert_allclose(replay.trajectories().returns, kept, rtol=1e-5)


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_replay_is_restored_from_its_collected_episodes(remove):
    data, rng = some_trajectories(), np.random.default_rng(0)
    replay = ReplayBuffer(data, 4, remove)
    for _ in range(12):
        restored = ReplayBuffer(data, 4, remove)
        restored.load_state_dict(replay.state_dict())
        added = [some_episode(data, each) for each in rng.normal(scale=10, size=rng.integers(3))]
        for each in (replay, restored):
            each.extend(added)
        first, second = (each.trajectories() for each in (replay, restored))
        for name in ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)
        assert len(restored.collected) == len(replay.collected)
    assert replay.collected


def test_unknown_removals_are_refused():
    with pytest.raises(ValueError, match=r"replay_remove must be one of .*'worst', 'oldest'.*'best'"):
        ReplayBuffer(some_trajectories(), 3, "best")


def test_the_replay_of_all_episodes_is_the_dataset_sorted_by_return():
    data = some_trajectories()
    replayed = ReplayBuffer(data, 100).trajectories()
    for i, e in enumerate(np.argsort(data.returns)):
        own, original = (slice(*d.offsets[n : n + 2]) for d, n in ((replayed, i), (data, e)))
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(replayed, name)[own], getattr(data, name)[original])
        np.testing.assert_allclose(replayed.return_to_go[own], data.return_to_go[original], atol=1e-5)


class RecordingPlayer:
    """Player that cycles through actions and records its observations."""

    def __init__(self):
        self.shown = []

    def explore(self, observation, state, episode_start, noise):
        self.shown.append((observation["observation"].copy(), episode_start.copy()))
        return np.full(len(episode_start), len(self.shown) % 3), state

    def encode(self, observation, actions):
        return observation["observation"], actions


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_collected_episodes_equal_the_scripts(mode):
    next_step = mode is AutoresetMode.NEXT_STEP
    env = as_vec_env(next_step_scripts(shifted(3))) if next_step else scripts(shifted(3))
    player, rewarded = RecordingPlayer(), []
    collector = EpisodeCollector(player, ReturnToGo(env, 1.0))
    original = collector.env.step

    def step(actions):
        result = original(actions)
        rewarded.append((result[1].copy(), [info.get("filler", False) for info in result[3]]))
        return result

    collector.env.step = step
    collected = [(t, episode) for t in range(40) for episode in collector.step()[0]]
    expected = list(slow_episodes(player.shown, rewarded))
    assert len(collected) == len(expected) > 8
    for (t, episode), (last, observations, actions, rewards) in zip(collected, expected, strict=True):
        assert t == last
        np.testing.assert_array_equal(episode.observations, observations)
        np.testing.assert_array_equal(episode.actions, actions)
        np.testing.assert_allclose(episode.rewards, rewards)


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_an_episode_of_a_crashed_environment_is_discarded(tmp_path):
    reported, collected = [], []
    with closing(breaking(tmp_path, "step raises")) as env:
        collector = EpisodeCollector(RecordingPlayer(), ReturnToGo(env, 1.0))
        while not env.restarts or env.failed_envs() or len(reported) < 20:
            episodes, _, infos = collector.step()
            collected += [len(episode.rewards) for episode in episodes]
            reported += [info["episode"]["l"] for info in infos if "episode" in info]
    assert collected == reported


def slow_episodes(shown, rewarded):
    """Yield (last step, observations, actions, rewards) of each episode of the scripts."""
    for t in range(len(rewarded)):
        for e in range(3):
            real = [k for k in range(t + 1) if not rewarded[k][1][e]]
            ends = [n for n in range(len(real)) if shifted(3)[e][n % len(MIXED)]]
            if real and real[-1] == t and ends and ends[-1] == len(real) - 1:
                first = ends[-2] + 1 if len(ends) > 1 else 0
                steps = real[first:]
                yield (
                    t,
                    np.stack([shown[k][0][e] for k in steps]),
                    np.array([(k + 1) % 3 for k in steps]),
                    np.array([rewarded[k][0][e] for k in steps]),
                )


@pytest.fixture
def agent(cartpole):
    core = decision_transformer(width=16, layers=1, heads=1, dropout=0.0)
    return DecisionTransformer(
        cartpole, 4, batch_size=8, core=core, objective=MaximumEntropy(), seed=0, device="cpu"
    )


def test_collection_and_updates_alternate(agent, tmp_path):
    counted = []
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent.learn_online(
        120,
        target_return=20.0,
        n_envs=3,
        round_steps=30,
        round_updates=2,
        callback=lambda values, _: counted.append((agent.num_timesteps, agent._n_updates)) is None,
    )
    assert counted == [(3 * n, 2 * ((3 * n - 1) // 30)) for n in range(1, 41)]
    assert agent._n_updates == 8
    rows = np.genfromtxt(tmp_path / "progress.csv", delimiter=",", names=True)
    assert rows["timetotal_timesteps"].tolist() == [30, 60, 90, 120]
    assert rows["rolloutep_rew_mean"][-1] > 5, "no episode has ended"


def test_counts_may_be_whole_numbers_of_other_types(agent):
    counts = {"n_envs": 2.0, "round_steps": 6e0, "round_updates": np.int64(1), "replay_episodes": 1e3}
    agent.learn_online(1.2e1, 20.0, **counts)
    assert agent.num_timesteps == 12


def test_object_that_is_no_environment_is_refused(agent):
    with pytest.raises(TypeError, match="env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got 3"):
        agent.learn_online(12, 20.0, env=3)


def test_environments_have_the_target_return(agent):
    env = make_vec_env("CartPole-v1", 2)
    agent.learn_online(12, target_return=33.0, env=env, round_steps=6, round_updates=1)
    assert agent.get_env().target_return.tolist() == [33.0, 33.0]


def test_evaluations_in_the_environments_of_the_training_are_refused(agent):
    """They are allowed in `learn`, which steps no environment."""
    env = make_vec_env("CartPole-v1", 2)
    with pytest.raises(ValueError, match="EvaluationCallback needs an environment of its own"):
        agent.learn_online(12, 20.0, env=env, callback=EvaluationCallback(env, 2, 6, target_returns=[20]))
    callback = EvaluationCallback(env, 2, 1, target_returns=[20])
    agent.learn(1, callback)
    assert list(callback.reports) == [1]


def test_equal_seeds_give_bitwise_equal_weights(cartpole):
    def learned(seed):
        core = decision_transformer(width=16, layers=1, heads=1, dropout=0.1)
        agent = DecisionTransformer(
            cartpole, 4, 8, core=core, objective=MaximumEntropy(), seed=seed, device="cpu"
        )
        agent.learn_online(60, 20.0, n_envs=2, round_steps=20, round_updates=3)
        return agent.policy.tokens.state_embedding.weight.detach().numpy()

    np.testing.assert_array_equal(learned(0), learned(0))
    assert (learned(0) != learned(1)).any()


@pytest.mark.parametrize(("steps", "updates"), [(30, 4), (45, 6), (31, 5), (3, 1)])
def test_an_incomplete_round_has_proportionally_many_updates(agent, steps, updates):
    agent.learn_online(steps, 20.0, n_envs=1, round_steps=30, round_updates=4)
    assert agent._n_updates == updates


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        lambda: gymnasium.make("CartPole-v1"),
        lambda: gymnasium.make_vec("CartPole-v1", 2),
        lambda: make_vec_env("CartPole-v1", 2),
    ],
    ids=["id", "Env", "VectorEnv", "VecEnv"],
)
def test_environments_of_every_kind_are_accepted(agent, env):
    agent.learn_online(
        240, 20.0, env=env if isinstance(env, str) else env(), n_envs=2, round_steps=240, round_updates=1
    )
    assert agent._n_updates == 1
    assert agent.num_timesteps >= 240
    assert len(agent.ep_info_buffer) > 0


@pytest.fixture
def open_envs(monkeypatch):
    """Return a list of the CartPole environments that are open."""
    open_now, make = [], CartPoleEnv.__init__

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        open_now.append(self)

    monkeypatch.setattr(CartPoleEnv, "__init__", made)
    monkeypatch.setattr(CartPoleEnv, "close", lambda self: open_now.remove(self))
    return open_now


def fail(error):
    def fails(*_):
        raise error

    return fails


@pytest.mark.parametrize("env", [None, "CartPole-v1"], ids=["of the data", "id"])
@pytest.mark.parametrize("error", [None, ValueError("slip"), KeyboardInterrupt()], ids=repr)
def test_environments_made_by_the_agent_are_closed(agent, env, error, open_envs):
    open_counts = []
    callback = (lambda *_: open_counts.append(len(open_envs)) is None) if error is None else fail(error)
    raising = nullcontext() if error is None else pytest.raises(type(error))
    with raising:
        agent.learn_online(8, 20.0, env, n_envs=2, round_steps=8, round_updates=1, callback=callback)
    assert open_counts in ([], [2] * 4)
    assert open_envs == []
    assert agent.get_env() is None


def test_environments_of_other_spaces_are_closed(agent, monkeypatch):
    closed = []
    monkeypatch.setattr(PendulumEnv, "close", lambda self: closed.append(self))
    with pytest.raises(DatasetError, match="does not fit"):
        agent.learn_online(8, 20.0, "Pendulum-v1", n_envs=2)
    assert len(closed) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make("CartPole-v1"),
        lambda: gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="sync"),
        lambda: make_vec_env("CartPole-v1", 1),
    ],
    ids=["Env", "VectorEnv", "VecEnv"],
)
def test_environments_that_were_passed_stay_open(agent, make, open_envs):
    env = make()
    before = list(open_envs)
    with pytest.raises(KeyboardInterrupt):
        agent.learn_online(8, 20.0, env, callback=fail(KeyboardInterrupt()))
    agent.learn_online(8, 20.0, env, round_steps=8, round_updates=1)
    assert open_envs == before
    assert len(before) >= 1


def test_a_schedule_is_not_evaluated_beyond_the_end(agent):
    """Four environments take 12 steps of 10."""
    asked = []
    agent.learning_rate = lambda remaining: asked.append(remaining) or 1e-3 * remaining
    agent._setup_lr_schedule()
    agent.learn_online(10, 20.0, n_envs=4, round_steps=4, round_updates=1)
    assert agent.num_timesteps == 12
    assert min(asked) == 0


def test_numbers_of_numpy_are_stored_in_checkpoints(agent, tmp_path):
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 0)
    agent.learn_online(6, np.float32(20), n_envs=2, round_steps=3, round_updates=1, callback=writer)
    assert CheckpointFolder(tmp_path).files()
    with pytest.raises(ValueError, match="target_return must be a finite number, got nan"):
        agent.learn_online(6, float("nan"), n_envs=2)


def test_an_extended_training_does_not_repeat_the_updates_of_its_last_round(agent, tmp_path):
    rounds = {"n_envs": 1, "round_steps": 8, "round_updates": 10}
    agent.learn_online(12, 20.0, callback=CheckpointWriter(CheckpointFolder(tmp_path), 0), **rounds)
    assert agent._n_updates == 15
    agent.learn_online(16, 20.0, resume_from=tmp_path, **rounds)
    assert agent._n_updates == 20


@pytest.mark.parametrize(("interval", "logged"), [(1, [4, 8, 12, 16, 20, 24]), (3, [8, 12, 20, 24])])
def test_several_rounds_in_one_step_are_logged_at_the_next_possible_one(agent, tmp_path, interval, logged):
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent.learn_online(24, 20.0, n_envs=4, round_steps=2, round_updates=1, log_interval=interval)
    rows = np.genfromtxt(tmp_path / "progress.csv", delimiter=",", names=True)
    assert rows["timetotal_timesteps"].tolist() == logged
