"""Runs of an experiment: their commands, and the files with their outcomes."""

from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Self

from rlxf.training.completion import Completion
from rlxf.training.json_rules import NOTHING, TEXT, TEXTS, check_fields, number, whole
from rlxf.training.strict_json import load_json, load_json_file, write_json_file
from rlxf.utils.run_files import CONFIG

RESUMED = "train "
"""Start of the commands whose runs have checkpoints, so that they can be resumed."""


class ExperimentError(OSError, ValueError):
    """Error in the folder of an experiment, such as a damaged file.

    It is an OSError for commands, which report these in one line, and a ValueError for a sweep, where a trial
    with such a run fails.
    """


@dataclass(frozen=True)
class Job:
    """Run of an experiment that is trained in a process of its own.

    Args:
        folder: folder of the run. Next to it are FOLDER.json, FOLDER.log and FOLDER.lock.
        command: words of the command that trains the agent.
        arguments: its options, without the folder.
        trusted: resume the run with trust in its environment, which the experiment file names.
        threads: threads of the process.
        options: all options of the command as JSON, those of files that the arguments name included.
    """

    folder: str
    command: str
    arguments: tuple[str, ...]
    trusted: bool = False
    threads: int = 1
    options: str = "{}"

    @property
    def words(self) -> list[str]:
        """Arguments of ``rlxf`` that continue the run, or start it."""
        folder = Path(self.folder)
        if self.command.startswith(RESUMED) and (folder / CONFIG).is_file():
            return ["resume", self.folder, "--no-progress-bar", *(["--trust"] if self.trusted else [])]
        return [*self.command.split(), *self.arguments, "--run", self.folder, "--no-progress-bar"]

    def sibling(self, suffix: str) -> Path:
        """Return the path of a file next to the folder of the run."""
        return Path(f"{self.folder}.{suffix}")


OUTCOME_RULES = {
    "command": TEXTS,
    "returncode": whole() | NOTHING,
    "message": TEXT,
    "seconds": number(0),
    "attempts": whole(0),
    "options": TEXT,
}
"""Rules of the fields of `Outcome` in a file."""


@dataclass(frozen=True)
class Outcome:
    """State of a run since the start of its last attempt.

    Args:
        command: words of the command and its options.
        returncode: exit status of the process; 0 after success, negative after a signal. None while it
            trains, and after the program that started it was killed.
        message: message at the end of its output after a failure.
        seconds: wall-clock time of the attempts whose end was recorded, from the last one that began a new
            training.
        attempts: number of processes that were started.
        options: options of the command, see `Job`; an empty object in files of earlier versions.
    """

    command: list[str]
    returncode: int | None = None
    message: str = ""
    seconds: float = 0.0
    attempts: int = 0
    options: str = "{}"

    @property
    def failure(self) -> str:
        """Reason why the last attempt has not finished the run; "" if it has."""
        if self.returncode is None:
            return "it has not ended, or the program that started it was killed"
        if self.returncode < 0:
            return _ended_by(-self.returncode)
        return "" if self.returncode == 0 else self.message or f"exit status {self.returncode}"

    @classmethod
    def read(cls, job: Job) -> Self | None:
        """Read the state of the last attempt; None if there was none.

        Raises:
            ExperimentError: if the file is damaged.
        """
        file = job.sibling("json")
        if not file.is_file():
            return None
        try:
            document = {"options": "{}", **load_json_file(file)}
            check_fields(document, OUTCOME_RULES, file.name)
            if not isinstance(load_json(document["options"].encode()), dict):
                raise TypeError("options must be an object")
            return cls(**document)
        except (ValueError, TypeError) as error:
            raise ExperimentError(f"{file} is damaged: remove it and the folder {job.folder}") from error

    def write(self, job: Job) -> None:
        """Replace the file with the outcome of a run."""
        write_json_file(job.sibling("json"), self.__dict__)


def _ended_by(signal: int) -> str:
    """Return the reason of the failure of a process that a signal has ended."""
    name = Signals(signal).name if signal in list(Signals) else f"signal {signal}"
    memory = ", e.g. because the memory was exhausted" if name == "SIGKILL" else ""
    return f"the training was ended by {name}{memory}"


def is_complete(job: Job) -> bool:
    """Return whether a run has finished, with its evaluation."""
    return Completion.read_marker(Path(job.folder)) is not None
