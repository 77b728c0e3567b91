"""Lending a new environment what a distribution declares, and nothing else of what is installed here."""

from collections import Counter
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(lender: Distribution, extra: str = "") -> list[Requirement]:
    """What the distribution asks for on this machine, with one of its extras or none."""
    declared = [Requirement(line) for line in lender.requires or []]
    return [each for each in declared if each.marker is None or each.marker.evaluate({"extra": extra})]


def closure(wanted: list[Requirement]) -> dict[str, Distribution]:
    """The installed distributions that the requirements pull in, by name; raises if one is missing."""
    found: dict[str, Distribution] = {}
    seen, todo = set(), named(wanted)
    while todo:
        name, extra = todo.pop()
        if (name, extra) not in seen:
            seen.add((name, extra))
            found[name] = distribution(name)
            todo += named(requirements(found[name], extra))
    return found


def named(wanted: list[Requirement]) -> list[tuple[str, str]]:
    """Each distribution by itself, and once more with each of its extras."""
    return [(canonicalize_name(each.name), extra) for each in wanted for extra in ("", *each.extras)]


def lend(lent: dict[str, Distribution], site: Path) -> None:
    """Link what the distributions consist of into another environment's site-packages."""
    owners = Counter(top for each in distributions() for top in {file.parts[0] for file in each.files or []})
    for each in lent.values():
        for path in pieces(each, owners):
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).symlink_to(each.locate_file(path))


def pieces(lent: Distribution, owners: Counter[str]) -> set[Path]:
    """Its folders, as wholes where they are its alone, as nearly all are; else its files.

    Commands and manual pages, which lie outside of site-packages, are left out.
    """
    inside = [Path(file) for file in lent.files or [] if ".." not in file.parts]
    return {Path(file.parts[0]) if owners[file.parts[0]] == 1 else file for file in inside}
