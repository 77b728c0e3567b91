"""Tests that the pages of implementation details name functions and classes that exist."""

import ast
import re
from pathlib import Path

import pytest
from website.source_lines import SOURCE_LINK, definitions, with_lines

from tests.sources import ROOT, parsed

PAGES = sorted((ROOT / "docs" / "explanation").glob("implementation-details-*.md"))
DETAIL = re.compile(r"^\| (\d+) \| (\*\*.*) \|$", re.MULTILINE)
NOTE = re.compile(r"^- \*\*(\d+)\.\*\* ", re.MULTILINE)
EFFECTS = ("none", "worse", "better", "measured", "not measured")


def source_links(page: Path) -> list[tuple[str, str]]:
    """Return the name and the path in the repository of each link of a page to a source file."""
    links = SOURCE_LINK.findall(page.read_text(encoding="utf-8"))
    return [(name, (page.parent / link).resolve().relative_to(ROOT).as_posix()) for name, link in links]


def missing(name: str, file: str) -> bool:
    """Return whether a file of rlxf does not exist, or does not define a name."""
    tree = parsed("rlxf").get(file)
    return tree is None or name not in dict(definitions(tree))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_linked_files_define_the_named_functions(page):
    links = source_links(page)
    assert links
    assert not [f"{file} does not define {name}" for name, file in links if missing(name, file)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_details_are_numbered_and_have_a_source_and_an_effect(page):
    text = page.read_text(encoding="utf-8")
    details, notes = DETAIL.findall(text), NOTE.findall(text)
    assert [int(number) for number, _ in details] == list(range(1, len(details) + 1))
    assert 25 <= len(details) <= 40  # the pages stay readable
    for number, row in details:
        effect = row.rpartition(" | ")[2]
        assert SOURCE_LINK.search(row), f"detail {number} of {page.stem} has no source"
        assert effect.startswith(EFFECTS), f"detail {number} of {page.stem} does not say what was measured"
        assert effect.startswith(("none", "not")) or number in notes, (
            f"the effect of {number} is not described"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_on_the_site_lead_to_the_lines_of_the_definitions(page):
    text = with_lines(page.read_text(encoding="utf-8"), f"explanation/{page.name}", ROOT)
    links = re.findall(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)#L(\d+)\)", text)
    assert [(name, link) for name, link, _ in links] == SOURCE_LINK.findall(page.read_text(encoding="utf-8"))
    for name, link, number in links:
        line = (page.parent / link).read_text(encoding="utf-8").splitlines()[int(number) - 1]
        assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", line)


def test_definitions_are_those_of_modules_and_classes():
    tree = ast.parse(
        "class A:\n    def f(self): ...\n    class B: ...\ndef g():\n    def inner(): ...\nx = 1\n"
    )
    assert dict(definitions(tree)) == {"A": 1, "A.f": 2, "A.B": 3, "g": 4}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gtrxl", "rlxf/agents/gtrxl/gae.py"),
        ("nothing", "rlxf/agents/gtrxl/core.py"),
        ("PopArtHead.nothing", "rlxf/agents/gtrxl/value_head.py"),
    ],
)
def test_missing_definitions_are_found(name, file):
    assert missing(name, file)
