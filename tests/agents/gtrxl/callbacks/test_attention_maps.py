"""Attention maps show weights, masks and times."""

from io import BytesIO

import numpy as np
import torch
from PIL import Image

from rlxf.agents.gtrxl.callbacks import AttentionMapCallback
from rlxf.agents.gtrxl.callbacks.attention_maps import attention_figure
from rlxf.attention import TokenIndex, Window
from rlxf.attention.attention_mask import AttentionMask
from tests.agents.gtrxl.callbacks.logged import ROLLOUT, events, learner

STEPS, MEMORY, LAYERS, HEADS = 6, 5, 2, 3
EPISODES = [-1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 2]
POSITIONS = [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 0]
"""Two empty slots, then episodes that start at times -3, 2 and 5."""


def drawn():
    """Return a figure, its weights and the attention mask."""
    key = TokenIndex(torch.tensor([POSITIONS]), torch.tensor([EPISODES]))
    relation = AttentionMask(key.last(STEPS), key, Window(MEMORY + 1), True, torch.float32)
    starts = (key.position == 0) & (key.episode >= 0)
    scores = torch.randn(LAYERS, HEADS, STEPS, STEPS + MEMORY, generator=torch.Generator().manual_seed(0))
    weights = list((scores + relation.mask[0]).softmax(-1))
    return attention_figure(weights, relation.allowed[0], starts[0]), weights, relation.allowed[0]


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


def test_figure_has_panel_for_each_layer_and_head():
    figure, _, _ = drawn()
    titles = [panel.get_title() for panel in panels(figure)]
    assert titles == [f"layer {n}, head {h}" for n in (1, 2) for h in (1, 2, 3)]


def test_panel_shows_weights_from_first_attended_key():
    figure, weights, allowed = drawn()
    first = EPISODES.index(0)
    for panel, expected in zip(panels(figure), torch.cat(weights), strict=True):
        (image,) = panel.images
        shown = image.get_array()
        np.testing.assert_array_equal(shown.mask, ~allowed[:, first:].numpy())
        np.testing.assert_array_equal(shown.compressed(), expected[:, first:][allowed[:, first:]].numpy())


def test_axes_have_memory_at_negative_times():
    (image,) = panels(drawn()[0])[0].images
    assert image.get_extent() == [-3.5, 5.5, 5.5, -0.5]


def test_lines_mark_episode_starts_and_end_of_memory():
    panel = panels(drawn()[0])[0]
    upright = sorted(
        line.get_xdata()[0] for line in panel.lines if line.get_xdata()[0] == line.get_xdata()[1]
    )
    level = sorted(line.get_ydata()[0] for line in panel.lines if line.get_ydata()[0] == line.get_ydata()[1])
    assert upright == [-0.5, 1.5, 4.5]
    assert level == [1.5, 4.5]


def test_all_panels_have_same_color_scale():
    figure, weights, _ = drawn()
    scales = {image.get_clim() for panel in panels(figure) for image in panel.images}
    assert scales == {(0.0, float(torch.cat(weights).max()))}


def test_maps_are_written_as_tensorboard_images(tmp_path):
    agent = learner(tmp_path, formats=("tensorboard", "csv", "json", "log"))
    agent.learn(3 * ROLLOUT, AttentionMapCallback())
    images = events(tmp_path).Images("attention/maps")
    assert [image.step for image in images] == [ROLLOUT, 3 * ROLLOUT]
    for image in images:
        picture = Image.open(BytesIO(image.encoded_image_string))
        assert picture.size == (image.width, image.height)
        assert len(picture.getcolors(10**6)) > 50
    assert "attention/maps" not in (tmp_path / "progress.csv").read_text()


def test_no_figure_without_tensorboard(tmp_path):
    agent, callback = learner(tmp_path, formats=("csv",)), AttentionMapCallback()
    agent.learn(ROLLOUT, callback)
    callback.record()
    assert "attention/maps" not in agent.logger.name_to_value
