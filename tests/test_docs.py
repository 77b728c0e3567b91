"""The programs of the documentation run, page by page, in order, as a reader would paste them."""

import os
import re
import textwrap

import bench
import pytest
from rich.progress import Progress

from rlxf.cli.program import parse
from tests.documentation import PAGES, commands, prints, programs, run_page
from tests.sources import ROOT

TEXTS = {page: page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CONTRIBUTING.md"]}
SLOW = {"README.md"}
BLOCKS = [
    pytest.param(block, id=f"{page.name}:{block.line}")
    for page, text in TEXTS.items()
    for block in programs(text)
]
OTHER_PROGRAMS = {"export", "pip", "tensorboard", ".venv/bin/pre-commit"}
"""Commands of other projects that the pages name."""


@pytest.fixture
def _no_progress_bars(monkeypatch):
    """Bars are on the screen while a program runs, and no part of what it prints."""
    for name in ("start", "stop"):
        monkeypatch.setattr(Progress, name, lambda self: None)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW), id=page.name) for page in PAGES],
)
@pytest.mark.usefixtures("minari_root", "_no_progress_bars")
def test_every_program_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(TEXTS[page], str(page))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.values[0].language == "python"])
def test_what_a_program_prints_is_shown(block):
    """Also of programs that are not run."""
    assert block.output is not None or not prints(block.code)
    assert block.output is None or block.output.strip() != "...", "which holds for whatever is printed"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.values[0].language == "bash"])
def test_every_command_is_one_that_the_program_knows(block):
    for words in commands(block.code):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Raise unless the program of a command reads its arguments."""
    if "rlxf" in words:  # also behind torchrun
        read(parse, words[words.index("rlxf") + 1 :])
    elif "scripts/bench.py" in words:
        read(bench.parse, words[words.index("scripts/bench.py") + 1 :])
    elif words[0] not in OTHER_PROGRAMS:
        assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} is no program of ours"


def read(program, args: list[str]) -> None:
    try:
        program(args)
    except SystemExit as leaving:
        assert leaving.code == 0, f"{args} cannot be read"  # noqa: PT017 - --help leaves with 0


def test_blocks_share_one_namespace():
    assert run_page("```python\na = 1\n```\ntext\n```python\nb = a + 1\n```\n", "page")["b"] == 2


def test_a_block_with_a_reason_is_not_run():
    text = "<!-- not run: takes an hour -->\n```python\nraise RuntimeError\n```\n\n```python\na = 1\n```\n"
    assert [block.run for block in programs(text)] == [False, True]
    assert run_page(text, "page")["a"] == 1


def test_a_reason_holds_for_one_block_alone():
    skipped = "<!-- not run: takes an hour -->\n```bash\nfalse\n```\n\n"
    text = f"{skipped}```python\na = 1\n```\n\n{skipped}"
    assert [block.run for block in programs(text)] == [False, True, False]


def test_other_languages_are_not_run():
    assert programs("```\nlayout\n```\n```bibtex\n@article\n```\n") == []


def test_a_failure_names_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as failure:
        run_page("# Title\n\n```python\na = 0\n1 / a\n```\n", "page.md")
    assert failure.traceback[-1].lineno + 1 == 5


def page_with(code: str, output: str, vary: bool = False) -> str:
    return f"```python\n{code}\n```\n\n{'<!-- numbers vary -->' * vary}\n```text\n{output}\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        page_with("print(2)", "2"),
        page_with("print('2   ')", "2"),
        page_with("print(0.1234, 'seconds')", "... seconds"),
        page_with("print('a')\nprint('b')", "a\nb"),
        page_with("print('a -0.5 b')", "a 1e-05 b", vary=True),
        page_with("print('┌──┐')", "┌────┐", vary=True),
        page_with("print('from 1,000 to 0, surely')", "from 2 to 0.5, surely", vary=True),
        "```bash\necho 2\n```\n\n```text\n2\n```\n",
        "```bash\necho 2\n```\n",
    ],
)
def test_an_output_as_shown_passes(text):
    run_page(text, "page.md")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```python\nprint(2)\n```\n", "page.md:2 prints:\n2\nand the page shows no output"),
        ("```python\nprint(2)\n```\nprose\n```text\n2\n```\n", "shows no output"),
        (page_with("print(2)", "3"), "and the page shows:\n3"),
        (page_with("a = 2", "2"), "and the page shows:\n2"),
        (page_with("print('1 2')", "1  2"), "and the page shows:\n1  2"),
        (page_with("print('a -0.5 b')", "a 1e-05 b"), "and the page shows"),
        (page_with("print('mean 1')", "median 1", vary=True), "and the page shows:\nmedian 1"),
        (page_with("print('1, 2')", "1", vary=True), "and the page shows:\n1"),
        (page_with("print(object())", "<Report>"), "object at 0x"),
        ("```bash\necho 2\n```\n\n```text\n3\n```\n", "and the page shows:\n3"),
        ("```bash\nfalse\ntrue\n```\n", "page.md:2 ends with 1"),
    ],
)
def test_an_output_that_differs_fails(text, told):
    with pytest.raises(AssertionError, match=re.escape(told)):
        run_page(text, "page.md")


def test_a_print_anywhere_in_a_program_is_found():
    assert prints(
        textwrap.dedent("""
        try:
            f()
        except ValueError as error:
            print(error)
    """)
    )
    assert not prints("blueprint(1)\n'print(1)'")


def test_commands_are_read_as_bash_reads_them():
    code = "# comment\nA=1 rlxf train \\\n    --env 'x y'  # more\n\nexport B=2\n"
    assert list(commands(code)) == [["rlxf", "train", "--env", "x y"], ["export", "B=2"]]


@pytest.mark.parametrize("line", ["rlxf train gtrxl --enw CartPole-v1", "scripts/none.sh", "rlfx train"])
def test_a_command_that_nobody_knows_fails(line):
    with pytest.raises(AssertionError):
        check_command(next(commands(line)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXTS[page])
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} points at {missing}"
