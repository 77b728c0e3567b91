"""Tests of online fine-tuning with a critic, and of agents that predict the return."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import (
    ElasticHistory,
    HighestValueReturn,
    MaximumEntropy,
    MaxReturn,
    QRegularized,
    SampledReturn,
    TargetReturn,
    decision_transformer,
)
from rlxf.agents.decision_transformer.online_rounds import EpisodeCollector
from rlxf.agents.decision_transformer.replay_buffer import ReplayBuffer
from rlxf.envs import road_episodes
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.training import CheckpointFolder, CheckpointWriter, ResumeError
from rlxf.training.checkpoints import BackgroundWriter
from rlxf.training.states import get_rng_states
from tests.agents.decision_transformer.worlds import ACTIONS, small_agent, some_trajectories
from tests.agents.gtrxl.worlds import MIXED, TERMINATED, next_step_scripts, scripts, shifted
from tests.agents.trainings import InterruptedTrainingError, interrupt

CONDITIONINGS = {
    "target": TargetReturn(),
    "maximum": MaxReturn(),
    "elastic": ElasticHistory(),
    "sampled": SampledReturn(bins=5),
    "highest value": HighestValueReturn(candidates=3),
}
ROUNDS = {"n_envs": 2, "round_steps": 20, "round_updates": 2, "replay_episodes": 6}
CRITIC = QRegularized(hidden_sizes=(8,))


def roads_agent(conditioning="maximum", continuous=True, **changes):
    """Return an agent of the stitching maze, whose environments can be resumed."""
    core = decision_transformer(width=16, layers=1, dropout=0.1)
    settings = {"core": core, "objective": CRITIC, "seed": 0, "device": "cpu", "batch_size": 8}
    settings |= {"conditioning": CONDITIONINGS[conditioning], "learning_rate": 1e-3}
    return DecisionTransformer(road_episodes(4, 0, continuous), 4, **settings | changes)


def target_of(conditioning):
    """Return the arguments of `learn_online` that a conditioning needs."""
    return {"target_return": 1.0} if conditioning == "target" else {}


@pytest.mark.parametrize("continuous", [True, False], ids=["Box", "Discrete"])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_actor_and_critic_learn_online(conditioning, continuous):
    agent = roads_agent(conditioning, continuous)
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent.learn_online(40, **target_of(conditioning), **ROUNDS)
    assert (agent.num_timesteps, agent._n_updates) == (40, 4)
    moved = {
        name for name, value in agent.policy.state_dict().items() if not torch.equal(value, before[name])
    }
    for part in ("transformer", "loss.head", "loss.critic", "loss.target"):
        assert any(name.startswith(part) for name in moved), part
    assert agent.get_env() is None


def test_a_stochastic_policy_learns_online_from_predicted_returns():
    agent = roads_agent(objective=MaximumEntropy())
    agent.learn_online(40, **ROUNDS)
    assert agent._n_updates == 4


@pytest.mark.parametrize("name", ["Box", "Box of two axes", "Box without bounds"])
def test_noise_has_the_requested_deviation_and_bounds(name):
    """The deviation is in units of half the range, or absolute without bounds; actions are clipped."""
    space = ACTIONS[name]
    agent = small_agent(some_trajectories(action_space=space), conditioning=MaxReturn())
    observations, start = np.zeros((4000, 3), np.float32), np.ones(4000, np.bool_)
    exact, _ = agent.predict(observations, None, start)
    explored, state = agent.explore(observations, None, start, noise=0.02)
    half = np.where(np.isfinite(space.low), (space.high - space.low) / 2, 1.0)
    inside = (np.abs(exact[0] - space.low) > 0.2 * half) & (np.abs(space.high - exact[0]) > 0.2 * half)
    assert inside.any()
    deviation = ((explored - exact) / half).std(axis=0)
    np.testing.assert_allclose(deviation[inside], 0.02, rtol=0.1)
    wild, _ = agent.explore(observations, None, start, noise=5.0)
    assert space.contains(wild[0].astype(space.dtype))
    assert ((wild >= space.low) & (wild <= space.high)).all()
    again, _ = agent.explore(observations, None, start, noise=0.0)
    np.testing.assert_allclose(again, exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(state.actions[:, -1], torch.from_numpy(explored.reshape(4000, -1)))


@pytest.mark.parametrize("objective", [MaximumEntropy(), CRITIC], ids=["entropy", "critic"])
def test_stochastic_policies_explore_by_sampling(objective):
    observations, start = np.zeros((50, 3), np.float32), np.ones(50, np.bool_)
    agent = small_agent(
        some_trajectories(action_space=ACTIONS["Discrete"]), objective=objective, conditioning=MaxReturn()
    )
    torch.manual_seed(0)
    explored, _ = agent.explore(observations, None, start, noise=3.0)
    torch.manual_seed(0)
    sampled, _ = agent.predict(observations, None, start, deterministic=False)
    np.testing.assert_array_equal(explored, sampled)
    assert len(np.unique(explored)) > 1


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_collected_episodes_are_terminated_or_truncated_as_in_the_environment(mode):
    next_step = mode is AutoresetMode.NEXT_STEP
    env = as_vec_env(next_step_scripts(shifted(3))) if next_step else scripts(shifted(3))
    ends = np.zeros(4, bool)
    data = some_trajectories(env.observation_space, env.action_space, terminated=ends, truncated=~ends)
    agent = small_agent(data, conditioning=MaxReturn(), objective=CRITIC)
    collector, replay = EpisodeCollector(agent, env), ReplayBuffer(data, 100)
    expected, taken = [], np.zeros(3, np.int64)
    for _ in range(40):
        episodes, _, infos = collector.step()
        replay.extend(episodes)
        for e in range(3):
            if infos[e].get("filler", False):
                continue
            end = shifted(3)[e][taken[e] % len(MIXED)]
            taken[e] += 1
            expected += [end == TERMINATED] * bool(end)
    found = replay.trajectories()
    assert len(expected) > 8
    assert 0 < sum(expected) < len(expected)
    assert found.terminated.tolist() == [False] * 4 + expected
    assert found.truncated.tolist() == [True] * 4 + [not end for end in expected]


def test_the_replay_keeps_the_ends_of_the_data():
    data = some_trajectories(terminated=np.array([True, False, True, False]))
    best = np.argsort(data.returns)
    assert ReplayBuffer(data, 3).trajectories().terminated.tolist() == data.terminated[best[1:]].tolist()


class Bandit(gymnasium.Env):
    """Episodes of one step whose reward is the action."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action[0]), True, False, {}


