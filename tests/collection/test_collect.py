"""Recorded datasets, read with Minari and with `load_trajectories`."""

import os
import resource
from unittest.mock import Mock

import gymnasium
import minari
import numpy as np
import pytest
import scipy.stats
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.collection import collect, storage
from rlxf.collection.recording import Recorder
from rlxf.data import ReferenceScores, load_trajectories, reference_scores
from rlxf.envs import Curriculum, FaultyEnvironmentError, ReturnToGo, make_vec_env
from rlxf.envs.sb3_vec_env import make_sync_vec_env
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent
from tests.collection.worlds import Diary, Failing, Noise, Pointer
from tests.evaluation.worlds import ActionRewardEnv, TargetFollower, vec

ID = "test/diary-v0"
SCALE = ReferenceScores(0.0, 10.0, "here")


@pytest.fixture(autouse=True)
def _root(minari_root):
    return minari_root


pytestmark = pytest.mark.filterwarnings("ignore:.* the dataset is stored without an environment")


def record(agent=None, env=None, episodes=8, **options):
    env = vec(Diary(), Diary()) if env is None else env
    options = {"reference_scores": SCALE} | options
    return collect(agent, env, ID, episodes, **options)


def check_diary(episode, number):
    """Check an episode of `Diary` played by `Pointer`."""
    length = number + 2
    last = np.arange(length) == length - 1
    np.testing.assert_array_equal(episode.observations, [[number, time] for time in range(length + 1)])
    np.testing.assert_array_equal(episode.actions[:, 0], np.arange(length))
    np.testing.assert_array_equal(episode.rewards, np.arange(length))
    np.testing.assert_array_equal(episode.terminations, last & (number % 2 == 0))
    np.testing.assert_array_equal(episode.truncations, last & (number % 2 == 1))


def numbers(dataset):
    return [int(episode.observations[0, 0]) for episode in dataset.iterate_episodes()]


# Content


def test_relative_datasets_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "runs/datasets")
    record(Pointer())
    assert sorted(numbers(minari.load_dataset(ID))) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert load_trajectories(ID).episodes == 8
    assert not list((tmp_path / "runs/datasets").glob(".temporary-*"))


def test_every_step_of_every_episode_is_recorded():
    dataset = record(Pointer())
    assert sorted(numbers(dataset)) == [0, 0, 1, 1, 2, 2, 3, 3]
    for episode in dataset.iterate_episodes():
        check_diary(episode, int(episode.observations[0, 0]))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_gymnasium_vector_environments_with_both_autoreset_modes(mode):
    dataset = record(Pointer(), SyncVectorEnv([Diary, Diary], autoreset_mode=mode))
    assert sorted(numbers(dataset)) == [0, 0, 1, 1, 2, 2, 3, 3]
    for episode in dataset.iterate_episodes():
        check_diary(episode, int(episode.observations[0, 0]))


def test_dict_observations_are_recorded_by_key():
    dataset = record(Pointer(), vec(Diary(as_dict=True)), episodes=3)
    for number, episode in enumerate(dataset.iterate_episodes()):
        np.testing.assert_array_equal(episode.observations["page"][:, 1], np.arange(number + 3))
        np.testing.assert_array_equal(episode.observations["mark"], np.arange(number + 3) % 3)


@pytest.mark.parametrize("as_dict", [False, True])
def test_floats_are_stored_in_single_precision(as_dict):
    dataset = record(env=vec(Diary(as_dict)), episodes=1)
    stored = next(dataset.iterate_episodes()).observations
    page = stored["page"] if as_dict else stored
    assert page.dtype == np.float32
    space = dataset.observation_space["page"] if as_dict else dataset.observation_space
    assert space.dtype == np.float32


def picture(time):
    return np.random.default_rng(time).integers(0, 256, (36, 36, 3), dtype=np.uint8)


