"""Animated GIF files."""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PAUSE = 1000
"""Duration of the last frame in milliseconds, before the GIF repeats."""


def encode_gif(pictures: NDArray[np.uint8], fps: float) -> bytes:
    """Encode T frames, (T, H, W, 3), as a GIF that repeats forever."""
    first, *others = map(Image.fromarray, pictures)
    durations = [round(1000 / fps)] * len(others) + [PAUSE]
    gif = BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()
