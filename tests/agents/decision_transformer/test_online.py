"""Going on online: episodes as they were played, the return that was had in place of what was asked for."""

from contextlib import closing, nullcontext

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.logger import configure

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.collector import Collector
from rlxf.agents.decision_transformer.replay import Episode, Replay
from rlxf.envs import make_vec_env
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.envs.trajectories import DatasetError
from rlxf.envs.vector import as_vec_env
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import MIXED, next_step_scripts, scripts, shifted
from tests.envs.workers.worlds import breaking


def test_the_replay_begins_with_the_best_and_the_worst_leave_first():
    data = some_trajectories()
    order = np.argsort(data.returns)
    replay = Replay(data, 3)
    np.testing.assert_allclose(replay.trajectories().returns, data.returns[order[1:]], atol=1e-6)
    new = Episode(data.observations[:2], data.actions[:2], np.array([1.0, 5.0], np.float32))
    replay.episodes.append(new)
    np.testing.assert_allclose(replay.trajectories().returns, [*data.returns[order[2:]], 6.0], atol=1e-6)


def test_the_replay_of_all_episodes_is_the_data_in_another_order():
    data = some_trajectories()
    replayed = Replay(data, 100).trajectories()
    for i, e in enumerate(np.argsort(data.returns)):
        ours, theirs = (slice(*d.offsets[n : n + 2]) for d, n in ((replayed, i), (data, e)))
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(replayed, name)[ours], getattr(data, name)[theirs])
        np.testing.assert_allclose(replayed.return_to_go[ours], data.return_to_go[theirs], atol=1e-5)


class Noting:
    """A player that counts its actions up, and notes all that is shown to it."""

    def __init__(self):
        self.shown = []

    def predict(self, observation, state, episode_start, deterministic):
        assert not deterministic
        self.shown.append((observation["observation"].copy(), episode_start.copy()))
        return np.full(len(episode_start), len(self.shown) % 3), state

    def encode(self, observation, actions):
        return observation["observation"], actions


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_episodes_are_what_was_shown_done_and_paid_between_two_starts(mode):
    next_step = mode is AutoresetMode.NEXT_STEP
    env = as_vec_env(next_step_scripts(shifted(3))) if next_step else scripts(shifted(3))
    player, paid = Noting(), []
    collector = Collector(player, ReturnToGo(env, 1.0))
    original = collector.env.step

    def step(actions):
        result = original(actions)
        paid.append((result[1].copy(), [info.get("filler", False) for info in result[3]]))
        return result

    collector.env.step = step
    found = [(t, episode) for t in range(40) for episode in collector.step()[0]]
    expected = list(slow_episodes(player.shown, paid))
    assert len(found) == len(expected) > 8
    for (t, episode), (last, observations, actions, rewards) in zip(found, expected, strict=True):
        assert t == last
        np.testing.assert_array_equal(episode.observations, observations)
        np.testing.assert_array_equal(episode.actions, actions)
        np.testing.assert_allclose(episode.rewards, rewards)


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_an_episode_that_broke_is_not_handed_out(tmp_path):
    told, found = [], []
    with closing(breaking(tmp_path, "step raises")) as env:
        collector = Collector(Noting(), ReturnToGo(env, 1.0))
        while not env.restarts or env.absent() or len(told) < 20:
            episodes, _, infos = collector.step()
            found += [len(episode.rewards) for episode in episodes]
            told += [info["episode"]["l"] for info in infos if "episode" in info]
    assert found == told


def slow_episodes(shown, paid):
    """(last step, observations, actions, rewards) of each episode, told by the scripts."""
    for t in range(len(paid)):
        for e in range(3):
            real = [k for k in range(t + 1) if not paid[k][1][e]]
            ends = [n for n in range(len(real)) if shifted(3)[e][n % len(MIXED)]]
            if real and real[-1] == t and ends and ends[-1] == len(real) - 1:
                first = ends[-2] + 1 if len(ends) > 1 else 0
                steps = real[first:]
                yield (
                    t,
                    np.stack([shown[k][0][e] for k in steps]),
                    np.array([(k + 1) % 3 for k in steps]),
                    np.array([paid[k][0][e] for k in steps]),
                )


@pytest.fixture
def agent(cartpole):
    core = decision_transformer(width=16, layers=1, heads=1, dropout=0.0)
    return DecisionTransformer(
        cartpole, 4, batch_size=8, core=core, objective=MaximumEntropy(), seed=0, device="cpu"
    )


def test_it_plays_and_learns_by_turns(agent, tmp_path):
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


def test_it_asks_for_the_target(agent):
    env = make_vec_env("CartPole-v1", 2)
    agent.learn_online(12, target_return=33.0, env=env, round_steps=6, round_updates=1)
    assert agent.get_env().target_return.tolist() == [33.0, 33.0]


def test_the_same_seed_gives_the_same_bits(cartpole):
    def learned(seed):
        core = decision_transformer(width=16, layers=1, heads=1, dropout=0.1)
        agent = DecisionTransformer(
            cartpole, 4, 8, core=core, objective=MaximumEntropy(), seed=seed, device="cpu"
        )
        agent.learn_online(60, 20.0, n_envs=2, round_steps=20, round_updates=3)
        return agent.policy.tokens.of_state.weight.detach().numpy()

    np.testing.assert_array_equal(learned(0), learned(0))
    assert (learned(0) != learned(1)).any()


@pytest.mark.parametrize(("steps", "updates"), [(30, 4), (45, 6), (31, 5), (3, 1)])
def test_a_round_that_is_cut_short_has_its_share_of_updates(agent, steps, updates):
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
def test_it_plays_in_environments_of_every_kind(agent, env):
    agent.learn_online(
        240, 20.0, env=env if isinstance(env, str) else env(), n_envs=2, round_steps=240, round_updates=1
    )
    assert agent._n_updates == 1
    assert agent.num_timesteps >= 240
    assert len(agent.ep_info_buffer) > 0


@pytest.fixture
def open_envs(monkeypatch):
    """The CartPoles that are open."""
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
def test_what_it_made_is_closed(agent, env, error, open_envs):
    seen = []
    callback = (lambda *_: seen.append(len(open_envs)) is None) if error is None else fail(error)
    raising = nullcontext() if error is None else pytest.raises(type(error))
    with raising:
        agent.learn_online(8, 20.0, env, n_envs=2, round_steps=8, round_updates=1, callback=callback)
    assert seen in ([], [2] * 4)
    assert open_envs == []
    assert agent.get_env() is None


def test_what_does_not_fit_is_closed(agent, monkeypatch):
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
def test_what_it_was_given_stays_open(agent, make, open_envs):
    env = make()
    before = list(open_envs)
    with pytest.raises(KeyboardInterrupt):
        agent.learn_online(8, 20.0, env, callback=fail(KeyboardInterrupt()))
    agent.learn_online(8, 20.0, env, round_steps=8, round_updates=1)
    assert open_envs == before
    assert len(before) >= 1