def test_images_are_stored_losslessly():
    class Noise(Diary):
        def __init__(self):
            super().__init__()
            self.observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 3), np.uint8)

        def look(self):
            return picture(self.time)

    dataset = record(env=vec(Noise()), episodes=1)
    observations = next(dataset.iterate_episodes()).observations
    for time, image in enumerate(observations):
        np.testing.assert_array_equal(image, picture(time))
    assert not load_trajectories(dataset).lossy_images


def test_load_trajectories_reads_the_dataset():
    data = load_trajectories(record(Pointer()))
    assert sorted(data.lengths) == [2, 2, 3, 3, 4, 4, 5, 5]
    assert data.returns.sum() == sum(range(2)) * 2 + sum(range(3)) * 2 + sum(range(4)) * 2 + sum(range(5)) * 2
    assert data.terminated.sum() == data.truncated.sum() == 4


def test_dataset_has_raw_observations_if_the_agent_needs_normalized_ones():
    train_env = VecNormalize(vec(Diary(), Diary()))
    agent = PPO("MlpPolicy", train_env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)
    observations = []
    predict = agent.predict
    agent.predict = lambda obs, *rest: observations.append(obs) or predict(obs, *rest)
    dataset = record(agent, vec(Diary()), episodes=3)
    assert numbers(dataset) == [0, 1, 2]
    first = train_env.normalize_obs(np.array([[0.0, 0.0]]))
    np.testing.assert_allclose(observations[0], first, rtol=1e-5)
    assert not np.allclose(first, 0)


@pytest.mark.parametrize(
    ("algorithm", "policy", "options"),
    [
        (PPO, "MlpPolicy", {"n_steps": 8, "batch_size": 8}),
        (RecurrentPPO, "MlpLstmPolicy", {"n_steps": 8, "batch_size": 8}),
        (
            GTrXLPPO,
            "MlpGTrXLPolicy",
            {"n_steps": 8, "segment_length": 8, "memory_length": 4, "batch_size": 8},
        ),
    ],
    ids=["PPO", "RecurrentPPO", "GTrXLPPO"],
)
def test_recorded_actions_equal_predictions(algorithm, policy, options):
    """A deterministic agent, called with its state for each observation, gives the recorded actions."""
    agent = algorithm(policy, make_vec_env("CartPole-v1", 1), seed=0, device="cpu", **options)
    dataset = collect(agent, "CartPole-v1", ID, 3, deterministic=True, seed=5, reference_scores=SCALE)
    state, start = None, np.ones(1, bool)
    for episode in sorted(dataset.iterate_episodes(), key=lambda episode: episode.id):
        state, start = None, np.ones(1, bool)
        for observation, action in zip(episode.observations, episode.actions, strict=False):
            expected, state = agent.predict(observation[None], state, start, deterministic=True)
            assert expected[0] == action
            start = np.zeros(1, bool)


@pytest.mark.parametrize("algorithm", [PPO, GTrXLPPO])
@pytest.mark.parametrize(
    "space",
    [gymnasium.spaces.MultiBinary(3), gymnasium.spaces.Box(-1, 1, (3,), np.float16)],
    ids=["MultiBinary", "float16"],
)
def test_actions_are_stored_in_the_dtype_of_their_space(algorithm, space):
    env = vec(Diary())
    env.action_space = env.envs[0].action_space = space
    agent = algorithm("MlpPolicy", env, n_steps=128, batch_size=128, device="cpu")
    dataset = record(agent, env, episodes=2)
    assert dataset[0].actions.dtype == space.dtype
    load_trajectories(dataset)


def test_recorded_actions_are_those_of_the_environments():
    env = vec(Diary())
    env.action_space = env.envs[0].action_space = gymnasium.spaces.Box(0, 10, (1,), np.int64)
    received, step_async = [], env.step_async
    env.step_async = lambda actions: (received.append(actions.copy()), step_async(actions))
    recorder = Recorder(env)
    recorder.reset()
    recorder.step(np.array([[2.7]]))
    assert received[0].dtype == np.int64
    assert received[0].tolist() == recorder._actions.tolist() == [[2]]


