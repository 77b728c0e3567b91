"""Pages that explain the techniques of an axis, from docstrings, tables of docs/ and the code of masks."""

import inspect
import re
from pathlib import Path
from typing import Any

from rlxf.agents.contexts import CONTEXT_MERGERS
from rlxf.attention.registry import HEADS, TECHNIQUES
from rlxf.cli.commands.techniques import CONTEXT_QUESTION, HEAD_QUESTION
from rlxf.cli.spec_options import QUESTIONS
from website import api, masks
from website.prose import prepared, with_papers

FOLDER = "explanation/techniques"
TITLES = {
    "position": "Position encodings",
    "pattern": "Attention patterns",
    "kernel": "Attention kernels",
    "memory": "Memories",
    "recurrence": "Recurrent mixers",
    "residual": "Residual connections",
    "depth": "Adaptive depth",
    "head": "Output heads with a datastore",
    "context": "Several contexts",
}
AXES: dict[str, dict[str, Any]] = TECHNIQUES | {"head": HEADS, "context": CONTEXT_MERGERS}
"""Axis -> name -> technique."""
ALL_QUESTIONS = QUESTIONS | {"head": HEAD_QUESTION, "context": CONTEXT_QUESTION}
LISTS = ("reference/techniques.md", "explanation/choose-techniques.md")
"""Pages with tables whose first or second column has the names of techniques."""
NOTE = (
    "A row of a picture is a query, a column is a key. <span class='mask-key causal'></span> visible keys; "
    "<span class='mask-key later'></span> keys after the query, visible in bidirectional transformers only."
)


def pages(root: Path) -> dict[str, str]:
    """Return uri -> Markdown of the pages of all axes.

    Args:
        root: root folder of the repository.
    """
    tables = Tables(root)
    return {f"{FOLDER}/{axis}.md": page(axis, tables) for axis in AXES}


class Tables:
    """Rows of tables in docs/ by technique: definitions, uses, measured results."""

    def __init__(self, root: Path):
        docs = root / "docs"
        self.definition = _rows(docs / LISTS[0], r"`(\w+)` \|(?: [^|]*\|){3} ([^|]+?) \|")
        uses = _rows(docs / LISTS[1], r"^\| `(\w+)` \| ([^|]+?) \|")
        self.use = {name: use.replace("](../", "](../../") for name, use in uses.items()}
        axes = "|".join(AXES)
        row = rf"^\| (?:{axes}) \| (\w+) \| ((?:[^|]*\|){{3}}[^|]*?) \|$"
        self.learning = _rows(docs / "benchmarks" / "memory-tasks.md", row)


def _rows(file: Path, pattern: str) -> dict[str, str]:
    return dict(re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE))


def page(axis: str, tables: Tables) -> str:
    """Return the Markdown of the page of an axis."""
    entries = [entry(axis, name, technique, tables) for name, technique in AXES[axis].items()]
    question = ALL_QUESTIONS[axis]
    notes = [NOTE] if masks.PICTURED & AXES[axis].keys() else []
    intro = f"{question[0].upper()}{question[1:]} [All techniques](../../{LISTS[0]}) lists the other axes."
    return "\n\n".join([f"# {TITLES[axis]}", intro, *notes, *entries]) + "\n"


def entry(axis: str, name: str, technique: Any, tables: Tables) -> str:
    """Return the Markdown of one technique: formula, facts, picture, explanation."""
    first, *rest = _description(technique).split("\n\n")
    rest = [part for part in rest if not part.startswith("Source:")]
    parts = [
        f"## {name}",
        f'<div class="formula" markdown>\n\n{prepared(first, api.full_name)}\n\n</div>',
        _facts(name, technique, tables),
        masks.figure(name),
        *(prepared(part, api.full_name) for part in rest),
    ]
    return "\n\n".join(part for part in parts if part)


def _description(technique: Any) -> str:
    """Return the docstring up to its sections."""
    return re.split(r"\n\n(?=(?:Args|Raises):\n)", inspect.getdoc(technique) or "")[0]


def _source(technique: Any) -> str:
    """Return the paragraph of the docstring about the source, with links to papers."""
    paragraphs = _description(technique).split("\n\n")
    found = [part.removeprefix("Source:").strip() for part in paragraphs if part.startswith("Source:")]
    return prepared(" ".join((found or [technique.paper])[0].split()), api.full_name)


def _facts(name: str, technique: Any, tables: Tables) -> str:
    options = api.full_name(name)
    constructor = f"``{technique()!r}``"
    rows = {
        "effect": prepared(tables.definition.get(name, ""), api.full_name),
        "use it for": prepared(tables.use.get(name, ""), api.full_name),
        "source": _source(technique),
        "causal form": technique.causal_form,
        "cost for L tokens": technique.cost,
        "measured": _measured(tables.learning.get(name, "")),
        "defaults": f"{constructor}, [options][{options}]" if options else constructor,
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value]
    return "\n".join(['<div class="facts" markdown>\n', "| | |", "|---|---|", *lines, "\n</div>"])


def _measured(row: str) -> str:
    """Return a sentence on the results of a technique, whose row has steps, success, weights and cost."""
    cells = [cell.strip() for cell in row.split("|")]
    if len(cells) < 4 or not cells[3]:
        return ""
    seeds = [
        f"solved after {steps} steps" if steps != "no" else "not solved" for steps in cells[0].split(", ")
    ]
    return (
        f"T-Maze with a corridor of 50: {'; second seed: '.join(seeds)}; {cells[3]} times the cost of the "
        "default core ([protocol](../../benchmarks/memory-tasks.md#learning-with-each-technique))"
    )


def with_links(text: str, page: str) -> str:
    """Return the Markdown of a page whose tables list techniques, with links to their explanations."""
    up = "../" if page.startswith("reference/") else ""
    folder = f"{up}{FOLDER}" if up else FOLDER.removeprefix("explanation/")
    for axis, techniques in AXES.items():
        for name in techniques:
            target = f"{folder}/{axis}.md#{name.lower()}"
            text = re.sub(
                rf"(?m)^(\|[^|`]*\|?[^|`]*)`{name}` \|", rf"\1[`{name}`]({target}) |", text, count=1
            )
    return with_papers(text)
