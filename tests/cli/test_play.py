"""Tests of ``rlxf play``."""

import shutil
import sys
from unittest.mock import Mock

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import WrapperSpec
from gymnasium.wrappers import TransformObservation
from PIL import Image, ImageSequence

from rlxf.cli import main
from rlxf.cli.playback import Task, spec_without_probe
from rlxf.envs.make import make_env, make_vec_env
from rlxf.envs.specs import spec_of
from rlxf.envs.tmaze import TMaze
from rlxf.training import RunFolder
from tests.cli.running import refused
from tests.datasets import record_cartpole

IMAGES = ["--env-kwargs", '{"render_mode": "rgb_array"}']


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """Copy of a run on a T-Maze, on a machine without a display."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_states_are_printed_as_text_in_order(run, capsys):
    main(["play", "run", "--episodes", "2"])
    shown = capsys.readouterr().out
    first, rest = shown.split("episode 1: return ")
    second, rest = rest.split("episode 2: return ")
    steps = [int(text.partition(" in ")[2].split()[0]) for text in (second, rest)]
    assert [text.count("A") for text in (first, second)] == [steps[0] + 1, steps[1] + 1]
    assert rest.count("\n") == 1, "no state of a third episode is printed"


def test_returns_are_those_of_the_evaluation(run, capsys):
    main(["evaluate", "run", "--checkpoint", "last", "--episodes", "1", "--no-progress-bar"])
    mean = capsys.readouterr().out.split("mean return")[1].split("│")[1].split()[0]
    main(["play", "run"])
    assert f"return {mean} in" in capsys.readouterr().out


def test_images_are_written_as_a_gif(run, capsys):
    main(["play", "run", *IMAGES, "--fps", "5", "--episodes", "2"])
    shown = capsys.readouterr().out
    steps = [int(line.split()[-2]) for line in shown.splitlines() if "return" in line]
    with Image.open(run / "play.gif") as gif:
        assert gif.n_frames <= sum(steps) + 2
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert min(durations) == 200
    assert all(duration % 200 == 0 for duration in durations)  # equal frames in a row are one that is longer
    assert f"{sum(steps) + 2} frames are written to run/play.gif" in shown


def test_the_limit_of_frames_is_named(run, capsys, monkeypatch):
    monkeypatch.setattr("rlxf.evaluation.video.MAX_STEPS", 3)
    main(["play", "run", *IMAGES])
    assert "3 frames (the limit) are written to run/play.gif" in capsys.readouterr().out


def test_checkpoint_files_are_played_in_a_named_environment(run, capsys):
    task = ["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3, "render_mode": "rgb_array"}']
    main(["play", "run/best.zip", *task])
    assert (run / "best.gif").is_file()
    assert "pass --env ID" in refused(capsys, "play", "run/best.zip")
    message = refused(capsys, "play", "run/best.zip", *task, "--checkpoint", "best")
    assert "--checkpoint applies to the folder of a run" in message
    (run / "text.zip").write_text("text")
    assert "cannot read checkpoint run/text.zip" in refused(capsys, "play", "run/text.zip", *task)


def test_window_has_precedence_over_text_and_images(run, monkeypatch):
    task = Task.of_run(RunFolder.open(run), None, {}, False)
    assert task.mode(None) == "ansi"
    task = Task(task.spec, {}, ("human", "rgb_array"), 10)
    assert task.mode(None) == "rgb_array"
    monkeypatch.setenv("DISPLAY", ":0")
    assert task.mode(None) == "human"
    assert Task(task.spec, {}, (), 10).mode(None) is None


def test_missing_package_for_images_is_one_line(run, monkeypatch, capsys):
    def render(env):
        raise gymnasium.error.DependencyNotInstalled('pygame is missing; run `pip install "painter"`')

    monkeypatch.setattr(TMaze, "render", render)
    assert 'pip install "painter"' in refused(capsys, "play", "run", *IMAGES)


def test_bad_input_is_one_line(run, capsys):
    for words, message in (
        (["nowhere"], "there is no run folder nowhere"),
        (
            ["nowhere/run"],
            "there is no run folder nowhere/run and no checkpoint file of this name; check the",
        ),
        (["rnu"], "there is no run folder rnu and no checkpoint file of this name; did you mean run?"),
        (["run/checkpoin.zip"], "did you mean run/checkpoint.zip?"),
        (["none.zip"], "there is no run folder none.zip and no checkpoint file of this name"),
        (["run", "--episodes", "0"], "--episodes must be at least 1"),
        (["run", "--fps", "0"], "--fps must be from 0.01 to 1,000, got 0"),
        (["run", "--fps", "-1"], "--fps must be from 0.01 to 1,000, got -1"),
        (["run", "--fps", "0.001"], "--fps must be from 0.01 to 1,000, got 0.001"),
        (["run", "--fps", "nan"], "--fps must be from 0.01 to 1,000, got nan"),
        (["run", "--checkpoint", "validation"], "has no best-validation.zip"),
        (["run", "--env", "CartPole-v1"], "another observation space"),
        (["run", "--env-kwargs", "[1]"], "--env-kwargs must be a JSON object"),
        (["run", "--env-kwargs", '{"render_mode": 5}'], "render_mode must be one of ansi, rgb_array"),
        (["run", "--env-kwargs", '{"render_mode": "human"}'], "got 'human'"),
        (["run", "--env-kwargs", '{"length": 5}'], "takes no argument 'length'"),
    ):
        assert message in refused(capsys, "play", *words), words


def test_offline_agents_are_played(run, minari_root, capsys):
    record_cartpole(range(1, 5), "cartpole/random-v0")
    tiny = "--updates 2 --episodes 0 --context-length 4 --batch-size 4 --core.width 8 --core.layers 1 --quiet"
    main(["train", "dt", "--dataset", "cartpole/random-v0", "--run", "offline", *tiny.split()])
    main(["play", "offline"])
    assert "written to offline/play.gif" in capsys.readouterr().out


def test_the_task_of_a_run_keeps_the_wrappers_of_its_registration():
    """The wrappers of the vector environment, such as ``Monitor``, are left out."""
    sticky = WrapperSpec(
        "StickyAction", "gymnasium.wrappers:StickyAction", {"repeat_action_probability": 0.5}
    )
    gymnasium.register("StickyPole-v0", CartPoleEnv, additional_wrappers=(sticky,), max_episode_steps=9)
    try:
        env = make_vec_env("StickyPole-v0", 1, previous_reward=True)
        spec = spec_without_probe(spec_of(env))
        env.close()
        assert [wrapper.name for wrapper in spec.additional_wrappers] == ["StickyAction"]
        assert "StickyAction" in str(make_env(spec))
    finally:
        gymnasium.registry.pop("StickyPole-v0")


def test_the_probe_of_a_run_is_closed_on_errors(run, monkeypatch):
    env = Mock()
    env.get_attr.side_effect = RuntimeError
    monkeypatch.setattr("rlxf.cli.playback.make_env", lambda *_: env)
    with pytest.raises(RuntimeError):
        Task.of_run(RunFolder.open(run), None, {}, trust=False)
    env.close.assert_called_once()


def halved_pole():
    env = CartPoleEnv()
    return TransformObservation(env, lambda observation: observation / 2, env.observation_space)


def test_wrappers_of_an_entry_point_are_not_repeated():
    gymnasium.register("HalvedPole-v0", halved_pole, max_episode_steps=9)
    try:
        env = make_vec_env("HalvedPole-v0", 1)
        spec = spec_without_probe(spec_of(env))
        env.close()
        make_env(spec).close()
    finally:
        gymnasium.registry.pop("HalvedPole-v0")
