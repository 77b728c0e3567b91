"""Videos in TensorBoard without a video encoder: animated GIFs among the images."""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat, Video
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

OTHERS = ("stdout", "log", "json", "csv", "tensorboard")
"""SB3's own output formats. Its one for TensorBoard needs moviepy for a video, which holds Pillow back."""
PAUSE = 1000
"""Milliseconds for which the last picture stands, before the GIF begins again."""


class GifOutputFormat(KVWriter):
    """An output format of SB3's logger that writes each `Video` as an animated GIF.

    Args:
        writer: of the TensorBoard events.
    """

    def __init__(self, writer: SummaryWriter):
        self.writer = writer

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Write the videos among the values; the others are for other formats."""
        assert self.writer.file_writer is not None
        for tag, value in key_values.items():
            if isinstance(value, Video):
                pictures = value.frames[0].permute(0, 2, 3, 1).cpu().numpy()
                self.writer.file_writer.add_summary(gif_summary(tag, pictures, value.fps), step)
        self.writer.flush()

    def close(self) -> None:
        """Nothing: the writer belongs to SB3's format."""


def attach_gifs(logger: Logger) -> bool:
    """Have the logger write videos as GIFs; False if it writes no TensorBoard events."""
    outputs = logger.output_formats
    writers = [output.writer for output in outputs if isinstance(output, TensorBoardOutputFormat)]
    if not any(isinstance(output, GifOutputFormat) for output in outputs):
        outputs.extend(map(GifOutputFormat, writers))
    return bool(writers)


def gif_summary(tag: str, pictures: NDArray[np.uint8], fps: float) -> Summary:
    """T pictures, (T, H, W, 3), as one image of TensorBoard."""
    _, height, width, channels = pictures.shape
    image = Summary.Image(
        height=height, width=width, colorspace=channels, encoded_image_string=encode_gif(pictures, fps)
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def encode_gif(pictures: NDArray[np.uint8], fps: float) -> bytes:
    """T pictures, (T, H, W, 3), as a GIF that goes round and round."""
    first, *others = map(Image.fromarray, pictures)
    durations = [round(1000 / fps)] * len(others) + [PAUSE]
    gif = BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()
