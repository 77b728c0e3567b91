"""Tests of the notebooks: they run with small sizes, and their pages and .ipynb files match the sources."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import jupytext
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient
from website import notebooks
from website.links import LINK

from tests.documentation import commands, prints
from tests.sources import ROOT
from tests.test_docs import check_command

SOURCES = {source.stem: source for source in notebooks.sources(ROOT)}
SMALL = {
    "attention": {"TIMESTEPS": 100, "CORRIDOR": 3},
    "export": {"TIMESTEPS": 512, "EPISODES": 2},
    "memory_task": {"CORRIDOR": 3, "TIMESTEPS": 512, "EPISODES": 4},
    "new_technique": {"TIMESTEPS": 512, "EPISODES": 4},
    "offline_dataset": {"EPISODES": 35, "UPDATES": 3, "EVALUATED": 4},
    "own_environment": {"TIMESTEPS": 1024, "EPISODES": 4},
}
"""Name of a notebook -> sizes with which its test runs in seconds."""
WITH_COMMANDS = "attention"
"""Notebook with commands of the shell, which a Jupyter kernel runs. The others run in this process."""


@pytest.fixture
def _restored(monkeypatch, minari_root, tmp_path, restored_registry):
    """Set an empty folder, and restore what notebooks change in a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    yield
    sys.modules.pop("onnx_player", None)


def test_each_notebook_has_small_sizes():
    assert SMALL.keys() == SOURCES.keys()


