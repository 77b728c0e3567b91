"""Options of the runs that other commands start: checks before their processes start."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlxf.experiments.execution import Job


FRAME = re.compile(r"[╭╮╰╯│─]|[+|]?-{3,}[+|]?|^ *\||\| *$", re.MULTILINE)
"""Pattern of the frame of an error message of tyro, also without Unicode."""


def check_words(words: Sequence[str]) -> None:
    """Raise ValueError with the message of the command line if it refuses these words."""
    from rlxf.cli.entry_point import parse

    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            parse(words)
    except SystemExit:
        raise ValueError(_plain(printed.getvalue())) from None


def _plain(text: str) -> str:
    """Return an error message of the command line in one line, without frames."""
    line = " ".join(FRAME.sub(" ", text).replace("rlxf: ", "").split())
    for end in ("For full helptext", "Argument helptext:"):
        line = line.partition(end)[0]
    return line.removeprefix("Value error ").strip()


def needs_trust(settings: Mapping[str, Any]) -> bool:
    """Return whether a run with these settings can be resumed with trust only."""
    names = ("env_kwargs", "curriculum", "trust_data", "workers")
    return ":" in str(settings.get("env", "")) or any(map(settings.get, names))


def check_same(job: "Job", settings: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a run exists and was made with other options, or with unknown ones.

    Args:
        job: the run.
        settings: options of its command.
        file: file that describes the runs.
    """
    from rlxf.experiments.execution import Outcome
    from rlxf.training.run_folder import RunFolder

    outcome, folder = Outcome.read(job), Path(job.folder)
    if outcome is not None:
        trained, given = _options(outcome.command), _options([job.command, *job.arguments])
        for name in {**trained, **given}:
            if trained.get(name) != given.get(name):
                raise ValueError(
                    f"{folder} was trained with {_shown(name, trained)}, but {file} has "
                    f"{_shown(name, given)}: move the folder, or choose another one with --output"
                )
    if not (folder / "config.json").is_file():
        return
    if outcome is None:
        raise ValueError(
            f"{folder} was not made by {file}, or its record {job.sibling('json')} is missing, so its "
            f"options are unknown: move the folder, or choose another one with --output"
        )
    config = RunFolder.reopen(folder).config
    given = {name: settings[name] for name in ("env", "env_kwargs") if name in settings}
    given |= {"curriculum": settings.get("curriculum", {})}
    given |= {"env_kwargs": settings.get("env_kwargs", {})} if "env" in settings else {}
    for name, value in given.items():
        if (config.get(name) or {}) != (value or {}):
            raise ValueError(
                f"{folder} has {name} = {config.get(name)!r} in its config.json, but {file} has "
                f"{value!r}: move the folder, or choose another one with --output"
            )


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> values of the options in the words of a command; the command has the name ""."""
    values: list[str] = []
    options = {"": values}
    for word in words:
        if word.startswith("--"):
            values = options[word] = []
        else:
            values.append(word)
    return options


def _shown(name: str, options: Mapping[str, list[str]]) -> str:
    """Return an option as on the command line, or the command."""
    return " ".join([name or "rlxf", *options[name]]) if name in options else f"no {name}"
