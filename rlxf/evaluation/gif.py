"""Videos in TensorBoard as animated GIFs, without a video encoder."""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat, Video
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

OTHERS = ("stdout", "log", "json", "csv", "tensorboard")
"""SB3's output formats, which skip videos. TensorBoard's needs moviepy, which requires an old Pillow."""
PAUSE = 1000
"""Duration of the last frame in milliseconds, before the GIF repeats."""


class GifOutputFormat(KVWriter):
    """Output format of SB3's logger that writes each `Video` as an animated GIF.

    Args:
        writer: TensorBoard writer.
    """

    def __init__(self, writer: SummaryWriter):
        self.writer = writer

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Write the videos among the values, and ignore all other values."""
        assert self.writer.file_writer is not None
        for tag, value in key_values.items():
            if isinstance(value, Video):
                frames = value.frames[0].permute(0, 2, 3, 1).cpu().numpy()
                self.writer.file_writer.add_summary(gif_summary(tag, frames, value.fps), step)
        self.writer.flush()

    def close(self) -> None:
        """Do nothing, because SB3's TensorBoard format closes the writer."""


def attach_gifs(logger: Logger) -> bool:
    """Make the logger write videos as GIFs; return False if it writes no TensorBoard events."""
    outputs = logger.output_formats
    writers = [output.writer for output in outputs if isinstance(output, TensorBoardOutputFormat)]
    if not any(isinstance(output, GifOutputFormat) for output in outputs):
        outputs.extend(map(GifOutputFormat, writers))
    return bool(writers)


def gif_summary(tag: str, pictures: NDArray[np.uint8], fps: float) -> Summary:
    """Return T frames, (T, H, W, 3), as one TensorBoard image."""
    _, height, width, channels = pictures.shape
    image = Summary.Image(
        height=height, width=width, colorspace=channels, encoded_image_string=encode_gif(pictures, fps)
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def encode_gif(pictures: NDArray[np.uint8], fps: float) -> bytes:
    """Encode T frames, (T, H, W, 3), as a GIF that repeats forever."""
    first, *others = map(Image.fromarray, pictures)
    durations = [round(1000 / fps)] * len(others) + [PAUSE]
    gif = BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()
