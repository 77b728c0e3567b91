"""Pictures of attention masks as SVG, drawn from the rules that the attention layers use."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rlxf.attention import (
    ETC,
    LSH,
    RATE,
    RMT,
    XL,
    AdaptiveSpan,
    AttentionSinks,
    BigBird,
    BigBirdETC,
    Blockwise,
    Compressive,
    Dilated,
    DynamicSpan,
    FixedColumns,
    Full,
    Local1D,
    Local2D,
    Longformer,
    Routing,
    StreamingXL,
    Strided,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.inspection import attention_weights
from rlxf.attention.patterns.base import Pattern
from rlxf.cli.commands.techniques import distinct_masks, mask_image

LENGTH = 48
"""Tokens of a picture."""
EXAMPLES: dict[str, Any] = {
    "Full": Full(),
    "Window": Window(8),
    "AttentionSinks": AttentionSinks(8, sinks=3),
    "Dilated": Dilated(5, dilation=3),
    "Local1D": Local1D(8, margin=4),
    "Local2D": Local2D(12, rows=2, columns=4, margin_rows=1, margin_columns=2),
    "Strided": Strided(6),
    "FixedColumns": FixedColumns(6, columns=1),
    "Blockwise": Blockwise(8, blocks=3),
    "ETC": ETC(4, global_tokens=3),
    "Longformer": Longformer(8, global_tokens=2),
    "BigBird": BigBird(4, window=3, random=1, global_blocks=1),
    "BigBirdETC": BigBirdETC(4, window=3, random=1, global_tokens=3),
    "XL": XL(12),
    "StreamingXL": StreamingXL(12, sinks=3),
    "Compressive": Compressive(8, 3, 4),
}
"""Technique with a pattern -> instance that is small enough for a picture."""
KERNELS: dict[str, Any] = {
    "LSH": LSH(rounds=1, buckets=4),
    "Routing": Routing(clusters=4),
    "AdaptiveSpan": AdaptiveSpan(limit=32, ramp=4, start=8),
    "DynamicSpan": DynamicSpan(limit=32, ramp=4),
}
"""Kernel whose mask depends on tokens or weights -> instance for a picture of one head."""
SEGMENTED: dict[str, Any] = {"RMT": RMT(segment=40, tokens=4), "RATE": RATE(segment=40, tokens=4)}
"""Memory that processes segments -> instance for a picture of one segment with its memory tokens."""
PICTURED = EXAMPLES.keys() | KERNELS.keys() | SEGMENTED.keys()
"""Names of the techniques with a picture."""
CAUSAL = 2
"""Value of `mask_image` for visible keys up to the query."""
COLORS = {CAUSAL: "causal", 1: "later"}
"""Value of `mask_image` -> class of its cells."""


def pattern_of(technique: Any) -> Pattern:
    """Return the pattern of a technique: itself, or the tokens that a memory makes visible."""
    if isinstance(technique, Pattern):
        return technique
    pattern: Pattern = technique.visible_pattern(Window(technique.length + 1))
    return pattern


def figure(name: str) -> str:
    """Return HTML with the masks of a technique, one for each distinct rule of layers and heads."""
    if name in KERNELS:
        note = f"one head of an untrained layer, {LENGTH} random tokens that change slowly"
        return _figure([svg(kernel_image(KERNELS[name]), "")], KERNELS[name], note)
    if name in SEGMENTED:
        memory = SEGMENTED[name]
        note = f"one segment of {memory.segment} tokens between {memory.tokens} memory and write tokens each"
        return _figure([svg(segment_image(memory), "")], memory, note)
    if name not in EXAMPLES:
        return ""
    rules = distinct_masks(pattern_of(EXAMPLES[name]))
    images = {place: mask_image(rule, LENGTH) for rule, place in rules.items()}
    if not isinstance(EXAMPLES[name], Pattern):  # a memory holds earlier tokens only
        images = {place: image * (image == CAUSAL) for place, image in images.items()}
    pictures = [svg(image, place if len(images) > 1 else "") for place, image in images.items()]
    return _figure(pictures, EXAMPLES[name], f"{LENGTH} tokens")


def _figure(pictures: list[str], technique: Any, note: str) -> str:
    caption = f"<figcaption><code>{technique!r}</code>, {note}</figcaption>"
    return f'<figure class="masks"><div>{"".join(pictures)}</div>{caption}</figure>'


def kernel_image(kernel: Any) -> np.ndarray:
    """Return the keys with a weight above 0 of a causal layer with one head, as `mask_image` does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = TransformerSpec(width=16, layers=1, heads=1, kernel=kernel).build().eval()
        tokens = torch.randn(1, LENGTH, 16).cumsum(dim=1)
    weights = attention_weights(layer, tokens / tokens.std(), TokenIndex.range(1, LENGTH))[0]
    return CAUSAL * (weights[0, 0] > 0).int().numpy()


def segment_image(memory: Any) -> np.ndarray:
    """Return the visible keys in a segment ``[memory ; tokens ; write tokens]``, as `mask_image` does."""
    layer = TransformerSpec(width=16, layers=1, heads=1, memory=memory).build()
    index = TokenIndex.range(1, memory.segment + 2 * memory.tokens)
    return CAUSAL * layer.attention_masks(index, index)[0].allowed[0].int().numpy()


def svg(image: np.ndarray, place: str) -> str:
    """Return an SVG of a mask, with rows as queries and columns as keys, and a caption below it."""
    size = len(image)
    paths = "".join(f'<path class="{color}" d="{path(image == value)}"/>' for value, color in COLORS.items())
    label = f"Attention mask {place}".strip()
    picture = (
        f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{label}">'
        f'<rect width="{size}" height="{size}"/>{paths}</svg>'
    )
    return f"<span>{picture}{place and f'<small>{place}</small>'}</span>"


def path(cells: np.ndarray) -> str:
    """Return the path of the true cells, one rectangle for each run of cells in a row."""
    return "".join(f"M{x} {y}h{width}v1h-{width}z" for y, row in enumerate(cells) for x, width in runs(row))


def runs(row: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of true cells."""
    start = 0
    for value, group in groupby(row.tolist()):
        length = len(list(group))
        if value:
            yield start, length
        start += length
