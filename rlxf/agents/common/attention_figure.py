"""Attention weights of segments, and their figure by layer and head."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from rlxf.attention import State, TokenIndex, Transformer
from rlxf.attention.inspection import attention_weights

PANEL = (2.5, 2.2)
LEFT = 0.75
RIGHT = 1.0
TOP = 0.6
BOTTOM = 0.65
GAP = (0.15, 0.35)
"""Sizes in inches. They are fixed: matplotlib's layout engines take three times as long as drawing."""
COLOR_MAP = matplotlib.colormaps["magma"]
MASKED_COLOR = "0.85"
"""Gray level of masked entries: future steps, steps beyond the memory, and other episodes."""
EPISODE: dict[str, Any] = {"color": "tab:blue", "linewidth": 0.8, "linestyle": "--", "zorder": 1}
MEMORY: dict[str, Any] = {"color": "tab:green", "linewidth": 1.2, "zorder": 3}


Segments = tuple[Transformer, Tensor, TokenIndex, State | None]
"""Segments of T steps of B environments for inspection.

They are the transformer that reads them, its tokens (B, T, C), their index (B, T), and the memory of M steps
before them; None for no memory.
"""


def segment_weights(segments: Segments) -> dict[int, Tensor]:
    """Return the attention weights (B, H, T, M + T) of each layer with attention, by its number from 1."""
    layers = [number + 1 for number in segments[0].attention_passes]
    return dict(zip(layers, attention_weights(*segments), strict=True))


def attention_figure(
    weights: Mapping[int, Tensor], allowed: Tensor, starts: Tensor, unit: str = "time step"
) -> Figure:
    """Plot a panel for each layer (rows) and head (columns); row t of a panel has the weights of query t.

    Time 0 is the first token of the segment; the memory is left of it. Colors follow the square root of the
    weight, so that small weights differ visibly from 0.

    Args:
        weights: attention weights (H, T, M + T) of each layer with attention, by its number from 1.
        allowed: (T, M + T) bool, the attention mask. Other entries are drawn if a weight is above 0 there.
        starts: (M + T,) bool, whether the token is the first of an episode.
        unit: what a token stands for, in the labels of the axes.
    """
    rows = list(weights)
    seen = torch.stack([layer.gt(0).any(0) for layer in weights.values()]).any(0)
    allowed = allowed | seen  # patterns may differ between layers
    figure, panels = _page(len(rows), len(weights[rows[0]]))
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(float(layer.max()) for layer in weights.values()))
    for (row, head), panel in np.ndenumerate(panels):
        panel.set_title(f"layer {rows[row]}, head {head + 1}", fontsize="medium", y=1.0)
        image = _draw(panel, weights[rows[row]][head], allowed, norm)
        _mark(panel, starts, len(allowed))
    memory = len(starts) > len(allowed)
    below = " (below 0: memory)" if memory else ""
    figure.supxlabel(f"{unit} of the key{below}", y=0.15 / figure.get_figheight())
    figure.supylabel(f"{unit} of the query", x=0.15 / figure.get_figwidth())
    lines = {"memory | segment": MEMORY} if memory else {}
    _add_legend(figure, image, lines | ({"episode start": EPISODE} if starts[1:].any() else {}))
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
    panel.set_facecolor(MASKED_COLOR)
    return panel.imshow(
        shown,
        cmap=COLOR_MAP,
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


def _add_legend(figure: Figure, image: AxesImage, styles: Mapping[str, dict[str, Any]]) -> None:
    """Add a color bar, and a legend of the lines with these styles."""
    width, height = figure.get_size_inches()
    strip = figure.add_axes((1 - 0.85 / width, BOTTOM / height, 0.15 / width, 1 - (BOTTOM + TOP) / height))
    figure.colorbar(image, cax=strip, label="attention weight")
    if styles:
        lines = [strip.plot([], [], label=label, **style)[0] for label, style in styles.items()]
        figure.legend(handles=lines, loc="upper center", ncols=2, frameon=False)
