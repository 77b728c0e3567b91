"""Tests of videos and attention maps during trainings on datasets."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import ClipReward
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.agents.decision_transformer.callbacks import ContextAttentionCallback
from rlxf.cli import main
from rlxf.cli.commands import train_offline
from rlxf.cli.entry_point import parse
from rlxf.evaluation import VideoCallback
from rlxf.training import RunFolder
from rlxf.training.resumed_logger import STEP, read_rows
from tests.datasets import ID, random_episodes, record, record_cartpole

TRAINING = (
    *("--log-interval", "20", "--episodes", "2", "--evaluation-episodes", "2", "--context-length", "4"),
    *("--batch-size", "4", "--no-progress-bar", "--quiet"),
)
CORE = ["--core.width", "8", "--core.layers", "1", "--core.heads", "1"]


@pytest.fixture
def data(minari_root):
    """Id of a dataset of random numbers that names CartPole-v1 as its environment."""
    record_cartpole()
    return ID


def images(folder) -> dict[str, list[int]]:
    """Return the steps of the images in a run by tag."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]}


def callbacks(data: str, *words: str, tmp_path) -> list:
    """Return the callbacks of ``rlxf train`` with these options."""
    command = parse(["train", *words, "--dataset", data, *TRAINING])
    agent = command.build()
    with command.callbacks(agent, RunFolder(tmp_path / "run", {})) as found:
        return found


def test_pictures_are_written_and_do_not_affect_the_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_offline, "FEWEST_UPDATES_PER_MAP", 30)
    options = [*TRAINING, *CORE, "--dataset", data, "--updates", "100", "--evaluate-every", "45"]
    main(["train", "dt", *options, "--run", "shown"])
    main(["train", "dt", *options, "--run", "bare", "--no-videos", "--no-attention-maps"])
    assert images("shown") == {"eval/video": [45, 90], "attention/maps": [30, 60, 90]}
    assert images("bare") == {}
    for file in ("checkpoint.zip", "best.zip"):
        assert (tmp_path / "shown" / file).read_bytes() == (tmp_path / "bare" / file).read_bytes()
    steps = [[row[STEP] for row in read_rows(Path(name, "progress.csv"))] for name in ("shown", "bare")]
    assert steps[0] == steps[1]
    config = json.loads((tmp_path / "bare/config.json").read_text())
    assert (config["videos"], config["attention_maps"]) == (False, False)


def test_maps_do_not_need_evaluations(data, monkeypatch):
    monkeypatch.setattr(train_offline, "FEWEST_UPDATES_PER_MAP", 30)
    options = [*TRAINING, *CORE, "--dataset", data, "--updates", "60", "--episodes", "0"]
    main(["train", "dt", *options, "--run", "run"])
    assert images("run") == {"attention/maps": [30, 60]}


@pytest.mark.parametrize(
    ("words", "target"),
    [(("dt", *CORE), True), (("dt", *CORE, "--conditioning", "max-return"), False), (("bc",), False)],
)
def test_videos_have_the_target_and_the_environment_of_evaluations(words, target, data, tmp_path):
    (video,) = [
        each
        for each in callbacks(data, *words, "--updates", "100000", tmp_path=tmp_path)
        if isinstance(each, VideoCallback)
    ]
    assert (video.target_return is not None) == target
    assert (video.every_steps, video.env.unwrapped.spec.id) == (10_000, "CartPole-v1")
    assert video.episode_length == 6.25  # mean of the data
    assert video.budget is not None


def test_short_trainings_have_no_pictures(data, tmp_path):
    found = callbacks(data, "dt", *CORE, "--updates", "20", tmp_path=tmp_path)
    assert not any(isinstance(each, VideoCallback) for each in found)
    (maps,) = [each for each in found if isinstance(each, ContextAttentionCallback)]
    assert not maps.is_due(20)


def test_an_environment_that_cannot_render_is_named(data, tmp_path, capsys, monkeypatch):
    def found() -> list:
        return callbacks(data, "bc", "--updates", "100000", tmp_path=tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(CartPoleEnv, "render", lambda self: 1 / 0)
        assert not any(isinstance(each, VideoCallback) for each in found())
        assert "no videos: CartPole-v1 cannot render images: " in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(CartPoleEnv, "metadata", {"render_modes": []})
    assert not any(isinstance(each, VideoCallback) for each in found())
    assert "no videos: CartPole-v1 has no render mode rgb_array" in capsys.readouterr().out


def test_wrappers_of_trusted_data_are_in_videos(minari_root, tmp_path):
    env = ClipReward(gymnasium.make("CartPole-v1"), 0.0, 0.5)
    bounds = np.array([4.8, 5, 0.4, 5], np.float32)
    episodes = random_episodes((9, 3), spaces.Box(-bounds, bounds), env.action_space, 0)
    record(episodes, ID, env.observation_space, env.action_space, env=env)
    options = ("bc", "--updates", "100000", "--trust-data")
    (video,) = [
        each for each in callbacks(ID, *options, tmp_path=tmp_path) if isinstance(each, VideoCallback)
    ]
    video.env.reset(seed=0)
    assert video.env.step(0)[1] == 0.5