IN_PROCESS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "export"))
    for name in sorted(SMALL.keys() - {WITH_COMMANDS})
]


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.usefixtures("_restored")
def test_the_cells_run_in_order(name, monkeypatch):
    module = ModuleType(f"notebook_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look up the module of their class
    run_cells(notebooks.with_parameters(notebooks.read(SOURCES[name]), SMALL[name]), vars(module))


def run_cells(notebook, namespace):
    """Run the code cells in one namespace."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"cell {number}", "exec"), namespace)  # noqa: S102 - our own files


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("_restored")
def test_the_notebook_with_commands_runs_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = notebooks.with_parameters(notebooks.read(SOURCES[WITH_COMMANDS]), SMALL[WITH_COMMANDS])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs" / "maze" / "attention.html").is_file()
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert len(pictures) == 2


# Conversion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_ipynb_files_match_their_sources(name):
    written = SOURCES[name].with_suffix(".ipynb").read_text(encoding="utf-8")
    assert written == converted(name), "run python scripts/notebooks.py"


def converted(name):
    """Return the .ipynb file that belongs to a source, with the printed texts of the present file."""
    return notebooks.ipynb(SOURCES[name], notebooks.printed(SOURCES[name]))


@pytest.mark.parametrize("name", SOURCES)
def test_ipynb_files_have_the_outputs_of_their_code(name):
    code = [cell.source for cell in notebooks.read(SOURCES[name]).cells if cell.cell_type == "code"]
    texts = notebooks.printed(SOURCES[name])
    silent = [cell for cell, text in zip(code, texts, strict=True) if writes(cell) and not text]
    assert not silent, f"run python scripts/notebooks.py --run {name}"
    assert not [text for text in texts if re.search(r"/(root|home|tmp|work|usr)/", text)]


def writes(cell):
    """Return whether a cell prints, or runs a command."""
    return cell.startswith("!") or "\n!" in cell or prints(cell)


def test_outputs_of_other_code_are_dropped(tmp_path):
    source = tmp_path / "name.py"
    source.write_text("# %% [markdown]\n# # A\n\n# %%\nprint(1)\n\n# %%\n2\n")
    assert notebooks.printed(source) == ["", ""]
    source.with_suffix(".ipynb").write_text(notebooks.ipynb(source, ["1", "2"]))
    assert notebooks.printed(source) == ["1", "2"]
    source.write_text("# %% [markdown]\n# # A\n\n# %%\nprint(1)\n\n# %%\n3\n")
    assert notebooks.printed(source) == ["", ""]


def test_execution_returns_printed_texts_and_values_and_writes_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "figure", lambda source, number: tmp_path / f"{source.stem}-{number}.png")
    source = tmp_path / "name.py"
    source.write_text(
        "# %%\nimport sys\nprint(1)\nprint('no', file=sys.stderr)\n2\n\n"
        "# %%\nimport matplotlib.pyplot as plt\n%matplotlib inline\nplt.plot([1, 2])\nplt.show()\n"
    )
    assert notebooks.execute(source) == ["1\n2", ""]
    assert (tmp_path / "name-1.png").read_bytes().startswith(b"\x89PNG")


def test_each_ipynb_file_has_a_source():
    assert {file.stem for file in (ROOT / notebooks.FOLDER).glob("*.ipynb")} == SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_ipynb_files_are_valid_and_install_rlxf(name):
    document = nbformat.reads(converted(name), as_version=4)
    nbformat.validate(document)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert not code[0].outputs
    assert "%pip install --quiet 'rlxf" in code[0].source


def test_the_extra_of_a_notebook_is_installed():
    assert "'rlxf[export] @ git+https://" in converted("export")
    assert "'rlxf @ git+https://" in converted("memory_task")


@pytest.mark.parametrize("name", SOURCES)
def test_ipynb_files_have_no_relative_links(name):
    """Colab shows a file outside of the repository."""
    assert not LINK.search(converted(name))


@pytest.mark.parametrize("name", SOURCES)
def test_pages_have_a_title_a_link_to_colab_and_the_code(name):
    page = notebooks.markdown(SOURCES[name])
    title, _, rest = page.partition("\n")
    assert re.fullmatch(r"# \w.+", title)
    link = f"[Open in Colab]({notebooks.COLAB}/{notebooks.FOLDER}/{name}.ipynb)"
    assert rest.strip().startswith(link)
    assert (ROOT / notebooks.FOLDER / f"{name}.ipynb").is_file()
    for cell in notebooks.read(SOURCES[name]).cells[1:]:  # the link is inside of the first one
        assert cell.source in page


def test_pages_show_all_figures():
    cells = {name: notebooks.read(source).cells for name, source in SOURCES.items()}
    shown = {name: sum(notebooks.SHOW in cell.source for cell in found) for name, found in cells.items()}
    files = [notebooks.figure(SOURCES[name], n + 1) for name, shows in shown.items() for n in range(shows)]
    assert sorted(files[0].parent.iterdir()) == sorted(files)


@pytest.mark.parametrize("name", SOURCES)
def test_links_of_notebooks_exist(name):
    links = [link["path"] for link in LINK.finditer(notebooks.markdown(SOURCES[name]))]
    assert links
    assert not [link for link in links if not (SOURCES[name].parent / link).exists()]


@pytest.mark.parametrize("name", SOURCES)
def test_commands_of_notebooks_can_be_parsed(name):
    page = notebooks.markdown(SOURCES[name])
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S):
        for words in commands(block):
            check_command(words)


def test_the_page_of_notebooks_links_to_all():
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert not [name for name in SOURCES if f"(../{notebooks.FOLDER}/{name}.py)" not in page]


# Sizes ---------------------------------------------------------------------------------------------------


SOURCE = """# %% [markdown]
# # Title

# %% tags=["parameters"]
STEPS = 20_000  # of each agent
OTHER = 1

# %%
STEPS = STEPS + 1
"""


def test_parameters_are_replaced_in_their_cell_only():
    notebook = notebooks.with_parameters(jupytext.reads(SOURCE, fmt="py:percent"), {"STEPS": 5})
    assert [cell.source for cell in notebook.cells[1:]] == ["STEPS = 5\nOTHER = 1", "STEPS = STEPS + 1"]


@pytest.mark.parametrize("name", ["MISSING", "STEP"])
def test_an_unknown_parameter_is_refused(name):
    with pytest.raises(ValueError, match=f"assigns {name} 0 times"):
        notebooks.with_parameters(jupytext.reads(SOURCE, fmt="py:percent"), {name: 5})
