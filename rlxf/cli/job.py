"""Which job of torchrun began a run: it alone may go on in its folder unasked."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlxf.training.archive import Archive
from rlxf.training.atomic import atomic_write
from rlxf.training.joining import here
from rlxf.training.plain_json import dump_json, load_json

ID = "TORCHELASTIC_RUN_ID"
FILE = "torchrun.json"
"""Beside the ``config.json`` of a run, which is the same however it is started."""
UNKNOWN = ""
"""The agent where the machine does not tell when a process began: no folder is known by it."""


@dataclass(frozen=True)
class Job:
    """A job of torchrun, through all starts of its processes.

    Its id does not tell one job from the next: ``--rdzv-id`` gives it, and may give it twice. So its agents
    count too, the processes of torchrun itself, one on each machine. They may come and go, but as long as the
    job lives one that was there before is still there.

    Args:
        name: its id.
        agents: one for each process of the training.
    """

    name: str
    agents: frozenset[str]

    @classmethod
    def at_hand(cls) -> Self | None:
        """That which started this process and those that it has joined; None without torchrun."""
        name = os.environ.get(ID)
        if name is None:
            return None
        all_of_them = here().gathered_archives(Archive({"agent": _agent()}, {}))
        return cls(name, frozenset(each.documents["agent"] for each in all_of_them) - {UNKNOWN})

    def began(self, run: Path) -> bool:
        """Whether the folder of a run is one that this job has marked."""
        if not (run / FILE).is_file():
            return False
        marked = load_json((run / FILE).read_bytes())
        if not isinstance(marked, dict) or not isinstance(marked.get("agents"), list):
            return False
        return marked.get("name") == self.name and any(each in marked["agents"] for each in self.agents)

    def mark(self, run: Path) -> None:
        """Say in the folder of a run whose it is.

        Raises:
            OSError: if it cannot be written.
        """
        text = dump_json({"name": self.name, "agents": sorted(self.agents)}, indent=2)
        atomic_write(run / FILE, lambda handle: handle.write(text))


def _agent() -> str:
    """The process of torchrun that started this one; with the moment, as numbers of processes come again.

    That is in clock ticks of its machine (proc(5), starttime).
    """
    stat = Path(f"/proc/{os.getppid()}/stat")
    if not stat.is_file():
        return UNKNOWN
    return f"{socket.gethostname()} {os.getppid()} {stat.read_text().rpartition(')')[2].split()[19]}"
