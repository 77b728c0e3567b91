"""Links of Markdown pages that are written for reading in the repository, as links of the site."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

INCLUDED = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "zoo/README.md": "trained-agents.md",
}
"""File of the repository outside of docs -> page of the site."""
NOTEBOOKS = "examples/notebooks"
"""Folder of the notebooks in the repository."""
LINK = re.compile(
    r"(?P<before>\]\()(?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?P<after>\))"
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
OVERVIEW_START = "## Features"
"""Heading of README.md at which the page Overview begins; Home and Installation have what precedes it."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def source_of(page: str) -> str:
    """Return the file in the repository of a page of the site, for example ``docs/index.md``."""
    sources = {target: source for source, target in INCLUDED.items()}
    if page.startswith("notebooks/"):
        return f"{NOTEBOOKS}/{Path(page).stem.replace('-', '_')}.py"
    return sources.get(page, f"docs/{page}")


def overview(readme: str) -> str:
    """Return the page Overview, which is README.md without its first sections."""
    return f"# Overview\n\n{readme[readme.index(OVERVIEW_START) :]}"


def _is_left_out(anchor: str | None, root: Path) -> bool:
    """Return whether an anchor of README.md is in the sections that the page Overview leaves out."""
    first = (root / "README.md").read_text(encoding="utf-8").partition(OVERVIEW_START)[0]
    titles = HEADING.findall("".join(FENCED.split(first)[::2]))
    return anchor in {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def notebook_page(source: str) -> str:
    """Return the page of a notebook on the site, such as ``notebooks/memory-task.md``, given its file."""
    return f"notebooks/{Path(source).stem.replace('_', '-')}.md"


def site_links(text: str, page: str, root: Path, repository: str) -> str:
    """Return Markdown whose relative links lead to pages of the site, or to files of the repository.

    Links to files that do not exist stay as they are, so that MkDocs reports them.

    Args:
        text: Markdown of the page.
        page: path of the page on the site, such as ``how-to/distill.md``.
        root: root folder of the repository.
        repository: URL of the repository.
    """
    source = source_of(page)

    def replace(link: re.Match[str]) -> str:
        path = _target(link["path"], link["anchor"], source, page, root, repository)
        return f"{link['before']}{path}{link['anchor'] or ''}{link['after']}"

    parts = FENCED.split(text)  # every second part is a program, which has no links
    return "".join(part if number % 2 else LINK.sub(replace, part) for number, part in enumerate(parts))


def _target(link: str, anchor: str | None, source: str, page: str, root: Path, repository: str) -> str:
    target = normpath(join(dirname(source), link))
    if target == "README.md" and _is_left_out(anchor, root):
        return f"{repository}/blob/main/{target}"
    if target in INCLUDED:
        return relpath(INCLUDED[target], dirname(page) or ".")
    if target.startswith(f"{NOTEBOOKS}/") and (root / target).exists():
        return relpath(notebook_page(target), dirname(page) or ".")
    if target.startswith("docs/"):
        return relpath(target.removeprefix("docs/"), dirname(page) or ".")
    if not (root / target).exists():
        return link
    kind = "tree" if (root / target).is_dir() else "blob"
    return f"{repository}/{kind}/main/{target}"
