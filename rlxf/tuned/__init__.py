"""Tuned settings of tasks, which are part of the package.

Each file is a settings file of one command (``rlxf train gtrxl --config FILE``). The comments at its top name
the task, the result that the settings gave, and the command that measured it. Names are unique over all
commands.
"""

from pathlib import Path

from rlxf.utils.names import choose_one_of

FOLDER = Path(__file__).parent
COMMANDS = {"train gtrxl": "gtrxl", "train dt": "dt", "train bc": "bc"}
"""Words of a command -> subfolder with its files."""


def tuned_files(command: str) -> dict[str, Path]:
    """Return name -> file of the tuned settings of a command, sorted by name."""
    return {path.stem: path for path in sorted((FOLDER / COMMANDS[command]).glob("*.toml"))}


def tuned_file(name: str, command: str | None = None) -> Path:
    """Return the file of tuned settings.

    Args:
        name: name of the settings.
        command: words of their command, a key of `COMMANDS`; None for any command.

    Raises:
        ValueError: if there are none with this name; the message lists all names, and states the command of
            settings of another one.
    """
    commands = [*COMMANDS] if command is None else [command]
    files = {each: file for words in commands for each, file in tuned_files(words).items()}
    if name not in files:
        owner = next((words for words in COMMANDS if name in tuned_files(words)), None)
        fault = f"unknown tuned settings {name!r}"
        if owner is not None:
            fault = f"the tuned settings {name!r} are for rlxf {owner}, not for rlxf {command}"
        raise ValueError(fault + choose_one_of(name, files))
    return files[name]


def settings_text(name: str) -> str:
    """Return the text of a file of tuned settings; the last line of its comment is its command."""
    file = tuned_file(name)
    (command,) = (words for words, folder in COMMANDS.items() if folder == file.parent.name)
    lines = file.read_text(encoding="utf-8").splitlines()
    count = len(description(file))
    data = "" if command == "train gtrxl" else " --dataset ID"
    return "\n".join([*lines[:count], f"# Use: rlxf {command} --config FILE{data}", *lines[count:]])


def description(file: Path) -> list[str]:
    """Return the lines of the comment at the top of a file of tuned settings: task, result, command."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]
