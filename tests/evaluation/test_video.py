"""Videos of episodes: frames, output and errors."""

import os
import subprocess
import sys
from io import BytesIO

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image
from stable_baselines3.common.logger import Video, configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.evaluation import video as video_module
from rlxf.evaluation.video import (
    MAX_FRAME_SIZE,
    VideoCallback,
    attach_gifs,
    draw_off_screen,
    record_frames,
)
from rlxf.utils.gif import encode_gif
from tests.evaluation.worlds import Countdown, Counter, Idle, learner, vec

SIZE = (6, 8)
ENLARGED = (6 * 40, MAX_FRAME_SIZE)
"""Size of frames of `SIZE` in a video."""


class Drawn(Countdown):
    """Environment that renders the number of steps as a shade of gray."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, length: int = 3, render_mode: str | None = "rgb_array", size: tuple[int, int] = SIZE):
        super().__init__(length)
        self.render_mode, self.size, self.resets = render_mode, size, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def render(self):
        return np.full((*self.size, 3), 10 * self.time, np.uint8)


class Recording(Idle):
    """Agent that records its observations."""

    def __init__(self, normalizer=None):
        self.observations, self.normalizer = [], normalizer

    def get_vec_normalize_env(self):
        return self.normalizer

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.observations.append(float(observation[0, 0]))
        return super().predict(observation)


def shades(frames) -> list[int]:
    return [int(frame.mean()) // 10 for frame in frames]


# Frames


def test_video_has_a_frame_of_every_state():
    frames = record_frames(Idle(), Drawn(4), seed=0, deterministic=True)
    assert frames.shape == (5, *ENLARGED, 3)
    assert shades(frames) == [0, 1, 2, 3, 4]


def test_agent_keeps_its_state_during_a_video():
    class CountsAloud(Drawn):
        def look(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            assert action == self.time
            return super().step(action)

    assert len(record_frames(Counter(), CountsAloud(4), seed=0, deterministic=True)) == 5


def test_video_of_an_endless_episode_ends(monkeypatch):
    monkeypatch.setattr(video_module, "MAX_STEPS", 7)
    assert len(record_frames(Idle(), Drawn(10**9), seed=0, deterministic=True)) == 8


def test_large_frames_are_reduced():
    height, width = record_frames(
        Idle(), Drawn(1, size=(MAX_FRAME_SIZE, 2 * MAX_FRAME_SIZE + 1)), 0, True
    ).shape[1:3]
    assert (height, width) == (-(-MAX_FRAME_SIZE // 3), -(-(2 * MAX_FRAME_SIZE + 1) // 3))
    assert max(height, width) <= MAX_FRAME_SIZE


def test_small_frames_are_enlarged_without_interpolation():
    env = gymnasium.make("rlxf/TMaze-v0", corridor_length=3, render_mode="rgb_array")
    env.reset(seed=0)
    small, (large, *_) = env.render(), record_frames(Idle(), env, 0, True)
    factor = MAX_FRAME_SIZE // max(small.shape)
    assert max(large.shape) == factor * max(small.shape) > MAX_FRAME_SIZE // 2
    assert np.array_equal(large[::factor, ::factor], large[factor - 1 :: factor, factor - 1 :: factor])
    assert set(map(tuple, large.reshape(-1, 3))) == set(map(tuple, small.reshape(-1, 3)))


def test_observations_are_normalized_as_in_training():
    train_env = VecNormalize(vec(Countdown(9)))
    train_env.obs_rms.mean[:], train_env.obs_rms.var[:] = 1.0, 4.0
    agent = Recording(train_env)
    record_frames(agent, Drawn(3), seed=0, deterministic=True)
    np.testing.assert_allclose(agent.observations, [-0.5, 0.0, 0.5], atol=1e-6)
    assert train_env.obs_rms.mean == 1.0


def test_seed_determines_the_video():
    env = gymnasium.make("rlxf/TMaze-v0", corridor_length=3, render_mode="rgb_array")
    videos = [record_frames(Idle(), env, seed, deterministic=True) for seed in (0, 0, *range(1, 9))]
    assert np.array_equal(videos[0], videos[1])
    assert not all(np.array_equal(videos[0], other) for other in videos[2:])


def test_gif_has_all_frames_and_pauses_at_the_last():
    frames = record_frames(Idle(), Drawn(4), seed=0, deterministic=True)
    gif = Image.open(BytesIO(encode_gif(frames, fps=5)))
    decoded, durations = [], []
    for number in range(gif.n_frames):
        gif.seek(number)
        decoded.append(np.asarray(gif.convert("RGB")))
        durations.append(gif.info["duration"])
    np.testing.assert_array_equal(decoded, frames)
    assert durations == [200, 200, 200, 200, 1000]
    assert gif.info["loop"] == 0


# Output


def written_videos(folder) -> list:
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload().Images("eval/video")


def test_videos_are_written_to_tensorboard_images(tmp_path):
    agent = learner(vec(Countdown(3)))
    agent.set_logger(configure(str(tmp_path), ["tensorboard", "csv", "json", "log"]))
    agent.learn(24, VideoCallback(Drawn(3), every_steps=10))
    agent.logger.close()
    events = written_videos(tmp_path)
    assert [event.step for event in events] == [10, 20]
    for event in events:
        gif = Image.open(BytesIO(event.encoded_image_string))
        assert (gif.format, gif.n_frames) == ("GIF", 4)
        assert (event.height, event.width) == ENLARGED
    assert "eval/video" not in (tmp_path / "progress.csv").read_text()


def test_second_training_writes_each_video_once(tmp_path):
    agent, callback = learner(vec(Countdown(3))), VideoCallback(Drawn(3), every_steps=8)
    agent.set_logger(configure(str(tmp_path), ["tensorboard"]))
    agent.learn(8, callback)
    agent.learn(8, callback, reset_num_timesteps=False)
    assert [event.step for event in written_videos(tmp_path)] == [8, 16]


def test_no_episode_is_played_without_tensorboard(tmp_path):
    agent, env = learner(vec(Countdown(3))), Drawn(3)
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    callback = VideoCallback(env, every_steps=8)
    before = env.resets
    agent.learn(8, callback)
    assert env.resets == before


def test_videos_beyond_the_budget_are_left_out(tmp_path):
    """A video has 3 steps. With a quarter of a step per training step, one fits in 12 steps."""
    agent, callback = learner(vec(Monitor(Countdown(3)))), VideoCallback(Drawn(3), every_steps=8, budget=0.25)
    agent.set_logger(configure(str(tmp_path), ["tensorboard"]))
    agent.learn(48, callback)
    assert [event.step for event in written_videos(tmp_path)] == [16, 24, 40, 48]
    assert callback.played == 12


def test_an_exception_before_a_step_ends_the_video():
    calls = []

    def stop():
        calls.append(None)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        record_frames(Idle(), Drawn(5), seed=0, deterministic=True, on_step=stop)
    assert len(calls) == 2


def test_other_videos_are_written(tmp_path):
    logger = configure(str(tmp_path), ["tensorboard"])
    assert attach_gifs(logger)
    frames = torch.zeros(1, 2, 3, 4, 5, dtype=torch.uint8)
    logger.record("other", Video(frames, fps=10), exclude="tensorboard")
    logger.dump(7)
    logger.close()
    (image,) = EventAccumulator(str(tmp_path)).Reload().Images("other")
    assert (image.step, image.height, image.width) == (7, 4, 5)


# Errors


def test_missing_render_mode_raises_with_advice():
    with pytest.raises(ValueError, match="create it with render_mode='rgb_array'"):
        VideoCallback(Drawn(render_mode=None))
    with pytest.raises(
        ValueError, match=r"render_mode=None and supports \['ansi', 'rgb_array'\]: create it with"
    ):
        VideoCallback(gymnasium.make("rlxf/TMaze-v0"))


def test_environment_without_rendering_raises():
    with pytest.raises(ValueError, match=r"supports \[\]: it cannot be recorded"):
        VideoCallback(Countdown())


def test_rendering_error_is_reported():
    class Broken(Drawn):
        def render(self):
            raise RuntimeError("no display")

    with pytest.raises(ValueError, match="cannot be rendered: RuntimeError\\('no display'\\)"):
        VideoCallback(Broken())


def test_vector_environment_raises():
    with pytest.raises(TypeError, match=r"one gymnasium.Env with render_mode='rgb_array', got"):
        VideoCallback(vec(Drawn()))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every_steps": 0}, ValueError, "every_steps must be at least 1, got 0"),
        ({"budget": "1"}, TypeError, "budget must be a number, got '1'"),
        ({"target_return": np.nan}, ValueError, "target_return must be finite, got nan"),
    ],
)
def test_bad_arguments_raise(given, error, message):
    with pytest.raises(error, match=message):
        VideoCallback(Drawn(), **given)


@pytest.mark.parametrize(
    ("target_return", "conditioned", "error", "message"),
    [
        (1.0, False, ValueError, "target_return needs an agent that is conditioned on a return.*got PPO"),
        (None, True, TypeError, "PPO is conditioned on a return: pass target_return to VideoCallback"),
    ],
)
def test_a_wrong_target_raises_before_training(target_return, conditioned, error, message):
    agent = learner(vec(Countdown(3)))
    agent.return_conditioned = conditioned
    with pytest.raises(error, match=message):
        agent.learn(8, VideoCallback(Drawn(3), every_steps=8, target_return=target_return))
    assert agent.num_timesteps == 0


def test_the_training_environment_is_refused():
    env = Drawn(3)
    agent = learner(vec(Monitor(env)))
    with pytest.raises(ValueError, match="VideoCallback needs an environment of its own"):
        agent.learn(8, VideoCallback(env, every_steps=8))
    assert agent.num_timesteps == 0


# Machines without a display

SCRIPT = """
import gymnasium
from rlxf.evaluation.video import check_rendering
check_rendering(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
"""
NAMES = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the driver is only set on Linux")
def test_video_on_a_headless_machine_prints_no_warning():
    pytest.importorskip("pygame")
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "XDG_RUNTIME_DIR" not in done.stderr + done.stdout


@pytest.fixture
def environment(monkeypatch):
    """Remove the variables that affect the display from the environment of the process."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so monkeypatch restores it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("platform", "given", "driver"),
    [
        ("linux", {}, "dummy"),
        ("linux", {"DISPLAY": ""}, "dummy"),
        ("linux", {"DISPLAY": ":0"}, None),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, None),
        ("linux", {"SDL_VIDEODRIVER": "x11"}, "x11"),
        ("darwin", {}, None),
        ("win32", {}, None),
    ],
)
def test_dummy_driver_is_set_only_without_a_display(environment, platform, given, driver):
    environment.setattr(video_module.sys, "platform", platform)
    for name, value in given.items():
        environment.setenv(name, value)
    draw_off_screen()
    assert os.environ.get("SDL_VIDEODRIVER") == driver
