"""Tests of resumed online fine-tuning, which is bitwise equal to an uninterrupted run."""

import signal

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer, online_finetuning
from rlxf.agents.decision_transformer.replay_buffer import REMOVALS, ReplayBuffer, Transitions
from rlxf.envs import make_vec_env
from rlxf.training import CheckpointError, CheckpointFolder, CheckpointWriter, ResumeError
from rlxf.training.checkpoints import BackgroundWriter
from rlxf.training.states import get_rng_states
from rlxf.utils.signals import StopRequest
from tests.agents.decision_transformer.test_resume import RecordingWriter
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.trainings import InterruptedTrainingError, interrupt

STEPS = 120
OPTIONS = {"target_return": 20.0, "n_envs": 3, "round_steps": 30, "round_updates": 3, "replay_episodes": 10}
ENVS = {
    "of the data": lambda: None,
    "id": lambda: "CartPole-v1",
    "VecEnv": lambda: make_vec_env("CartPole-v1", 3),
}


@pytest.fixture(autouse=True)
def _in_foreground(monkeypatch):
    monkeypatch.setattr(BackgroundWriter, "start", lambda self, work: work())


@pytest.fixture
def replays(monkeypatch):
    """Return a list of the replay buffers of all training runs, in order."""
    created = []

    class RecordedReplay(ReplayBuffer):
        def __init__(self, *args):
            super().__init__(*args)
            created.append(self)

    monkeypatch.setattr(online_finetuning, "ReplayBuffer", RecordedReplay)
    return created


@pytest.fixture
def fresh(cartpole):
    def make(**changes):
        core = decision_transformer(width=16, layers=1, heads=1, dropout=0.1)
        sizes = {"batch_size": 8, "core": core, "objective": MaximumEntropy(), "seed": 0, "device": "cpu"}
        agent = DecisionTransformer(cartpole, 4, **sizes | changes)
        agent.set_logger(Logger(None, [RecordingWriter()]))
        return agent

    return make


def interrupted(agent, folder, update, **changes):
    """Run a training that is interrupted before an update, with checkpoints in the folder."""
    interrupt(agent, update)
    with pytest.raises(InterruptedTrainingError):
        agent.learn_online(STEPS, callback=CheckpointWriter(CheckpointFolder(folder), 0), **OPTIONS | changes)
    agent._logger.output_formats[0].lines.clear()


def final_state(agent, replay):
    """Return the final state of a training run as tensors."""
    episodes = replay.trajectories()
    tensors = dict(agent.policy.state_dict()) | get_rng_states() | {"order": agent.generator.get_state()}
    tensors |= {f"trained {name}": value for name, value in agent._update.trained.state_dict().items()}
    for number, state in agent.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {number} {name}": torch.as_tensor(x) for name, x in state.items()}
    arrays = ("observations", "actions", "rewards", "return_to_go", "offsets")
    return tensors | {name: torch.from_numpy(getattr(episodes, name)) for name in arrays}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("update", "options"), [(0, {}), (1, {}), (4, {}), (11, {}), (4, {"weight_averaging": 0.8})]
)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(fresh, replays, tmp_path, update, options):
    """The comparison covers weights with the dual variable, optimizer, replay buffer and generators."""
    uninterrupted = fresh(**options)
    uninterrupted.learn_online(STEPS, **OPTIONS)
    expected, lines = final_state(uninterrupted, replays[-1]), uninterrupted.logger.output_formats[0].lines
    assert replays[-1].collected
    interrupted(fresh(**options), tmp_path, update)
    torch.manual_seed(99)  # a new process has other generator states
    resumed = fresh(**options)
    resumed.learn_online(STEPS, resume_from=tmp_path, **OPTIONS)
    assert_equal(final_state(resumed, replays[-1]), expected)
    assert "loss.log_temperature" in expected
    assert resumed.num_timesteps == uninterrupted.num_timesteps
    assert resumed._n_updates == uninterrupted._n_updates
    own = resumed.logger.output_formats[0].lines
    assert own == {step: line for step, line in lines.items() if step in own}
    assert own


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_resumption_supports_environments_of_every_kind(fresh, replays, tmp_path, env):
    uninterrupted = fresh()
    uninterrupted.learn_online(STEPS, env=seeded(env()), **OPTIONS)
    expected = final_state(uninterrupted, replays[-1])
    interrupted(fresh(), tmp_path, 7, env=seeded(env()))
    resumed = fresh()
    resumed.learn_online(STEPS, env=env(), resume_from=tmp_path, **OPTIONS)
    assert_equal(final_state(resumed, replays[-1]), expected)


def seeded(env):
    """Seed environments that are passed to the agent, which does not seed them."""
    if hasattr(env, "seed"):
        env.seed(3)
    return env


def test_a_run_stopped_by_a_signal_can_be_resumed(fresh, replays, tmp_path):
    uninterrupted = fresh().learn_online(STEPS, **OPTIONS)
    expected = final_state(uninterrupted, replays[-1])
    stop = StopRequest()
    saving = CheckpointWriter(CheckpointFolder(tmp_path), 999, stop=stop)
    stopped = fresh()

    def request_stop(*_):
        if stopped.num_timesteps == 60:
            stop.signal = signal.SIGTERM
        return True

    stopped.learn_online(STEPS, callback=[ConvertCallback(request_stop), saving], **OPTIONS)
    assert saving.stopped
    assert [file.name for file in saving.folder.files()] == ["step-000000000060.zip"]
    resumed = fresh().learn_online(STEPS, resume_from=tmp_path, **OPTIONS)
    assert_equal(final_state(resumed, replays[-1]), expected)


