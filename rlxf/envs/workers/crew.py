"""Pool of worker processes of a `WorkerVecEnv`: it sends calls and restarts environments that fail."""

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
    """Pool of worker processes; environments that fail are restarted while the others continue.

    Args:
        makes: function that creates each environment.
        workers: number of processes, timeouts and restarts.
    """

    def __init__(self, makes: Sequence[Make], workers: Workers):
        self.workers = workers
        self.seeds: list[int | None] = [None] * len(makes)
        """Seed of each environment, from which the seeds of its restarts are derived."""
        self.restarts = [0] * len(makes)
        """Total number of restarts of each environment."""
        self.causes = [""] * len(makes)
        """Cause of the last failure of each environment."""
        self._makes = dict(enumerate(makes))
        self._failures_in_a_row = [0] * len(makes)
        self._good_steps = [0] * len(makes)
        self._at: dict[int, Worker] = {}
        self._recoveries: list[Recovery] = []
        self._called: list[Worker] = []
        self._final_error: BrokenEnvironmentError | None = None
        with closed_if_it_fails(self):
            for share in workers.shares(len(makes)):
                self._at |= dict.fromkeys(share, Worker({i: self._makes[i] for i in share}))

    @property
    def up(self) -> set[int]:
        """Indices of the environments that can be called."""
        return set(self._at)

    @property
    def start_timeout(self) -> float:
        """Timeout in seconds of a slow call to all environments; a process runs its calls one by one."""
        largest = max((len(worker.environments) for worker in self._at.values()), default=1)
        return self.workers.start_timeout * largest

    def ask(self, calls: Mapping[int, Call]) -> None:
        """Send calls to environments that are up; `answers` returns their results.

        Raises:
            BrokenEnvironmentError: if an environment failed too often before.
        """
        self._raise_final_error()
        calls_of: dict[Worker, dict[int, Call]] = {}
        for i, each in calls.items():
            calls_of.setdefault(self._at[i], {})[i] = each
        for worker, worker_calls in calls_of.items():
            worker.ask(worker_calls)
        self._called = list(calls_of)

    def answers(self, seconds: float) -> dict[int, Any]:
        """Wait for the results of the calls.

        Returns:
            The result of each call, or its `Fault`. If a process is lost, the fault is returned for all of
            its environments, including those that were not called.
        """
        deadline = monotonic() + seconds
        called, self._called = self._called, []
        return {i: result for worker in called for i, result in worker.answers(deadline).items()}

    def dead(self) -> dict[int, Fault]:
        """Return the faults of environments whose process ended between calls."""
        dead_workers = [worker for worker in set(self._at.values()) if worker.is_dead]
        return {i: fault for worker in dead_workers for i, fault in worker.answers(monotonic()).items()}

    def played(self, i: int, ended: bool) -> None:
        """Count a step of environment i. The end of an episode, or enough steps, reset its failure count."""
        self._good_steps[i] += 1
        if ended or self._good_steps[i] >= GOOD_STEPS:
            self._failures_in_a_row[i] = 0

    def restart(self, faults: Mapping[int, Fault]) -> None:
        """Remove the environments that failed, warn with the cause, and schedule their restart.

        Raises:
            BrokenEnvironmentError: if an environment failed too often in a row.
        """
        groups: dict[int, list[int]] = {}
        for i in sorted(faults):
            groups.setdefault(id(faults[i]), []).append(i)
        for failed in groups.values():
            self._restart(failed, faults[failed[0]])

    def fresh_reset(self, i: int) -> Call:
        """Return a reset call with a new seed, since the current seed may have caused the failure."""
        seed = self.seeds[i]
        if seed is not None:
            seed = int(np.random.SeedSequence(seed, spawn_key=(self.restarts[i],)).generate_state(1)[0])
        return call("reset", seed, {})

    def returned(self) -> dict[int, Any]:
        """Return the reset results, or the `Fault`, of environments that finished restarting."""
        results: dict[int, Any] = {}
        for recovery in list(self._recoveries):
            reset_results = recovery.look()
            if reset_results is not None and recovery.worker is not None:
                self._recoveries.remove(recovery)
                self._at |= dict.fromkeys(reset_results, recovery.worker)
                results |= reset_results
        return results

    def wait(self) -> None:
        """Wait until the next restart needs attention: a reply, its start time or its timeout.

        Raises:
            BrokenEnvironmentError: if an environment failed too often before and is not restarted.
        """
        self._raise_final_error()
        pipes = [each.worker.pipe for each in self._recoveries if each.worker is not None]
        due = min(each.until for each in self._recoveries)
        connection.wait(pipes, max(0.0, due - monotonic()))

    def close(self) -> None:
        """Let all processes close their environments, within `PATIENCE` seconds in total, and end them."""
        for recovery in self._recoveries:
            recovery.end()
        workers = set(self._at.values())
        for worker in workers:
            worker.dismiss()
        deadline = monotonic() + PATIENCE
        for worker in workers:
            worker.wait(deadline)

    def _restart(self, failed: list[int], fault: Fault) -> None:
        self._remove(failed)
        for i in failed:
            self._failures_in_a_row[i] += 1
            self._good_steps[i] = 0
            self.restarts[i] += 1
            self.causes[i] = fault.cause
        times = max(self._failures_in_a_row[i] for i in failed)
        if times > self.workers.restarts:
            count = f"{times} time{'s' * (times > 1)} in a row"
            reason = f"; it failed {count}, and {self.workers.restarts} restarts in a row are allowed"
            self._final_error = broken_error(failed, fault, reason)
            raise self._final_error
        delay = self.workers.delay(times)
        warnings.warn(
            f"{named(failed)} {fault.cause}; restarting in {delay:g} s, restart {times} of "
            f"{self.workers.restarts} in a row\n{fault.traceback}",
            RuntimeWarning,
            stacklevel=2,
        )
        makes = {i: self._makes[i] for i in failed}
        resets = {i: self.fresh_reset(i) for i in failed}
        timeout = self.workers.start_timeout * len(failed)
        self._recoveries.append(Recovery(makes, resets, monotonic() + delay, timeout))

    def _raise_final_error(self) -> None:
        if self._final_error is not None:
            raise self._final_error

    def _remove(self, failed: list[int]) -> None:
        for worker in {self._at[i] for i in failed}:
            worker.leave(failed)
        for i in failed:
            del self._at[i]


@contextmanager
def closed_if_it_fails(crew: Crew) -> Iterator[None]:
    """Context manager that ends all processes if its body raises."""
    try:
        yield
    except BaseException:
        crew.close()
        raise


def named(environments: Sequence[int]) -> str:
    """Return ``environment 3``, or ``environments 3, 4``."""
    return f"environment{'s' * (len(environments) > 1)} {', '.join(map(str, environments))}"


def broken_error(environments: Sequence[int], fault: Fault, reason: str = "") -> BrokenEnvironmentError:
    """Return the error for a fault, with the traceback of the environment as a note."""
    error = BrokenEnvironmentError(f"{named(environments)} {fault.cause}{reason}")
    if fault.traceback:
        error.add_note(f"In the environment:\n{fault.traceback}")
    return error
