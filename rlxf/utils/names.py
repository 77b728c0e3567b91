"""Names: comparison, proposals for unknown ones in messages, and the classes that files name."""

import reprlib
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, TypeVar

T = TypeVar("T")

MIN_SIMILARITY = 0.6
"""Minimum similarity of a proposed name, from 0 to 1: the default of `difflib`, which measures it."""
MAX_LENGTH = 200
"""Maximum length of a name for which a proposal is searched, in quadratic time, and of `short_repr` texts."""


def short_repr(value: object) -> str:
    """Return the representation of a value of a file for a message; a long one is cut in its middle."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = MAX_LENGTH
    return shortener.repr(value)


def plain_name(text: str) -> str:
    """Return a name as names are compared: without case, dashes and underscores."""
    return text.replace("-", "").replace("_", "").lower()


def similar_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None if none is similar.

    Options of one group have a common prefix, e.g. ``core.``. If there is a dot in ``name``, only the words
    after the last dots are therefore compared, and whole names only if these words are equally similar. Of
    two words that are equally similar, the one with more equal letters is preferred: "log" to "low" for
    "lgo".
    """
    if len(name) > MAX_LENGTH:
        return None

    def similarity(other: str) -> tuple[tuple[float, float], tuple[float, float], str]:
        ends = (other.rpartition(".")[2], name.rpartition(".")[2]) if "." in name else (other, name)
        return _ratios(*ends), _ratios(other, name), other

    (likeness, _), _, best = max(map(similarity, known), default=((0.0, 0.0), (0.0, 0.0), ""))
    return best if likeness >= MIN_SIMILARITY else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean NAME?" with the most similar known name, to be added to a message.

    If none is similar, return ``otherwise`` after a semicolon, or "" without it.
    """
    near = similar_name(name, known)
    advice = f"did you mean {near}?" if near else otherwise
    return f"; {advice}" if advice else ""


def choose_one_of(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return "; did you mean NAME? Choose one of NAMES", to be added to a message.

    If none is similar, the question is about the name ``otherwise``, or is left out without it.
    """
    names = list(known)
    near = similar_name(name, names) or otherwise
    question = f"did you mean {near}? Choose" if near else "choose"
    return f"; {question} one of {', '.join(names)}"


def instance_from_json(kind: str, classes: Mapping[str, type[T]], data: Any) -> T:
    """Return an instance of the class with the name ``data["name"]``; the other entries are its arguments.

    Args:
        kind: name of the kind of the classes, for the message.
        classes: classes by name.
        data: JSON object, of a file that need not be valid.

    Raises:
        ValueError: if ``data`` is no object, or the name is unknown, e.g. that of a class of the user, which
            the file does not import.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{kind} must be a JSON object with a name, got {data!r}")
    options = dict(data)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in classes:
        raise ValueError(
            f"unknown {kind} {name!r}; use one of {', '.join(classes)}. If it is a class of your own, pass "
            f"{kind}=... to load"
        )
    return classes[name](**options)


def _ratios(first: str, second: str) -> tuple[float, float]:
    """Return the similarity of two names, and that of their letters in any order."""
    matcher = SequenceMatcher(None, plain_name(first), plain_name(second))
    return matcher.ratio(), matcher.quick_ratio()
