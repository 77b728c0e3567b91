"""What the command line has TensorBoard show beside curves."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.cli.looks import Looks
from rlxf.cli.task import Task
from rlxf.envs import TMaze
from rlxf.evaluation import VideoCallback
from tests.cli.running import TASK, TINY, refused, train

TMAZE = Task(env="rlxf/TMaze-v0", env_kwargs={"corridor_length": 3})


def callbacks(looks: Looks, task: Task = TMAZE) -> list:
    with looks.callbacks(task, every_steps=7) as made:
        return made


def test_by_default_all_of_it_is_shown():
    found = callbacks(Looks())
    assert [type(one) for one in found] == [
        AttentionMapCallback,
        MemoryCallback,
        HistogramCallback,
        VideoCallback,
    ]
    assert [one.every for one in found[:3]] == [100, 10, 20]
    assert found[3].every_steps == 7
    assert found[3].env.unwrapped.rules.corridor_length == 3


def test_each_of_it_can_be_left_out():
    none = {"attention_maps_every": None, "memory_every": None, "histograms_every": None, "videos": False}
    assert callbacks(Looks(**none)) == []
    for name in none:
        one_left = Looks(**{other: value for other, value in none.items() if other != name})
        assert len(callbacks(one_left)) == 1


def test_a_film_is_of_what_the_agent_sees():
    task = Task(env="CartPole-v1", previous_reward=True)
    film = callbacks(Looks(), task)[-1]
    assert film.env.observation_space == task.make(1, None).observation_space


def test_the_environment_of_a_film_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(TMaze, "close", lambda self: closed.append(self))
    with Looks().callbacks(TMAZE, every_steps=7) as made:
        assert not closed
    assert closed == [made[-1].env.unwrapped]


@pytest.mark.filterwarnings("ignore:.*render_mode='rgb_array' that is not in the possible")
def test_without_pictures_a_run_goes_on_and_says_why(capsys):
    assert len(callbacks(Looks(), Task(env="popgym-AutoencodeEasy-v0"))) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "no videos: popgym-AutoencodeEasy-v0 gives no pictures: " in said


def test_a_run_shows_it(finished):
    tags = EventAccumulator(str(finished)).Reload().Tags()
    assert set(tags["images"]) == {"attention/maps", "eval/video"}
    assert "weights/layer_1/attention" in tags["histograms"]
    assert "memory/layer_2/attended_distance" in tags["scalars"]


def test_hyperparameters_are_written_once(finished):
    (file,) = finished.glob("*tfevents*")
    tags = [value.tag for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    assert tags.count("_hparams_/session_start_info") == 1


def test_the_configuration_tells_it(finished):
    config = json.loads((finished / "config.json").read_text())
    assert (config["attention_maps_every"], config["memory_every"], config["videos"]) == (100, 10, True)


@pytest.mark.parametrize("option", ["attention-maps-every", "memory-every", "histograms-every"])
def test_less_than_one_is_refused_before_anything_is_made(option, capsys, tmp_path):
    message = refused(capsys, "train", "gtrxl", *TASK, *TINY, f"--{option}", "0")
    assert f"{option.replace('-', '_')} must be at least 1, got 0" in message
    assert not list(tmp_path.iterdir())


def test_what_is_shown_changes_nothing_that_is_learned(tmp_path):
    train("--run", "a", "--attention-maps-every", "1", "--videos", "--memory-every", "1")
    train("--run", "b", "--histograms-every", "None", "--memory-every", "None")
    assert (tmp_path / "a/checkpoint.zip").read_bytes() == (tmp_path / "b/checkpoint.zip").read_bytes()
