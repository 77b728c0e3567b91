"""Notebooks of examples/notebooks: pages of the site and .ipynb files, from sources in the percent format.

The .ipynb file of a notebook also has what its cells printed in the last run of `execute`, and the figures.
"""

import base64
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from os.path import relpath
from pathlib import Path
from posixpath import join, normpath
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
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
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequence of a terminal."""
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
    """Return the page of a notebook: text, code, printed text, figures, and a link to Colab after the title.

    `figure` is the file of a figure.
    """
    parts, texts = [], iter(printed(source))
    for cell, own_figure in _with_figures(source, read(source)):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if text := next(texts):
            parts.append(f"```text\n{text}\n```")
        if own_figure is not None:
            path = relpath(own_figure, source.parent)
            parts.append(f"![Figure of a run with the sizes above]({path})")
    title, _, text = parts[0].partition("\n")
    # A button of the theme: the image of Colab would need the network.
    button = f"[Open in Colab]({COLAB}/{FOLDER}/{source.stem}.ipynb){{ .md-button }}"
    return "\n\n".join([title, button, text.strip(), *parts[1:]]) + "\n"


def _with_figures(source: Path, notebook: NotebookNode) -> Iterator[tuple[NotebookNode, Path | None]]:
    """Yield the cells of a notebook, each with the file of the figure that it shows."""
    numbers = count(1)
    for cell in notebook.cells:
        yield cell, figure(source, next(numbers)) if SHOW in cell.source else None


def figure(source: Path, number: int) -> Path:
    """Return the file with the figure that the cell with the given number among those with figures shows.

    Args:
        source: source of the notebook.
        number: from 1.
    """
    return source.parents[2] / "docs" / "images" / "notebooks" / f"{source.stem}-{number}.png"


def printed(source: Path) -> list[str]:
    """Return what each code cell printed, according to the .ipynb file.

    The texts are empty if the file does not exist or has other code, which has not been run yet.
    """
    code = [cell.source for cell in read(source).cells if cell.cell_type == "code"]
    file = source.with_suffix(".ipynb")
    if file.exists():
        cells = nbformat.read(file, as_version=4).cells
        own = [cell for cell in cells if cell.cell_type == "code"][1:]  # the first one installs rlxf
        if [cell.source for cell in own] == code:
            return [_text(cell) for cell in own]
    return [""] * len(code)


def _text(cell: NotebookNode) -> str:
    """Return what a code cell wrote to its standard output, and its last value, without colors and styles."""
    parts = [
        output.text if output.output_type == "stream" else output.data.get("text/plain", "") + "\n"
        for output in cell.outputs
        if output.get("name") == "stdout" or output.output_type == "execute_result"
    ]
    return STYLE.sub("", "".join(parts)).strip("\n")


def execute(source: Path) -> list[str]:
    """Run a notebook in a temporary folder, write its figures, and return what each code cell printed.

    Warnings and progress bars, which are written to the standard error, are left out.
    """
    from nbclient import NotebookClient  # in the extra dev only

    notebook = read(source)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with TemporaryDirectory() as folder:
        env = os.environ | {"PATH": path, "MINARI_DATASETS_PATH": str(Path(folder, "minari"))}
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute(env=env)
    for cell, own_figure in _with_figures(source, notebook):
        if own_figure is not None:
            [picture] = [output.data["image/png"] for output in cell.outputs if "data" in output]
            own_figure.write_bytes(base64.b64decode(picture))
    return [_text(cell) for cell in notebook.cells if cell.cell_type == "code"]


def ipynb(source: Path, texts: Sequence[str]) -> str:
    """Return the .ipynb file of a notebook, with its figures. Its second cell installs rlxf.

    Relative links become links to the repository, because Colab shows the file outside of it.

    Args:
        source: source of the notebook.
        texts: what each code cell printed.
    """
    cells, remaining = [], iter(texts)
    for cell, own_figure in _with_figures(source, read(source)):
        outputs = [] if cell.cell_type == "markdown" else _outputs(next(remaining), own_figure)
        cells.append(_plain_cell(cell.cell_type, cell.source, cell.metadata, outputs))
    install = INSTALL.format(extra=EXTRAS.get(source.stem, ""))
    cells.insert(1, _plain_cell("code", install, {}, []))
    for number, content in enumerate(cells):
        content["id"] = f"cell-{number}"
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    document = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _outputs(text: str, own_figure: Path | None) -> list[dict[str, Any]]:
    """Return the outputs of a code cell in the format of notebooks."""
    outputs: list[dict[str, Any]] = []
    if text:
        lines = f"{text}\n".splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if own_figure is not None:
        picture = base64.b64encode(own_figure.read_bytes()).decode()
        outputs.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}})
    return outputs


def _plain_cell(kind: str, text: str, metadata: dict[str, Any], outputs: list[Any]) -> dict[str, Any]:
    if kind == "markdown":
        text = LINK.sub(_repository_link, text)
    content = {"cell_type": kind, "metadata": dict(metadata), "source": text.splitlines(keepends=True)}
    return content if kind == "markdown" else content | {"execution_count": None, "outputs": outputs}


def _repository_link(link: re.Match[str]) -> str:
    path = normpath(join(FOLDER, link["path"]))
    return f"{link['before']}{REPOSITORY}/blob/main/{path}{link['anchor'] or ''}{link['after']}"
