"""Restart of environments that failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rlxf.envs.workers.serving import Call, Make
from rlxf.envs.workers.worker import Worker


@dataclass(eq=False)
class Recovery:
    """Pending restart, after a delay and in a new process, of environments that failed together.

    Args:
        makes: function that creates each environment, by its index.
        calls: reset call of each environment.
        due: time at which the process is started, by ``time.monotonic``.
        timeout: seconds after the start within which all environments must be reset.
    """

    makes: Mapping[int, Make]
    calls: Mapping[int, Call]
    due: float
    timeout: float
    worker: Worker | None = field(default=None, init=False)

    @property
    def until(self) -> float:
        """Time of the start of the process or, once it runs, of its timeout, by ``time.monotonic``."""
        return self.due if self.worker is None else self.due + self.timeout

    def look(self) -> dict[int, Any] | None:
        """Start the process if it is due, and return the results of the resets, or their `Fault`.

        Returns:
            None while the restart is not finished.
        """
        now = monotonic()
        if self.worker is None:
            self._start(now)
            return None
        if now < self.until and not self.worker.pipe.poll():
            return None
        return self.worker.answers(now)

    def end(self) -> None:
        """End the process, if it was started."""
        if self.worker is not None:
            self.worker.end()

    def _start(self, now: float) -> None:
        if now >= self.due:
            self.due = now
            self.worker = Worker(self.makes)
            self.worker.ask(self.calls)
