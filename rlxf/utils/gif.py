"""Animated GIF files."""

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from stable_baselines3.common.logger import Video

PAUSE = 1000
"""Duration of the last frame in milliseconds, before the GIF repeats."""


def encode_gif(pictures: NDArray[np.uint8], fps: float) -> bytes:
    """Encode T frames, (T, H, W, 3), as a GIF that repeats forever."""
    first, *others = map(Image.fromarray, pictures)
    durations = [round(1000 / fps)] * len(others) + [PAUSE]
    gif = BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()


def video_frames(video: "Video") -> NDArray[np.uint8]:
    """Return the T frames of the first video, (T, H, W, 3), of the batch that SB3 logs."""
    frames: NDArray[np.uint8] = video.frames[0].permute(0, 2, 3, 1).cpu().numpy()
    return frames
