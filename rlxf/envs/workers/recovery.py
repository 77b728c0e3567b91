"""Environments that broke, until they have begun anew."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rlxf.envs.workers.serving import Call, Make
from rlxf.envs.workers.worker import Worker


@dataclass(eq=False)
class Recovery:
    """Environments that broke together: first they wait, then they begin anew in a process of their own.

    Args:
        makes: what makes each of them, by its number.
        calls: their resets.
        due: when the process is started, by ``time.monotonic``.
        timeout: seconds from then on in which all of them must have begun.
    """

    makes: Mapping[int, Make]
    calls: Mapping[int, Call]
    due: float
    timeout: float
    worker: Worker | None = field(default=None, init=False)

    @property
    def until(self) -> float:
        """When something is to be done, if nothing is heard before."""
        return self.due if self.worker is None else self.due + self.timeout

    def look(self) -> dict[int, Any] | None:
        """What came of the resets, each the call's result or its `Fault`; None as long as nothing did."""
        now = monotonic()
        if self.worker is None:
            self._begin(now)
            return None
        if now < self.until and not self.worker.pipe.poll():
            return None
        return self.worker.answers(now)

    def end(self) -> None:
        """Begin nothing any more."""
        if self.worker is not None:
            self.worker.end()

    def _begin(self, now: float) -> None:
        if now >= self.due:
            self.due = now
            self.worker = Worker(self.makes)
            self.worker.ask(self.calls)