class CountedDiary(Diary):
    """`Diary` that counts its steps."""

    steps = 0

    def step(self, action):
        self.steps += 1
        return super().step(action)


def test_environments_are_paused_after_their_last_episode():
    env = make_sync_vec_env([CountedDiary, CountedDiary])
    dataset = record(Pointer(), env, episodes=5)
    assert sorted(numbers(dataset)) == [0, 0, 1, 1, 2]
    assert env.get_attr("steps") == [2 + 3, 2 + 3 + 4]
    env.reset()
    env.step(np.zeros((2, 1)))
    assert env.get_attr("steps") == [2 + 3 + 1, 2 + 3 + 4 + 1]


def test_environments_without_an_episode_to_record_take_no_steps():
    env = make_sync_vec_env([CountedDiary, CountedDiary, CountedDiary])
    record(Pointer(), env, episodes=1)
    assert sorted(env.get_attr("steps")) == [0, 0, 2]


def test_an_agent_with_a_compiled_step_acts_for_all_environments():
    class Compiled(Pointer):
        has_compiled_step = True

        def predict(self, observation, *rest):
            assert len(observation) == 2
            return super().predict(observation, *rest)

    record(Compiled(), make_sync_vec_env([Diary, Diary]), episodes=5, mix=(0.0, 0.5))


@pytest.mark.parametrize("action", [40.1, -np.inf, np.nan])
def test_actions_outside_of_their_space_are_refused(action, minari_root):
    class Wrong(Pointer):
        def predict(self, observation, *rest):
            actions, state = super().predict(observation, *rest)
            return np.where(actions == 2, action, actions), state

    with pytest.raises(ValueError, match=r"an action is \[.*\], outside of Box\(-40.0, 40.0"):
        record(Wrong())
    assert not list(minari_root.iterdir())


def test_actions_are_checked_while_reference_scores_are_measured(minari_root):
    agent = Pointer()
    agent.predict = Mock(return_value=(np.full(1, 2), None))
    with pytest.raises(ValueError, match="an action holds 2, which is not in its space Discrete"):
        record(agent, "CartPole-v1", episodes=1, reference_scores=None)
    assert agent.predict.call_count == 1


# Behavior policies


@pytest.mark.thorough
def test_fraction_of_random_actions():
    dataset = record(Pointer(), vec(*(Diary() for _ in range(10))), episodes=300, mix=(0, 0.3, 1))
    is_random = [
        episode.actions[:, 0] != np.arange(len(episode.actions)) for episode in dataset.iterate_episodes()
    ]
    fractions = [np.concatenate(is_random[start : start + 100]).mean() for start in (0, 100, 200)]
    assert fractions[0] == 0
    assert 0.25 < fractions[1] < 0.35
    assert fractions[2] > 0.99


