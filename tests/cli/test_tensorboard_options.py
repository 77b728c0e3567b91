"""Tests of the options for attention maps, memory metrics, histograms and videos in TensorBoard."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.cli.commands.train_gtrxl import TensorBoardOptions
from rlxf.cli.env_options import EnvOptions
from rlxf.envs import TMaze
from rlxf.evaluation import VideoCallback
from tests.cli.running import TASK, TINY, refused, train

TMAZE = EnvOptions(env="rlxf/TMaze-v0", env_kwargs={"corridor_length": 3})


def make_callbacks(options: TensorBoardOptions, task: EnvOptions = TMAZE) -> list:
    with options.callbacks(task, every_steps=7) as callbacks:
        return callbacks


def test_default_callbacks():
    callbacks = make_callbacks(TensorBoardOptions())
    assert [type(callback) for callback in callbacks] == [
        AttentionMapCallback,
        MemoryCallback,
        HistogramCallback,
        VideoCallback,
    ]
    assert [callback.every_rollouts for callback in callbacks[:3]] == [20, 10, 20]
    assert callbacks[3].every_steps == 7
    assert callbacks[3].env.unwrapped.rules.corridor_length == 3


def test_each_callback_can_be_turned_off():
    none = {"attention_maps_every": None, "memory_every": None, "histograms_every": None, "videos": False}
    assert make_callbacks(TensorBoardOptions(**none)) == []
    for name in none:
        one_enabled = TensorBoardOptions(**{other: value for other, value in none.items() if other != name})
        assert len(make_callbacks(one_enabled)) == 1


def test_videos_use_the_observations_of_the_agent():
    task = EnvOptions(env="CartPole-v1", previous_reward=True)
    video = make_callbacks(TensorBoardOptions(), task)[-1]
    assert video.env.observation_space == task.make(1, None).observation_space


def test_the_environment_of_videos_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(TMaze, "close", lambda self: closed.append(self))
    with TensorBoardOptions().callbacks(TMAZE, every_steps=7) as callbacks:
        assert not closed
    assert closed == [callbacks[-1].env.unwrapped]


def test_missing_rendering_disables_videos_with_a_message(capsys):
    assert len(make_callbacks(TensorBoardOptions(), EnvOptions(env="popgym-AutoencodeEasy-v0"))) == 3
    expected = "no videos: popgym-AutoencodeEasy-v0 has no render mode rgb_array\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("reason", ["no fonts", "an OpenGL platform library has not been loaded"])
def test_failed_rendering_disables_videos_with_a_message(capsys, monkeypatch, reason):
    def render(self):
        raise RuntimeError(reason)

    monkeypatch.setattr(TMaze, "render", render)
    assert len(make_callbacks(TensorBoardOptions(), TMAZE)) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "no videos: rlxf/TMaze-v0 cannot render images: " in shown
    assert reason in shown
    assert ("set MUJOCO_GL=egl" in shown) == ("OpenGL" in reason)


def test_a_run_writes_the_output_of_the_callbacks(finished):
    tags = EventAccumulator(str(finished)).Reload().Tags()
    assert set(tags["images"]) == {"attention/maps", "eval/video"}
    assert "weights/layer_1/attention" in tags["histograms"]
    assert "memory/layer_2/attended_distance" in tags["scalars"]


def test_hyperparameters_are_written_once(finished):
    events = [event for file in finished.glob("*tfevents*") for event in EventFileLoader(str(file)).Load()]
    tags = [value.tag for event in events for value in event.summary.value]
    assert tags.count("_hparams_/session_start_info") == 1


def test_the_configuration_contains_the_options(finished):
    config = json.loads((finished / "config.json").read_text())
    assert (config["attention_maps_every"], config["memory_every"], config["videos"]) == (20, 10, True)


@pytest.mark.parametrize("option", ["attention-maps-every", "memory-every", "histograms-every"])
def test_intervals_below_one_are_rejected(option, capsys, tmp_path):
    message = refused(capsys, "train", "gtrxl", *TASK, *TINY, f"--{option}", "0")
    assert f"--{option} must be at least 1, got 0" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_callbacks_do_not_affect_training(tmp_path):
    train("--run", "a", "--attention-maps-every", "1", "--videos", "--memory-every", "1")
    train("--run", "b", "--histograms-every", "None", "--memory-every", "None")
    assert (tmp_path / "a/checkpoint.zip").read_bytes() == (tmp_path / "b/checkpoint.zip").read_bytes()


def test_a_run_has_its_command_configuration_and_layout(finished):
    events = EventAccumulator(str(finished)).Reload()
    tags = events.Tags()["tensors"]
    assert {"run/command/text_summary", "run/configuration/text_summary", "custom_scalars__config__"} <= set(
        tags
    )
    (command,) = events.Tensors("run/command/text_summary")
    shown = command.tensor_proto.string_val[0].decode().strip()
    assert shown.startswith("rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{\"corridor_length\": 3}'")
    (configuration,) = events.Tensors("run/configuration/text_summary")
    assert "| gamma | 0.99 |" in configuration.tensor_proto.string_val[0].decode()
