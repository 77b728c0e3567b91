"""Rendering on machines without a display."""

import os
import sys

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
DRIVER = "SDL_VIDEODRIVER"


def draw_off_screen() -> None:
    """Set SDL's dummy video driver for this process, on a Linux machine without a display.

    Otherwise SDL, which renders Gymnasium's classic control and Box2D environments, looks for a display and
    prints that XDG_RUNTIME_DIR is not set. A driver in ``SDL_VIDEODRIVER`` takes precedence. Call this
    function before the first image is rendered.
    """
    if sys.platform == "linux" and not any(os.environ.get(name) for name in DISPLAYS):
        os.environ.setdefault(DRIVER, "dummy")