@pytest.mark.parametrize("n_envs", [1, 32])
def test_random_actions_are_uniform_and_independent_of_the_environment(n_envs):
    """Correlations of 2,000 independent numbers are below 0.1 except with probability 1e-5."""

    class WithinBounds(Pointer):
        def predict(self, observation, *rest):
            actions, state = super().predict(observation, *rest)
            return actions % 4, state

    envs = vec(*(Noise(1000 // n_envs) for _ in range(n_envs)))
    dataset = record(WithinBounds(), envs, episodes=4 * n_envs, mix=(0.5, 1.0), seed=3)
    episodes = [*dataset.iterate_episodes()]
    actions = np.concatenate([episode.actions[:, 0] for episode in episodes])
    rewards = np.concatenate([episode.rewards for episode in episodes])
    is_random = actions % 1 != 0  # the actions of the agent are whole numbers
    drawn = actions[is_random]
    assert scipy.stats.kstest(drawn, "uniform", (-4, 8)).pvalue > 1e-4
    assert abs(np.corrcoef(drawn, rewards[is_random])[0, 1]) < 0.1
    assert abs(np.corrcoef(is_random, rewards)[0, 1]) < 0.1


def test_several_agents_play_an_equal_number_of_episodes():
    first, second = Pointer(), Pointer()
    dataset = record([first, None, second], episodes=9)
    assert first.calls > 0
    assert second.calls > 0
    by_agent = [
        (episode.actions[:, 0] == np.arange(len(episode.actions))).all()
        for episode in dataset.iterate_episodes()
    ]
    assert by_agent == [True] * 3 + [False] * 3 + [True] * 3


def test_agent_is_not_called_if_all_actions_are_random():
    agent = Pointer()
    record(agent, mix=(1,))
    assert agent.calls == 0


def test_return_conditioned_agent_is_recorded_for_each_target():
    dataset = record(
        TargetFollower(), vec(ActionRewardEnv(), ActionRewardEnv()), episodes=6, target_returns=[3, 1, 2]
    )
    returns = [episode.rewards.sum() for episode in dataset.iterate_episodes()]
    assert returns == pytest.approx([3, 3, 1, 1, 2, 2])
    assert "2 episodes of TargetFollower with target return 3" in dataset.storage.metadata["description"]
    space, inner = dataset.observation_space, ActionRewardEnv().observation_space
    assert (space, dataset.action_space) == (inner, ActionRewardEnv().action_space)


# Seeds


def test_seed_determines_the_dataset():
    def actions(name, seed):
        agent = PPO("MlpPolicy", "CartPole-v1", seed=0, n_steps=8, batch_size=8, device="cpu")
        dataset = collect(
            agent, "CartPole-v1", f"test/{name}-v0", 6, mix=(0, 0.5), seed=seed, reference_scores=SCALE
        )
        return [episode.actions.tolist() for episode in dataset.iterate_episodes()]

    first = actions("a", 1)
    assert first == actions("b", 1)
    assert first != actions("c", 2)


def test_a_seed_of_numpy_with_a_single_environment():
    dataset = record(None, Diary(), episodes=2, seed=np.int64(5))
    assert "seed 5" in dataset.storage.metadata["description"]


# Metadata


def test_metadata_describe_the_policies():
    dataset = record(
        Pointer(), "rlxf-test/Diary-v0", mix=(0, 0.5), seed=3, author="Ada", reference_scores=None, n_envs=2
    )
    metadata = dataset.storage.metadata
    assert dataset.id == ID
    assert dataset.env_spec.id == "rlxf-test/Diary-v0"
    assert metadata["author"] == {"Ada"}
    assert metadata["algorithm_name"] == "Pointer"
    assert metadata["data_format"] == "hdf5"
    assert (
        "4 episodes of Pointer; 4 episodes of Pointer with 0.5 of random actions" in metadata["description"]
    )
    assert "seed 3" in metadata["description"]


def test_reference_scores_are_mean_returns_of_random_policy_and_agent():
    env = vec(*(gymnasium.make("rlxf-test/Diary-v0") for _ in range(4)))
    dataset = record(Pointer(), env, reference_scores=None)
    scores = reference_scores(dataset.storage.metadata, dataset.env_spec)
    lengths = np.tile(np.arange(25) + 2, 4)  # 100 episodes, 25 of each environment
    assert scores.maximum == pytest.approx((lengths * (lengths - 1) / 2).mean())
    assert abs(scores.minimum) < scores.maximum / 2
    assert "Pointer over 100 episodes" in dataset.storage.metadata["description"]
    assert minari.get_normalized_score(dataset, np.array(scores.maximum)) == pytest.approx(1)


def test_given_reference_scores_are_stored():
    scores = reference_scores(record(Pointer()).storage.metadata, None)
    assert (scores.minimum, scores.maximum) == (0, 10)


def test_random_policy_has_no_reference_scores():
    assert "ref_max_score" not in record(None, reference_scores=None).storage.metadata


def test_environment_can_be_recreated():
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 3})
    dataset = record(None, env, episodes=2)
    assert dataset.recover_environment().unwrapped.rules.corridor_length == 3
    other = make_vec_env("CartPole-v1", 2, wrapper_class=gymnasium.wrappers.FlattenObservation)
    dataset = collect(None, other, "test/cartpole-v0", 2, reference_scores=SCALE)
    assert dataset.env_spec.id == "CartPole-v1"


def test_environment_that_cannot_be_recreated_warns():
    with pytest.warns(
        UserWarning, match="the environment has no spec, as it was not created from an id: the"
    ):
        dataset = record(Pointer())
    gymnasium.register("test/Local-v0", entry_point=Diary)
    with pytest.warns(UserWarning, match="the spec of the environment does not recreate it .*callables"):
        collect(None, "test/Local-v0", "test/local-v0", 2, reference_scores=SCALE)
    assert dataset.env_spec is None
    assert len(load_trajectories(dataset).lengths) == 8


def test_a_spec_that_raises_warns():
    class Broken(Diary):
        @property
        def spec(self):
            raise RuntimeError("no spec today")

        @spec.setter
        def spec(self, value):
            pass

    with pytest.warns(UserWarning, match="does not recreate it .*no spec today.*is stored without"):
        record(Pointer(), DummyVecEnv([Broken]))


def test_progress_bar_counts_episodes(capsys):
    record(Pointer(), progress_bar=True)
    assert "8/8" in capsys.readouterr().out


# Errors


def folders(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "an environment failed: RuntimeError.*the engine stalled"),
        ("observation", "observation of step 3 of an episode is NaN or infinite"),
        ("reward", "reward of step 2 of an episode is NaN or infinite"),
    ],
)
def test_failing_environment_leaves_no_files(how, message, minari_root):
    with pytest.raises(FaultyEnvironmentError, match=message):
        record(Pointer(), vec(Failing(how)))
    assert folders(minari_root) == []


