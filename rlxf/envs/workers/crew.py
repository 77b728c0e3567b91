"""The workers of a `WorkerVecEnv`: who is asked, what broke, and when it begins anew."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from time import monotonic
from typing import Any

import numpy as np

from rlxf.envs.errors import BrokenEnvironmentError
from rlxf.envs.workers.options import GOOD_STEPS, Workers
from rlxf.envs.workers.recovery import Recovery
from rlxf.envs.workers.serving import Call, Fault, Make, call
from rlxf.envs.workers.worker import PATIENCE, Worker


class Crew:
    """Environments in processes; those that break are started anew behind the back of the others.

    Args:
        makes: what makes each environment.
        workers: how many processes, and how patient.
    """

    def __init__(self, makes: Sequence[Make], workers: Workers):
        self.workers = workers
        self.seeds: list[int | None] = [None] * len(makes)
        """Of which the seeds of restarts come."""
        self.restarts = [0] * len(makes)
        """Of each environment, in all."""
        self.causes = [""] * len(makes)
        """Why each environment broke last."""
        self._makes = dict(enumerate(makes))
        self._in_a_row = [0] * len(makes)
        self._good_steps = [0] * len(makes)
        self._at: dict[int, Worker] = {}
        self._recoveries: list[Recovery] = []
        self._asked: list[Worker] = []
        self._given_up: BrokenEnvironmentError | None = None
        with closed_if_it_fails(self):
            for share in workers.shares(len(makes)):
                self._at |= dict.fromkeys(share, Worker({i: self._makes[i] for i in share}))

    @property
    def up(self) -> set[int]:
        """Environments that can be asked."""
        return set(self._at)

    @property
    def start_timeout(self) -> float:
        """Seconds for what takes each environment a while: those of a process do it one after the other."""
        most = max((len(worker.environments) for worker in self._at.values()), default=1)
        return self.workers.start_timeout * most

    def ask(self, calls: Mapping[int, Call]) -> None:
        """Send calls to environments that are up; `answers` gives what comes of them.

        Raises:
            BrokenEnvironmentError: if one broke too often before.
        """
        self._check_not_given_up()
        shares: dict[Worker, dict[int, Call]] = {}
        for i, each in calls.items():
            shares.setdefault(self._at[i], {})[i] = each
        for worker, share in shares.items():
            worker.ask(share)
        self._asked = list(shares)

    def answers(self, seconds: float) -> dict[int, Any]:
        """Results of the calls, or a `Fault`, also of those that are lost with them."""
        deadline = monotonic() + seconds
        asked, self._asked = self._asked, []
        return {i: result for worker in asked for i, result in worker.answers(deadline).items()}

    def dead(self) -> dict[int, Fault]:
        """Those whose process ended while nobody asked it anything."""
        gone = [worker for worker in set(self._at.values()) if worker.is_dead]
        return {i: fault for worker in gone for i, fault in worker.answers(monotonic()).items()}

    def played(self, i: int, ended: bool) -> None:
        """Environment i was stepped: behind the end of an episode, or enough steps, no break counts."""
        self._good_steps[i] += 1
        if ended or self._good_steps[i] >= GOOD_STEPS:
            self._in_a_row[i] = 0

    def restart(self, faults: Mapping[int, Fault]) -> None:
        """Take out what broke, tell why, and begin it anew after a while.

        Raises:
            BrokenEnvironmentError: if one broke too often.
        """
        together: dict[int, list[int]] = {}
        for i in sorted(faults):
            together.setdefault(id(faults[i]), []).append(i)
        for broken in together.values():
            self._restart(broken, faults[broken[0]])

    def fresh_reset(self, i: int) -> Call:
        """With a seed that no episode of this environment had: that of this one may be what broke it."""
        seed = self.seeds[i]
        if seed is not None:
            seed = int(np.random.SeedSequence(seed, spawn_key=(self.restarts[i],)).generate_state(1)[0])
        return call("reset", seed, {})

    def returned(self) -> dict[int, Any]:
        """Results of the resets of those that are back, or a `Fault`."""
        results: dict[int, Any] = {}
        for recovery in list(self._recoveries):
            begun = recovery.look()
            if begun is not None and recovery.worker is not None:
                self._recoveries.remove(recovery)
                self._at |= dict.fromkeys(begun, recovery.worker)
                results |= begun
        return results

    def wait(self) -> None:
        """Until there is something to look for.

        Raises:
            BrokenEnvironmentError: if one broke too often before: it does not come back.
        """
        self._check_not_given_up()
        pipes = [each.worker.pipe for each in self._recoveries if each.worker is not None]
        due = min(each.until for each in self._recoveries)
        connection.wait(pipes, max(0.0, due - monotonic()))

    def close(self) -> None:
        """Let all processes close their environments, for `PATIENCE` seconds together, and end them."""
        for recovery in self._recoveries:
            recovery.end()
        workers = set(self._at.values())
        for worker in workers:
            worker.dismiss()
        deadline = monotonic() + PATIENCE
        for worker in workers:
            worker.wait(deadline)

    def _restart(self, broken: list[int], fault: Fault) -> None:
        self._take_out(broken)
        for i in broken:
            self._in_a_row[i] += 1
            self._good_steps[i] = 0
            self.restarts[i] += 1
            self.causes[i] = fault.cause
        times = max(self._in_a_row[i] for i in broken)
        if times > self.workers.restarts:
            often = f"{times} time{'s' * (times > 1)} in a row"
            why = f"; that is {often}, and {self.workers.restarts} are allowed"
            self._given_up = broken_error(broken, fault, why)
            raise self._given_up
        delay = self.workers.delay(times)
        warnings.warn(
            f"{named(broken)} {fault.cause}; begins anew in {delay:g} s, restart {times} of "
            f"{self.workers.restarts} in a row\n{fault.traceback}",
            RuntimeWarning,
            stacklevel=2,
        )
        makes = {i: self._makes[i] for i in broken}
        resets = {i: self.fresh_reset(i) for i in broken}
        timeout = self.workers.start_timeout * len(broken)
        self._recoveries.append(Recovery(makes, resets, monotonic() + delay, timeout))

    def _check_not_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def _take_out(self, broken: list[int]) -> None:
        for worker in {self._at[i] for i in broken}:
            worker.leave(broken)
        for i in broken:
            del self._at[i]


@contextmanager
def closed_if_it_fails(crew: Crew) -> Iterator[None]:
    """Leave no process behind where a beginning is broken off."""
    try:
        yield
    except BaseException:
        crew.close()
        raise


def named(environments: Sequence[int]) -> str:
    """``environment 3``, or ``environments 3, 4``."""
    return f"environment{'s' * (len(environments) > 1)} {', '.join(map(str, environments))}"


def broken_error(environments: Sequence[int], fault: Fault, why_at_all: str = "") -> BrokenEnvironmentError:
    """The error that tells of a fault, with the environment's own traceback as a note."""
    error = BrokenEnvironmentError(f"{named(environments)} {fault.cause}{why_at_all}")
    if fault.traceback:
        error.add_note(f"In the environment:\n{fault.traceback}")
    return error
