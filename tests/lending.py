"""Links of installed distributions into a new virtual environment, limited to declared requirements."""

from collections import Counter
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(installed: Distribution, extra: str = "") -> list[Requirement]:
    """Return the requirements of a distribution on this machine, with an extra or without."""
    declared = [Requirement(line) for line in installed.requires or []]
    return [each for each in declared if each.marker is None or each.marker.evaluate({"extra": extra})]


def closure(required: list[Requirement]) -> dict[str, Distribution]:
    """Return the installed distributions of requirements, recursively; raise an error if one is missing."""
    closed: dict[str, Distribution] = {}
    seen, todo = set(), named(required)
    while todo:
        name, extra = todo.pop()
        if (name, extra) not in seen:
            seen.add((name, extra))
            closed[name] = distribution(name)
            todo += named(requirements(closed[name], extra))
    return closed


def named(required: list[Requirement]) -> list[tuple[str, str]]:
    """Return the names of distributions, each without an extra and with each of its extras."""
    return [(canonicalize_name(each.name), extra) for each in required for extra in ("", *each.extras)]


def lend(installed: dict[str, Distribution], site: Path) -> None:
    """Link the files of distributions into the site-packages of another environment."""
    owners = Counter(top for each in distributions() for top in {file.parts[0] for file in each.files or []})
    for each in installed.values():
        for path in pieces(each, owners):
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).symlink_to(each.locate_file(path))


def pieces(installed: Distribution, owners: Counter[str]) -> set[Path]:
    """Return the folders of a distribution, or the files of folders that it shares with others.

    Commands and manual pages, which are outside of site-packages, are omitted.
    """
    inside = [Path(file) for file in installed.files or [] if ".." not in file.parts]
    return {Path(file.parts[0]) if owners[file.parts[0]] == 1 else file for file in inside}