@pytest.mark.faults
@pytest.mark.parametrize("limit", [1, 20_000, 300_000])
def test_full_disk_leaves_no_files(limit, minari_root):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the kernel rejects larger files
    try:
        with pytest.raises(OSError, match=rf"cannot write dataset {ID} to .*its files were removed"):
            record(None, episodes=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folders(minari_root) == []


@pytest.mark.faults
def test_keyboard_interrupt_leaves_no_files(minari_root):
    class Interrupted(Pointer):
        def predict(self, *args, **kwargs):
            if self.calls == 5:
                raise KeyboardInterrupt
            return super().predict(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        record(Interrupted())
    assert folders(minari_root) == []


def test_existing_dataset_is_not_changed():
    before = record(Pointer(), episodes=2)
    agent = Pointer()
    with pytest.raises(FileExistsError, match=f"dataset {ID} exists"):
        record(agent)
    assert agent.calls == 0
    assert minari.load_dataset(ID).total_episodes == before.total_episodes == 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"episodes": 0}, ValueError, "episodes must be at least 1, .*got 0"),
        ({"episodes": 2, "mix": (0, 0.5, 1)}, ValueError, "episodes must be at least 3, .*got 2"),
        ({"mix": ()}, ValueError, "at least one fraction of random actions, from 0 to 1, got none"),
        ({"mix": (0, 1.5)}, ValueError, "from 0 to 1, got 1.5"),
        ({"n_envs": 0}, ValueError, "n_envs must be at least 1, got 0"),
        ({"episodes": 1.5}, TypeError, "episodes must be a whole number, got 1.5"),
        ({"seed": None}, TypeError, "seed must be a whole number, got None"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"mix": 0.5}, TypeError, r"mix must be a sequence of fractions, such as \(0, 0.5\), got 0.5"),
        ({"agent": object()}, TypeError, "must have predict"),
        ({"agent": []}, ValueError, r"no agent to record: got agents \[\]"),
        ({"target_returns": (1, np.nan)}, ValueError, "finite numbers"),
        ({"env": "Nope-v0"}, ValueError, "Nope-v0"),
        ({"env": Diary}, TypeError, r"got <class .*; pass make_vec_env\(FUNCTION_OR_CLASS, n_envs\)"),
        ({"env": VecNormalize(DummyVecEnv([Diary]))}, ValueError, "without VecNormalize"),
        ({"env": ReturnToGo(DummyVecEnv([Diary]), 5)}, ValueError, "env has a ReturnToGo, .* target_returns"),
    ],
)
def test_invalid_arguments_raise(given, error, message, minari_root):
    with pytest.raises(error, match=message):
        record(**({"agent": Pointer()} | given))
    assert folders(minari_root) == []


