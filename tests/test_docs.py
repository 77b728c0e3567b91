"""Tests that run the programs of the documentation, page by page and in order."""

import os
import re
import textwrap
from pathlib import Path

import bench
import pytest

import rlxf
from rlxf.cli.entry_point import parse
from tests.documentation import PAGES, commands, prints, programs, run_page
from tests.sources import ROOT


def name(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


TEXTS = {page: page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CONTRIBUTING.md"]}
SLOW = {
    "README.md",
    "docs/tutorials/train-decision-transformer.md",
    "docs/tutorials/train-gtrxl.md",
}
THOROUGH = {
    "docs/how-to/load-stable-baselines3-agents.md",
    "docs/how-to/plot-and-compare-runs.md",
    "docs/how-to/resume-and-reproduce.md",
    "docs/how-to/run-experiments.md",
    "docs/how-to/search-hyperparameters.md",
}
"""Pages whose programs run only with ``--thorough``, as they train for more than ten seconds."""
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
VERSION = f"rlxf {rlxf.__version__}\n"
BLOCKS = [
    pytest.param(block, id=f"{name(page)}:{block.line}")
    for page, text in TEXTS.items()
    for block in programs(text)
]
OTHER_PROGRAMS = {"source", "dask", "export", "git", "pip", "tensorboard", ".venv/bin/pre-commit"}
"""Commands of other projects on the pages."""


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Return the marks of the programs of a page."""
    slow, thorough = name(page) in SLOW | THOROUGH, name(page) in THOROUGH
    return [pytest.mark.slow] * slow + [pytest.mark.thorough] * thorough


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page), id=name(page)) for page in PAGES])
@pytest.mark.filterwarnings("error:the weights will not change")
@pytest.mark.usefixtures("minari_root", "restored_registry", "no_progress_bars")
def test_programs_of_a_page_print_the_shown_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(TEXTS[page], str(page))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.values[0].language == "python"])
def test_output_of_a_program_is_shown(block):
    """This includes programs that are not run."""
    assert block.output is not None or not prints(block.code)
    assert block.output is None or block.output.strip() != "...", "which matches any output"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.values[0].language == "bash"])
def test_commands_can_be_parsed(block):
    for words in commands(block.code):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Raise an error unless the program of a command accepts its arguments."""
    if "rlxf" in words:  # also after torchrun
        parse_arguments(parse, words[words.index("rlxf") + 1 :])
    elif "scripts/bench.py" in words:
        parse_arguments(bench.parse, words[words.index("scripts/bench.py") + 1 :])
    elif words[0] not in OTHER_PROGRAMS:
        assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} is not a program of this project"


def parse_arguments(program, args: list[str]) -> None:
    try:
        program(args)
    except SystemExit as exit_:
        assert exit_.code == 0, f"{args} cannot be parsed"  # noqa: PT017 - --help exits with 0


def test_blocks_share_one_namespace():
    assert run_page("```python\na = 1\n```\ntext\n```python\nb = a + 1\n```\n", "page")["b"] == 2


def test_skipped_block_is_not_run():
    text = "<!-- not run: takes an hour -->\n```python\nraise RuntimeError\n```\n\n```python\na = 1\n```\n"
    assert [block.run for block in programs(text)] == [False, True]
    assert run_page(text, "page")["a"] == 1


def test_skip_comment_applies_to_one_block():
    skipped = "<!-- not run: takes an hour -->\n```bash\nfalse\n```\n\n"
    text = f"{skipped}```python\na = 1\n```\n\n{skipped}"
    assert [block.run for block in programs(text)] == [False, True, False]


def test_a_block_is_run_with_the_numbers_of_the_test():
    comment = "<!-- tested with 2 in place of 1_000, 3 in place of 50 -->\n"
    text = f"{comment}```python\na = [1_000, 50, 500]\n```\n\n```python\nb = 1_000\n```\n"
    assert run_page(text, "page") == run_page(text, "page") | {"a": [2, 3, 500], "b": 1000}
    assert run_page(f"{comment}```bash\ntest $((1_000 + 50)) = 5\n```\n".replace("1_000", "99"), "page")
    with pytest.raises(ValueError, match="does not contain 50"):
        run_page(f"{comment}```python\na = 1_000\n```\n", "page")


@pytest.mark.parametrize(
    ("code", "status"),
    [("rlxf --version\nrlxf tuned nothing\nrlxf --version", 2), ("rlxf --version | grep 9999", 1)],
    ids=["in the process", "in a shell"],
)
def test_a_failing_command_fails(code, status):
    with pytest.raises(AssertionError, match=f"page.md:2 ends with {status}"):
        run_page(f"```bash\n{code}\n```\n", "page.md")


def test_output_of_commands_in_the_process_is_compared():
    run_page(f"```bash\nrlxf --version\nrlxf --version\n```\n\n```text\n{2 * VERSION}```\n", "page.md")
    with pytest.raises(AssertionError, match="and the page shows"):
        run_page(f"```bash\nrlxf --version\n```\n\n```text\n{2 * VERSION}```\n", "page.md")


def test_other_languages_are_not_run():
    assert programs("```\nlayout\n```\n```bibtex\n@article\n```\n") == []


def test_traceback_has_the_line_of_the_page():
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
def test_equal_output_passes(text):
    run_page(text, "page.md")


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_different_output_fails(text, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_page(text, "page.md")


def test_prints_are_detected():
    assert prints(
        textwrap.dedent("""
        try:
            f()
        except ValueError as error:
            print(error)
    """)
    )
    assert not prints("blueprint(1)\n'print(1)'")


def test_commands_are_split_as_in_bash():
    code = "# comment\nA=1 rlxf train \\\n    --env 'x y'  # more\n\nexport B=2\n"
    assert list(commands(code)) == [["rlxf", "train", "--env", "x y"], ["export", "B=2"]]


@pytest.mark.parametrize("line", ["rlxf train gtrxl --enw CartPole-v1", "scripts/none.sh", "rlfx train"])
def test_unknown_command_fails(line):
    with pytest.raises(AssertionError):
        check_command(next(commands(line)))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_are_those_of_headings_outside_of_programs():
    assert anchors("# Files, and `zip`\n\n```bash\n# comment\n```\n\n## A run\n") == {
        "files-and-zip",
        "a-run",
    }


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_between_pages_exist(page):
    missing = [link for link, anchor in LINK.findall(TEXTS[page]) if not is_valid_link(page, link, anchor)]
    assert not missing, f"{name(page)} points at {missing}"


def is_valid_link(page: Path, link: str, anchor: str) -> bool:
    """Return whether a link of a page points to a file and, with an anchor, to a heading of a page."""
    target = (page.parent / link).resolve() if link else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target.read_text(encoding="utf-8"))


def test_the_index_links_to_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link, _ in LINK.findall(TEXTS[index])}
    assert not {name(page) for page in TEXTS if page != index and page.resolve() not in linked}
