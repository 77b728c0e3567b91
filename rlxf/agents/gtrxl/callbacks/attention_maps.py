"""Callback that writes attention maps to TensorBoard."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from stable_baselines3.common.logger import Figure as LoggedFigure
from torch import Tensor

from rlxf.agents.gtrxl.callbacks.base import RolloutCallback, SegmentInspection
from rlxf.attention.token_index import EMPTY
from rlxf.training.resumed_logger import record_for_tensorboard, writes_tensorboard

PANEL = (2.5, 2.2)
LEFT, RIGHT, TOP, BOTTOM, GAP = 0.75, 1.0, 0.6, 0.65, (0.15, 0.35)
"""Sizes in inches. Fixed, because matplotlib's layout engines take three times as long as the drawing."""
COLOURS = matplotlib.colormaps["magma"]
HIDDEN = "0.85"
"""Gray level of masked entries: future steps, steps beyond the memory, and other episodes."""
EPISODE: dict[str, Any] = {"color": "tab:blue", "linewidth": 0.8, "linestyle": "--", "zorder": 1}
MEMORY: dict[str, Any] = {"color": "tab:green", "linewidth": 1.2, "zorder": 3}


def attention_figure(weights: Sequence[Tensor], allowed: Tensor, starts: Tensor) -> Figure:
    """Plot a panel for each layer (rows) and head (columns); row t of a panel has the weights of query t.

    Time 0 is the first step of the segment; the memory is left of it. Colors follow the square root of the
    weight, so that small weights differ visibly from 0.

    Args:
        weights: attention weights (H, T, M + T) of each layer.
        allowed: (T, M + T) bool, the attention mask.
        starts: (M + T,) bool, whether the step is the first of an episode.
    """
    figure, panels = _page(len(weights), len(weights[0]))
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(float(layer.max()) for layer in weights))
    for (layer, head), panel in np.ndenumerate(panels):
        panel.set_title(f"layer {layer + 1}, head {head + 1}", fontsize="medium", y=1.0)
        image = _draw(panel, weights[layer][head], allowed, norm)
        _mark(panel, starts, len(allowed))
    _add_legend(figure, image)
    return figure


def _page(layers: int, heads: int) -> tuple[Figure, np.ndarray]:
    """Return a figure and its panels (layers, heads)."""
    width = LEFT + heads * (PANEL[0] + GAP[0]) + RIGHT
    height = TOP + layers * (PANEL[1] + GAP[1]) + BOTTOM
    figure = Figure(figsize=(width, height), dpi=100)
    edges = {
        "left": LEFT / width,
        "right": 1 - RIGHT / width,
        "bottom": BOTTOM / height,
        "top": 1 - TOP / height,
    }
    gaps = {"wspace": GAP[0] / PANEL[0], "hspace": GAP[1] / PANEL[1]}
    panels = figure.subplots(layers, heads, sharex=True, sharey=True, squeeze=False, gridspec_kw=edges | gaps)
    for inner in [*(row.xaxis for row in panels[:-1].flat), *(row.yaxis for row in panels[:, 1:].flat)]:
        inner.set_visible(False)
    return figure, panels


def _draw(panel: Axes, weights: Tensor, allowed: Tensor, norm: PowerNorm) -> AxesImage:
    """Draw the weights (T, M + T), from the first key that any query attends to."""
    steps, memory = len(weights), weights.shape[1] - len(weights)
    first = int(allowed.any(0).int().argmax())
    shown = np.ma.masked_array(weights[:, first:].cpu(), ~allowed[:, first:].cpu().numpy())
    panel.set_facecolor(HIDDEN)
    return panel.imshow(
        shown,
        cmap=COLOURS,
        norm=norm,
        extent=(first - memory - 0.5, steps - 0.5, steps - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        zorder=2,
    )


def _mark(panel: Axes, starts: Tensor, steps: int) -> None:
    """Draw lines at episode starts, on both axes, and at the end of the memory."""
    left, right = panel.get_xlim()
    for time in (starts.nonzero()[:, 0] - (len(starts) - steps)).tolist():
        if left < time - 0.5 < right:
            panel.axvline(time - 0.5, **EPISODE)
        if time > 0:
            panel.axhline(time - 0.5, **EPISODE)
    if left < -0.5:
        panel.axvline(-0.5, **MEMORY)


def _add_legend(figure: Figure, image: AxesImage) -> None:
    """Add axis labels, a color bar and a legend of the lines."""
    width, height = figure.get_size_inches()
    strip = figure.add_axes((1 - 0.85 / width, BOTTOM / height, 0.15 / width, 1 - (BOTTOM + TOP) / height))
    figure.colorbar(image, cax=strip, label="attention weight")
    figure.supxlabel("time step of the key (below 0: memory)", y=0.15 / height)
    figure.supylabel("time step of the query", x=0.15 / width)
    lines = [
        strip.plot([], [], label=label, **style)[0]
        for label, style in (("memory | segment", MEMORY), ("episode start", EPISODE))
    ]
    figure.legend(handles=lines, loc="upper center", ncols=2, frameon=False)


class AttentionMapCallback(RolloutCallback):
    """Write attention maps to TensorBoard's images every ``every`` rollouts, with tag ``attention/maps``.

    The plot shows the attention weights of each layer and head for the last segment of the first environment,
    read with its memory as in training.

    Args:
        every: rollouts between two plots; default 100. A plot costs as much time as half a rollout of a small
            network.
    """

    def __init__(self, every: int = 100):
        super().__init__(every)

    def record(self) -> None:
        """Record the plot, if the logger writes TensorBoard events."""
        if not writes_tensorboard(self.logger):
            return
        segments = SegmentInspection.from_buffer(self.model.policy, self.model.rollout_buffer, environments=1)
        relation = segments.relation
        starts = (relation.key.position == 0) & (relation.key.episode != EMPTY)
        figure = attention_figure([layer[0] for layer in segments.weights], relation.allowed[0], starts[0])
        record_for_tensorboard(self.logger, "attention/maps", LoggedFigure(figure, close=False))
