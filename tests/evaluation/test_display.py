"""Videos on machines without a display."""

import os
import subprocess
import sys

import pytest

from rlxf.evaluation import video
from rlxf.evaluation.video import draw_off_screen

SCRIPT = """
import gymnasium
from rlxf.evaluation.video import check_rendering
check_rendering(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
"""
NAMES = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER")


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
    environment.setattr(video.sys, "platform", platform)
    for name, value in given.items():
        environment.setenv(name, value)
    draw_off_screen()
    assert os.environ.get("SDL_VIDEODRIVER") == driver
