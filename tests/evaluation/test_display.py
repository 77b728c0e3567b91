"""Films on machines without a display."""

import os
import subprocess
import sys

import pytest

from rlxf.evaluation import display
from rlxf.evaluation.display import draw_off_screen

FILM = """
import gymnasium
from rlxf.evaluation.film import check_can_film
check_can_film(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
"""
NAMES = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER")


@pytest.mark.skipif(sys.platform != "linux", reason="the others have no headless display to miss")
def test_a_film_on_a_headless_machine_prints_nothing():
    pytest.importorskip("pygame")
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FILM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "XDG_RUNTIME_DIR" not in done.stderr + done.stdout


@pytest.fixture
def environment(monkeypatch):
    """Variables of the process: none of those that matter, unless it is given one."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what a test changes is taken back
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
def test_a_driver_is_chosen_only_where_there_is_no_display(environment, platform, given, driver):
    environment.setattr(display.sys, "platform", platform)
    for name, value in given.items():
        environment.setenv(name, value)
    draw_off_screen()
    assert os.environ.get("SDL_VIDEODRIVER") == driver
