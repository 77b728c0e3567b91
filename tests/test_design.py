"""Tests of the tables of modules in docs/design.md: all named modules exist, and all modules are named."""

import re
from collections.abc import Iterator

import pytest

from tests.sources import ROOT

SECTIONS = re.split(r"^### ", (ROOT / "docs/design.md").read_text(), flags=re.MULTILINE)[1:]
PACKAGES = {
    tuple(packages): text
    for text in SECTIONS
    if (packages := re.findall(r"`(rlxf/\w+)`", text.partition("\n")[0]))
}


def named(text: str, packages: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths in the first column of a table; a name without folder is in that of the name before."""
    root = packages[0] if len(packages) == 1 else "rlxf"
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+)`", row):
            if "/" in name.rstrip("/"):
                folder = name.rpartition("/")[0] + "/"
                name = name.removeprefix(folder)
            yield f"{root}/{folder}{name}"


def exists(path: str) -> bool:
    return (ROOT / path).is_dir() if path.endswith("/") else (ROOT / f"{path}.py").is_file()


@pytest.mark.parametrize("packages", PACKAGES, ids=str)
def test_named_modules_exist(packages):
    assert [path for path in named(PACKAGES[packages], packages) if not exists(path)] == []


@pytest.mark.parametrize("packages", PACKAGES, ids=str)
def test_all_modules_are_named(packages):
    known = set(named(PACKAGES[packages], packages))
    modules = [path for package in packages for path in (ROOT / package).rglob("[!_]*.py")]
    paths = [path.relative_to(ROOT).with_suffix("").as_posix() for path in modules]
    folders = tuple(path for path in known if path.endswith("/"))
    assert [path for path in paths if path not in known and not path.startswith(folders)] == []
