"""The Python blocks of the documentation run, page by page, in order, as a reader would paste them."""

import re

import pytest

from tests.sources import ROOT

BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[str]:
    """The blocks to run, each moved to its own line so that a traceback names the line of the page."""
    runnable = [match for match in BLOCK.finditer(text) if not match["skip"]]
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in runnable]


def run(text: str, page: str) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        exec(compile(block, page, "exec"), namespace)  # noqa: S102 - our own pages
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("minari_root")
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text(encoding="utf-8"), str(page))


def test_blocks_share_one_namespace():
    assert run("```python\na = 1\n```\ntext\n```python\nb = a + 1\n```\n", "page")["b"] == 2


def test_a_block_with_a_reason_is_not_run():
    text = "<!-- not run: takes an hour -->\n```python\nraise RuntimeError\n```\n\n```python\na = 1\n```\n"
    assert len(blocks(text)) == 1


def test_other_languages_are_not_run():
    assert blocks("```bash\nfalse\n```\n```\nlayout\n```\n") == []


def test_a_failure_names_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as failure:
        run("# Title\n\n```python\na = 0\n1 / a\n```\n", "page.md")
    assert failure.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} points at {missing}"
