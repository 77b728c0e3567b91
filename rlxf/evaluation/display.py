"""Drawing on machines without a display."""

import os
import sys

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
DRIVER = "SDL_VIDEODRIVER"


def draw_off_screen() -> None:
    """Let pygame draw without a display, for the whole process, on a Linux machine that has none.

    SDL, which draws Gymnasium's classic control and Box2D environments, otherwise looks for a display and
    prints that XDG_RUNTIME_DIR is not set. A driver in ``SDL_VIDEODRIVER`` stays. To be called before the
    first picture.
    """
    if sys.platform == "linux" and not any(os.environ.get(name) for name in DISPLAYS):
        os.environ.setdefault(DRIVER, "dummy")
