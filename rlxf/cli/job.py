"""Identification of the torchrun job that started a run.

Only this job continues the run in its folder when torchrun restarts its processes.
"""

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
"""Name of the marker file in the folder of a run. ``config.json`` does not depend on torchrun."""
UNKNOWN = ""
"""Agent on systems that do not report the start time of a process; it matches no marker."""


@dataclass(frozen=True)
class Job:
    """Job of torchrun, which stays the same when torchrun restarts its worker processes.

    The job id is not unique, because it is set with ``--rdzv-id``. Jobs are therefore compared by their
    agents, too: the processes of torchrun itself, one per machine. Agents may join and leave, but two
    successive starts of a job have at least one agent in common.

    Args:
        name: job id.
        agents: host, process id and start time of each agent.
    """

    name: str
    agents: frozenset[str]

    @classmethod
    def at_hand(cls) -> Self | None:
        """Return the job that started the processes of this group; None without torchrun."""
        name = os.environ.get(ID)
        if name is None:
            return None
        archives = here().gathered_archives(Archive({"agent": _agent()}, {}))
        return cls(name, frozenset(archive.documents["agent"] for archive in archives) - {UNKNOWN})

    def began(self, run: Path) -> bool:
        """Return whether this job wrote the marker file in the folder of a run."""
        if not (run / FILE).is_file():
            return False
        marker = load_json((run / FILE).read_bytes())
        if not isinstance(marker, dict) or not isinstance(marker.get("agents"), list):
            return False
        return marker.get("name") == self.name and any(agent in marker["agents"] for agent in self.agents)

    def mark(self, run: Path) -> None:
        """Write the marker file of this job into the folder of a run.

        Raises:
            OSError: if the file cannot be written.
        """
        text = dump_json({"name": self.name, "agents": sorted(self.agents)}, indent=2)
        atomic_write(run / FILE, lambda handle: handle.write(text))


def _agent() -> str:
    """Return host, process id and start time of the torchrun process that started this one.

    The start time is in clock ticks since boot (proc(5), starttime). It is needed because process ids are
    reused.
    """
    stat = Path(f"/proc/{os.getppid()}/stat")
    if not stat.is_file():
        return UNKNOWN
    return f"{socket.gethostname()} {os.getppid()} {stat.read_text().rpartition(')')[2].split()[19]}"
