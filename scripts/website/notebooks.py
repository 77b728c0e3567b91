"""Notebooks of examples/notebooks: pages of the site and .ipynb files, from sources in the percent format."""

import json
import re
from itertools import count
from os.path import relpath
from pathlib import Path
from posixpath import join, normpath
from typing import Any

import jupytext
from nbformat import NotebookNode

from website.links import LINK, NOTEBOOKS, notebook_page

FOLDER = NOTEBOOKS
COLAB = "https://colab.research.google.com/github/rlxf/rlxf/blob/main"
REPOSITORY = "https://github.com/rlxf/rlxf"
EXTRAS = {"export": "[export]"}
"""Name of a notebook -> extra of rlxf that it needs."""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
SHOW = "plt.show()"
"""Last line of a cell that shows a figure."""
INSTALL = """\
# On Colab and other machines without rlxf, this cell installs it.
import importlib.util

if importlib.util.find_spec("rlxf") is None:
    %pip install --quiet 'rlxf{extra} @ git+https://github.com/rlxf/rlxf'"""


def sources(root: Path) -> list[Path]:
    """Return the sources of all notebooks, sorted by name.

    Args:
        root: root folder of the repository.
    """
    return sorted((root / FOLDER).glob("*.py"))


def pages(root: Path) -> dict[str, str]:
    """Return uri -> Markdown of the pages of all notebooks.

    Args:
        root: root folder of the repository.
    """
    return {notebook_page(source.name): markdown(source) for source in sources(root)}


def read(source: Path) -> NotebookNode:
    """Return the notebook of a source."""
    return jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")


def with_parameters(notebook: NotebookNode, values: dict[str, Any]) -> NotebookNode:
    """Replace sizes of the cell with the tag ``parameters``, in place, and return the notebook.

    Raises:
        ValueError: if the cell does not assign one of the names.
    """
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for name, value in values.items():
        cell.source, found = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", cell.source, flags=re.M)
        if found != 1:
            raise ValueError(f"the cell of parameters assigns {name} {found} times; it has to assign it once")
    return notebook


def markdown(source: Path) -> str:
    """Return the page of a notebook: text, code, figures, and a link to Colab after the title.

    Other outputs are not shown: the text states what was printed. `figure` is the file of a figure.
    """
    parts, figures = [], count(1)
    for cell in read(source).cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        if SHOW in cell.source:
            number = next(figures)
            path = relpath(figure(source, number), source.parent)
            parts.append(f"![Figure {number} of a run with the sizes above]({path})")
    title, _, text = parts[0].partition("\n")
    # A button of the theme: the image of Colab would need the network.
    button = f"[Open in Colab]({COLAB}/{FOLDER}/{source.stem}.ipynb){{ .md-button }}"
    return "\n\n".join([title, button, text.strip(), *parts[1:]]) + "\n"


def figure(source: Path, number: int) -> Path:
    """Return the file with the figure that the cell with the given number among those with figures shows.

    Args:
        source: source of the notebook.
        number: from 1.
    """
    return source.parents[2] / "docs" / "images" / "notebooks" / f"{source.stem}-{number}.png"


def ipynb(source: Path) -> str:
    """Return the .ipynb file of a notebook, without output. Its second cell installs rlxf.

    Relative links become links to the repository, because Colab shows the file outside of it.
    """
    notebook = read(source)
    cells = [_plain_cell(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]
    install = INSTALL.format(extra=EXTRAS.get(source.stem, ""))
    cells.insert(1, _plain_cell("code", install, {}))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    document = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _plain_cell(kind: str, text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    if kind == "markdown":
        text = LINK.sub(_repository_link, text)
    content = {"cell_type": kind, "metadata": dict(metadata), "source": text.splitlines(keepends=True)}
    return content if kind == "markdown" else content | {"execution_count": None, "outputs": []}


def _repository_link(link: re.Match[str]) -> str:
    path = normpath(join(FOLDER, link["path"]))
    return f"{link['before']}{REPOSITORY}/blob/main/{path}{link['anchor'] or ''}{link['after']}"
