"""HTML file with the data of an episode."""

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from rlxf.agents.inspection import EpisodeAttention
from rlxf.cli.attention_page.episode import Step

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'"
"""Content security policy of the page, with the hash of its script."""
UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""Characters that could end a script element or start a comment in it, with their escapes in JSON."""
ENDS = {
    "terminated": "The episode terminated.",
    "truncated": "The episode was truncated by the environment.",
    "cut": "The episode went on: the page shows its first {} steps only.",
}
"""End of an episode -> sentence about it."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Content of the page.

    Args:
        title: title of the page.
        summary: line below the title.
        steps: steps of the episode.
        frames: data URIs of the frame before each step; empty for none.
        attention: attention and gates at the steps.
        end: "terminated", "truncated" or "cut".
    """

    title: str
    summary: str
    steps: list[Step]
    frames: list[str]
    attention: EpisodeAttention
    end: str


def page(episode: Episode) -> str:
    """Return the HTML of the page.

    All texts are inserted by the script as text, not as HTML. The content security policy of the page allows
    its own script only, by its hash, and no request.
    """
    folder = files(__package__)
    template, style, script = (
        (folder / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    parts = {
        "title": html.escape(episode.title),
        "policy": POLICY.format(digest),
        "style": style,
        "script": script,
        "data": to_json(page_data(episode)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def to_json(document: dict[str, Any]) -> str:
    """Return JSON text that can stand in a script element of HTML."""
    return json.dumps(document, allow_nan=False).translate(UNSAFE)


def page_data(episode: Episode) -> dict[str, Any]:
    """Return the data that the script of the page reads."""
    attention = episode.attention
    first = [first_step(weights) for weights in attention.weights]
    rows = [weights[:, :, start:] for weights, start in zip(attention.weights, first, strict=True)]
    returns = attention.returns_to_go
    return {
        "title": episode.title,
        "summary": episode.summary,
        "notice": ENDS[episode.end].format(len(episode.steps)) if episode.end == "cut" else "",
        "legend": legend(attention),
        "steps": [asdict(step) for step in episode.steps],
        "frames": episode.frames,
        "layers": list(attention.layers),
        "heads": attention.weights[0].shape[1],
        "tokens": list(attention.tokens),
        "first": first,
        "weights": base64.b64encode(b"".join(row.astype("<f4").tobytes() for row in rows)).decode("ascii"),
        "gates": [gate_data(name, values.tolist()) for name, values in attention.gates.items()],
        "returns_to_go": None if returns is None else returns.tolist(),
    }


def first_step(weights: np.ndarray) -> int:
    """Return the first step on which weights (L, H, t + 1, K) put attention; t if there is none."""
    attended = np.flatnonzero(weights.any(axis=(0, 1, 3)))
    return int(attended[0]) if len(attended) else weights.shape[2] - 1


def gate_data(name: str, values: list[float]) -> dict[str, Any]:
    """Return layer, name and values of a gate with a name such as ``layer_1/attention_gate``."""
    layer, _, gate = name.replace("_", " ").rpartition("/")
    return {"layer": layer.capitalize(), "name": gate, "values": values}


def legend(attention: EpisodeAttention) -> str:
    """Return the explanation of the rows of the page."""
    order = f" Lines of a row from top to bottom: {', '.join(attention.tokens)}." * (
        len(attention.tokens) > 1
    )
    return (
        "Attention of the selected step, framed, to itself and to earlier steps; time runs to the right. "
        "The color follows the square root of the weight, up to the largest weight at this step." + order
    )