def test_environments_that_are_not_replayable_are_reset_with_a_warning(fresh, tmp_path):
    def plain():
        return DummyVecEnv([lambda: Monitor(CartPoleEnv())] * 3)

    interrupted(fresh(), tmp_path, 7, env=plain())
    resumed = fresh()
    with pytest.warns(UserWarning, match=r"environments are reset.*not wrapped in rlxf\.envs\.ActionReplay"):
        resumed.learn_online(STEPS, env=plain(), resume_from=tmp_path, **OPTIONS)
    assert resumed.num_timesteps == STEPS


@pytest.mark.parametrize("name", ["target_return", "round_steps", "round_updates", "replay_episodes"])
def test_changed_options_are_refused(fresh, tmp_path, name):
    interrupted(fresh(), tmp_path, 4)
    with pytest.raises(ResumeError, match=f"its {name} is"):
        fresh().learn_online(STEPS, resume_from=tmp_path, **OPTIONS | {name: OPTIONS[name] + 1})


def test_another_removal_from_the_replay_is_refused(fresh, tmp_path):
    interrupted(fresh(), tmp_path, 4)
    with pytest.raises(ResumeError, match="its replay_remove is"):
        fresh().learn_online(STEPS, resume_from=tmp_path, replay_remove="oldest", **OPTIONS)


def test_unsuitable_checkpoints_are_refused(fresh, tmp_path):
    interrupted(fresh(), tmp_path / "online", 4)
    with pytest.raises(
        ResumeError, match=r"written during learn_online: resume it with learn_online\(resume_from=\.\.\.\)"
    ):
        fresh().learn(STEPS, resume_from=tmp_path / "online")
    fresh().learn_online(
        STEPS, callback=CheckpointWriter(CheckpointFolder(tmp_path / "whole"), 999), **OPTIONS
    )
    with pytest.raises(ResumeError, match="has reached 120 already, got steps=120"):
        fresh().learn_online(STEPS, resume_from=tmp_path / "whole", **OPTIONS)
    fresh().learn(2, CheckpointWriter(CheckpointFolder(tmp_path / "offline"), 0))
    with pytest.raises(CheckpointError, match="was not written during learn_online"):
        fresh().learn_online(STEPS, resume_from=tmp_path / "offline", **OPTIONS)


@pytest.mark.parametrize("capacity", [2, 4, 6, 100])
@pytest.mark.parametrize("added", [0, 1, 3, 9])
@pytest.mark.parametrize("remove", REMOVALS)
def test_replay_round_trip(capacity, added, remove):
    data = some_trajectories()
    replay = ReplayBuffer(data, capacity, remove)
    for number in range(added):
        steps = slice(0, number % 3 + 1)
        rewards = np.full(number % 3 + 1, number, np.float32)
        ends = np.arange(len(rewards)) == len(rewards) - 1 + number % 2
        replay.extend([Transitions(data.observations[steps], data.actions[steps], rewards, ends)])
    restored = ReplayBuffer(data, capacity, remove)
    restored.load_state_dict(replay.state_dict())
    for name in ("observations", "actions", "rewards", "return_to_go", "offsets", "terminated", "truncated"):
        loaded, original = (getattr(each.trajectories(), name) for each in (restored, replay))
        np.testing.assert_array_equal(loaded, original)
    assert len(restored.collected) == len(replay.collected)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("remove", REMOVALS)
def test_replay_round_trip_of_equal_and_falling_returns_in_batches(remove, seed):
    data, rng = some_trajectories(), np.random.default_rng(seed)
    capacity = int(rng.integers(1, 8))
    replay = ReplayBuffer(data, capacity, remove)
    for _ in range(12):
        replay.extend([returning(data, *rng.integers([-3, 1], [4, 4])) for _ in range(rng.integers(4))])
        restored = ReplayBuffer(data, capacity, remove)
        restored.load_state_dict(replay.state_dict())
        for name in ("return_to_go", "offsets"):
            loaded, original = (getattr(each.trajectories(), name) for each in (restored, replay))
            np.testing.assert_array_equal(loaded, original)


def returning(data, value, length):
    """Return a terminated episode with this return and length; its first reward is the return."""
    rewards = np.zeros(length, np.float32)
    rewards[0] = 10 * value
    ends = np.arange(length) == length - 1
    return Transitions(data.observations[:length], data.actions[:length], rewards, ends)


def test_a_step_of_many_environments_may_complete_several_rounds(fresh, monkeypatch):
    """With 8 environments and rounds of 4 steps, each step is followed by the updates of two rounds."""
    agent, counts = fresh(), []
    train = agent.train
    monkeypatch.setattr(agent, "train", lambda *args: (counts.append(agent.num_timesteps), train(*args)))
    agent.learn_online(40, 20.0, n_envs=8, round_steps=4, round_updates=3, replay_episodes=10)
    assert [counts.count(step) for step in (8, 16, 24, 32, 40)] == [6] * 5