def test_an_agent_that_is_conditioned_on_a_return_needs_a_target(minari_root):
    data = load_trajectories(record(Pointer()))
    agent = DecisionTransformer(data, context_length=2, device="cpu")
    minari.delete_dataset(ID)
    with pytest.raises(TypeError, match="is conditioned on a return: pass target_returns, such as"):
        record(agent)


def test_the_task_of_a_curriculum_is_its_last_stage():
    """A dataset names the task with the arguments of this stage."""
    curriculum = Curriculum([{"corridor_length": 1}], advance_return=-100.0, episodes=1)
    env = make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 20}, curriculum=curriculum)
    data = load_trajectories(collect(None, env, ID, episodes=4))
    assert data.env_spec.kwargs["corridor_length"] == 20
    assert set(data.lengths) == {21}
    assert env.get_attr("stage") == [1, 1]


def test_training_begins_new_episodes_after_a_recording_in_its_environments():
    agent = small_agent(scripts(shifted(2)), n_envs=2)
    agent.learn(32)
    agent.discard_episodes = Mock(wraps=agent.discard_episodes)
    collect(agent, scripts(shifted(2)), ID, episodes=3, reference_scores=SCALE)
    agent.discard_episodes.assert_not_called()
    collect(agent, agent.get_env(), "test/own-v0", episodes=3, reference_scores=SCALE)
    agent.discard_episodes.assert_called_once()


@pytest.mark.parametrize("wrong", ["my data", "a/data-v0"], ids=["no version", "short namespace"])
def test_invalid_id_raises(wrong):
    message = f"'{wrong}' is not a Minari id; write namespace/name-v0, .*; a namespace has at least two char"
    with pytest.raises(ValueError, match=message):
        collect(None, "CartPole-v1", wrong, 1)


def test_a_recording_of_another_process_is_named(monkeypatch, minari_root):
    """Another process records the same dataset, between the check and the end."""
    first, folder, publish = record(Pointer(), episodes=2), minari_root / ID, storage._publish
    moved = folder.rename(folder.with_name("moved"))

    def late(own, dataset_id):
        moved.rename(folder)
        publish(own, dataset_id)

    monkeypatch.setattr(storage, "_publish", late)
    with pytest.raises(FileExistsError, match=f"dataset {ID} exists"):
        record(Pointer())
    assert minari.load_dataset(ID).total_episodes == first.total_episodes


def test_folders_of_killed_recordings_are_removed(minari_root):
    record(Pointer(), episodes=2)
    old = minari_root / ".rlxf-0123456789abcdef0123456789abcdef.tmp"
    (old / "dataset").mkdir(parents=True)
    for path in (old / "dataset", old):
        os.utime(path, (0, 0))
    minari.delete_dataset(ID)
    record(Pointer(), episodes=2)
    assert not old.exists()


def test_an_agent_like_the_random_policy_gives_no_reference_scores():
    with pytest.warns(UserWarning, match="is not clearly above that of random actions.*without reference"):
        dataset = collect(Still(), DummyVecEnv([lambda: Noise(3)]), ID, 3)
    assert "ref_max_score" not in dataset.storage.metadata


class Still:
    """Agent that does not move."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.zeros((len(observation), 1), np.float32), state