@pytest.mark.thorough
def test_the_critic_moves_the_policy_to_actions_that_only_exploration_found():
    actions, rewards = np.random.default_rng(0).normal(-0.6, 0.05, (2, 60)).astype(np.float32)
    data = some_trajectories(
        observation_space=Bandit.observation_space,
        action_space=Bandit.action_space,
        lengths=(1,) * 60,
        observations=np.zeros((60, 1), np.float32),
        actions=actions[:, None],
        rewards=rewards,
        return_to_go=rewards,
    )
    core = decision_transformer(width=16, layers=1, dropout=0.0)
    objective = QRegularized(eta=0.5, hidden_sizes=(32,))
    agent = DecisionTransformer(
        data, 2, 3e-3, core=core, objective=objective, conditioning=MaxReturn(), seed=0, device="cpu"
    )
    agent.learn(50)
    before = agent.predict(np.zeros((1, 1), np.float32))[0].item()
    agent.learn_online(
        400, env=Bandit(), round_steps=50, round_updates=20, exploration_noise=0.3, replay_episodes=200
    )
    after = agent.predict(np.zeros((1, 1), np.float32))[0].item()
    assert before < 0
    assert after > before + 0.3


@pytest.fixture
def _in_foreground(monkeypatch):
    monkeypatch.setattr(BackgroundWriter, "start", lambda self, work: work())


@pytest.mark.first_cases(2)
@pytest.mark.usefixtures("_in_foreground")
@pytest.mark.parametrize(
    ("conditioning", "continuous"),
    [("maximum", True), ("elastic", True), ("target", True), ("sampled", False), ("maximum", False)],
)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(conditioning, continuous, tmp_path):
    online = target_of(conditioning) | ROUNDS
    whole = roads_agent(conditioning, continuous).learn_online(100, **online)
    expected = dict(whole.policy.state_dict()) | get_rng_states()
    stopped = interrupt(roads_agent(conditioning, continuous), 5)
    with pytest.raises(InterruptedTrainingError):
        stopped.learn_online(100, callback=CheckpointWriter(CheckpointFolder(tmp_path), 0), **online)
    torch.manual_seed(99)
    resumed = roads_agent(conditioning, continuous).learn_online(100, resume_from=tmp_path, **online)
    found = dict(resumed.policy.state_dict()) | get_rng_states()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.usefixtures("_in_foreground")
def test_a_changed_noise_is_refused(tmp_path):
    saving = CheckpointWriter(CheckpointFolder(tmp_path), 0)
    with pytest.raises(InterruptedTrainingError):
        interrupt(roads_agent(), 1).learn_online(60, callback=saving, **ROUNDS)
    with pytest.raises(ResumeError, match="its exploration_noise is"):
        roads_agent().learn_online(60, resume_from=tmp_path, exploration_noise=0.3, **ROUNDS)


def test_unsuitable_arguments_are_refused():
    explain = r"objective=MaximumEntropy\(\), whose policy is stochastic, or with QRegularized\(\)"
    for make, options, message in (
        (partial(roads_agent, "target"), {}, "got target_return=None: pass a return above"),
        (
            roads_agent,
            {"target_return": 1.0},
            r"conditioning=MaxReturn\(.*got target_return=1.0: leave it out",
        ),
        (roads_agent, {"exploration_noise": -0.1}, "exploration_noise must not be negative, got -0.1"),
        (roads_agent, {"exploration_noise": float("inf")}, "exploration_noise must be"),
        (partial(roads_agent, objective=None), {}, explain),
        (
            partial(roads_agent, objective=MaximumEntropy()),
            {"exploration_noise": 0.1},
            "exploration_noise=0.1 has no effect, because this policy samples its actions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make().learn_online(10, **options)
