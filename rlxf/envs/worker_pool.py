"""Pool of worker processes, and the restart of workers that failed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import connection
from time import monotonic
from typing import Any

import numpy as np

from rlxf.envs.sb3_vec_env import Make
from rlxf.envs.worker import CLOSE_TIMEOUT, MAX_WAIT, Worker
from rlxf.envs.worker_process import CLOSE, Call, CallFailure, call, failures_of
from rlxf.utils.checks import check_int, check_not_negative, check_positive
from rlxf.utils.errors import BrokenEnvironmentError
from rlxf.utils.warnings import warn_user

MAX_BACK_OFF = 60.0
"""Maximum delay of a restart in seconds."""
GOOD_STEPS = 1000
"""Steps after a failure that reset the failure count, for tasks whose episodes never end."""


@dataclass(frozen=True)
class Workers:
    """Options of the worker processes in which environments run.

    An environment fails if it raises, if its process dies, or if the process does not reply in time.
    Environments that fail together are restarted together in a new process. The others continue.

    Args:
        number: number of processes. The environments are split evenly over them. With one process per
            environment, an environment that dies or hangs affects no other; fewer processes have less
            overhead.
        timeout: seconds for one step of all environments of a process, including resets at the end of
            episodes, or for a query of attributes or images. All environments wait for the slowest, so a
            hanging environment delays all by this time. ``math.inf`` means no limit.
        start_timeout: seconds for the creation and the reset of an environment, including imports; also the
            limit of ``env_method``.
        max_restarts: maximum number of consecutive restarts of an environment; the next failure raises
            BrokenEnvironmentError. A finished episode, or `GOOD_STEPS` steps, resets the count.
        back_off: seconds from the first failure to the restart. It doubles with each consecutive failure, up
            to `MAX_BACK_OFF`.

    Raises:
        TypeError: if a number has another type.
        ValueError: if a number is out of range.
    """

    number: int
    timeout: float = 60.0
    start_timeout: float = 120.0
    max_restarts: int = 5
    back_off: float = 1.0

    def __post_init__(self) -> None:
        check_int("workers", self.number)
        check_int("max_restarts", self.max_restarts, least=0)
        check_not_negative("back_off", self.back_off)
        for name, seconds in (("timeout", self.timeout), ("start_timeout", self.start_timeout)):
            if seconds != math.inf:
                check_positive(name, seconds)

    def restart_delay(self, failures: int) -> float:
        """Return the seconds from the last of ``failures`` consecutive failures to the restart."""
        return float(min(self.back_off * 2.0 ** min(failures - 1, 64), MAX_BACK_OFF))

    def split_envs(self, n_envs: int) -> list[range]:
        """Return the environments of each process.

        Raises:
            ValueError: if there are more processes than environments.
        """
        if self.number > n_envs:
            raise ValueError(
                f"workers must be at most the number of environments, {n_envs}, got {self.number}"
            )
        ends = [n_envs * k // self.number for k in range(self.number + 1)]
        return [range(start, end) for start, end in pairwise(ends)]


@dataclass(eq=False)
class PendingRestart:
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
    def deadline(self) -> float:
        """Time of the start of the process or, once it runs, of its timeout, by ``time.monotonic``."""
        return self.due if self.worker is None else self.due + self.timeout

    def poll(self) -> dict[int, Any] | None:
        """Start the process if it is due, and return the results of the resets, or their `CallFailure`.

        Returns:
            None while the restart is not finished.
        """
        now = monotonic()
        if self.worker is None and now >= self.due:
            self.due = now
            self.worker = Worker(self.makes)
            self.worker.send_calls(self.calls)
        elif self.worker is not None and (now >= self.deadline or self.worker.pipe.poll()):
            return self.worker.receive(now)
        return None


class WorkerPool:
    """Pool of worker processes; environments that fail are restarted while the others continue.

    Args:
        makes: function that creates each environment.
        workers: number of processes, timeouts and restarts.
    """

    def __init__(self, makes: Sequence[Make], workers: Workers):
        self.workers = workers
        self.seeds: list[int | None] = [None] * len(makes)
        """Seed of each environment, from which the seeds of its restarts are derived."""
        self.persistent_states: list[dict[str, Any] | None] = [None] * len(makes)
        """State of each environment that lasts across episodes, e.g. the stage of a curriculum, or None."""
        self.restart_counts = [0] * len(makes)
        """Total number of restarts of each environment."""
        self.causes = [""] * len(makes)
        """Cause of the last failure of each environment."""
        self._makes = dict(enumerate(makes))
        self._failures_in_a_row = [0] * len(makes)
        self._good_steps = [0] * len(makes)
        self._workers_by_env: dict[int, Worker] = {}
        self._pending_restarts: list[PendingRestart] = []
        self._called: list[Worker] = []
        self._final_error: BrokenEnvironmentError | None = None
        self._is_closed = False
        with close_on_error(self):
            for group in workers.split_envs(len(makes)):
                self._workers_by_env |= dict.fromkeys(group, Worker({i: self._makes[i] for i in group}))

    @property
    def available(self) -> set[int]:
        """Indices of the environments that can be called."""
        return set(self._workers_by_env)

    @property
    def start_timeout(self) -> float:
        """Timeout in seconds of a slow call to all environments; a process runs its calls one by one."""
        largest = max((len(worker.environments) for worker in self._workers_by_env.values()), default=1)
        return self.workers.start_timeout * largest

    def send_calls(self, calls: Mapping[int, Call]) -> None:
        """Send calls to environments that are up; `receive` returns their results.

        Raises:
            BrokenEnvironmentError: if an environment failed too often before.
            ValueError: if the pool is closed.
        """
        self._check_usable()
        calls_of: dict[Worker, dict[int, Call]] = {}
        for i, each in calls.items():
            calls_of.setdefault(self._workers_by_env[i], {})[i] = each
        for worker, worker_calls in calls_of.items():
            worker.send_calls(worker_calls)
        self._called = list(calls_of)

    def receive(self, seconds: float) -> dict[int, Any]:
        """Wait for the results of the calls.

        Returns:
            The result of each call, or its `CallFailure`. If a process is lost, its failure is returned for
            all of its environments, including those that were not called.

        Raises:
            ValueError: if the pool is closed.
        """
        self._check_usable()
        deadline = monotonic() + seconds
        called, self._called = self._called, []
        return {i: result for worker in called for i, result in worker.receive(deadline).items()}

    def find_dead(self) -> dict[int, CallFailure]:
        """Return the failures of environments whose process ended between calls; none after `close`."""
        if self._is_closed:
            return {}
        dead_workers = [worker for worker in set(self._workers_by_env.values()) if worker.check_dead()]
        return {i: failure for worker in dead_workers for i, failure in worker.receive(monotonic()).items()}

    def count_step(self, i: int, ended: bool) -> None:
        """Count a step of environment i. The end of an episode, or enough steps, reset its failure count."""
        self._good_steps[i] += 1
        if ended or self._good_steps[i] >= GOOD_STEPS:
            self._failures_in_a_row[i] = 0

    def schedule_restarts(self, failures: Mapping[int, CallFailure]) -> None:
        """Remove the environments that failed, warn with the cause, and schedule their restart.

        Raises:
            BrokenEnvironmentError: if an environment had too many consecutive failures.
        """
        groups: dict[int, list[int]] = {}
        for i in sorted(failures):
            groups.setdefault(id(failures[i]), []).append(i)
        for failed in groups.values():
            for worker in {self._workers_by_env[i] for i in failed}:
                worker.remove_envs(failed)
            for i in failed:
                del self._workers_by_env[i]
                self._failures_in_a_row[i] += 1
                self._good_steps[i] = 0
                self.restart_counts[i] += 1
                self.causes[i] = failures[i].cause
            self._schedule(failed, failures[failed[0]])

    def new_reset_call(self, i: int) -> Call:
        """Return a reset call with a new seed, since the current seed may have caused the failure.

        The environment continues with the persistent state at the end of its last episode, unless a restart
        with it has failed.
        """
        seed = self.seeds[i]
        if seed is not None:
            seed = int(np.random.SeedSequence(seed, spawn_key=(self.restart_counts[i],)).generate_state(1)[0])
        return call("reset", seed, {}, self.persistent_states[i])

    def collect_restarted(self) -> dict[int, Any]:
        """Return the reset results, or the `CallFailure`, of environments that finished restarting."""
        results: dict[int, Any] = {}
        for pending in list(self._pending_restarts):
            reset_results = pending.poll()
            if reset_results is not None and pending.worker is not None:
                self._pending_restarts.remove(pending)
                self._workers_by_env |= dict.fromkeys(reset_results, pending.worker)
                results |= reset_results
                for i in failures_of(reset_results):
                    self.persistent_states[i] = None  # it may be the cause, so the next restart is without it
        return results

    def wait(self) -> None:
        """Wait until a pending restart can proceed: a reply, its start time or its timeout.

        Raises:
            BrokenEnvironmentError: if an environment failed too often before and is not restarted.
            ValueError: if the pool is closed.
        """
        self._check_usable()
        pipes = [each.worker.pipe for each in self._pending_restarts if each.worker is not None]
        due = min(each.deadline for each in self._pending_restarts)
        connection.wait(pipes, min(max(0.0, due - monotonic()), MAX_WAIT))

    def close(self) -> None:
        """Let all processes close their environments, within `CLOSE_TIMEOUT` in total, and end them.

        Later calls of this method do nothing.
        """
        if self._is_closed:
            return
        try:
            self._close_environments()
        finally:
            self._is_closed = True
            for worker in set(self._workers_by_env.values()):
                worker.end()

    def _close_environments(self) -> None:
        for pending in self._pending_restarts:
            if pending.worker is not None:
                pending.worker.end()
        workers = set(self._workers_by_env.values())
        for worker in workers:
            worker.send_calls(dict.fromkeys(worker.environments, CLOSE))
        deadline = monotonic() + CLOSE_TIMEOUT
        for worker in workers:
            worker.wait_and_end(deadline)

    def _schedule(self, failed: list[int], failure: CallFailure) -> None:
        """Schedule the restart of environments that failed together."""
        times = max(self._failures_in_a_row[i] for i in failed)
        limit = self.workers.max_restarts
        if times > limit:
            count = f"{times} time{'s' * (times > 1)} in a row"
            reason = f"; it failed {count}, and {limit} restarts in a row are allowed"
            self._final_error = failure_error(failed, failure, reason)
            raise self._final_error
        delay = self.workers.restart_delay(times)
        warn_user(
            f"{env_label(failed)} {failure.cause}; restarting in {delay:g} s, restart {times} of {limit} in "
            f"a row\n{failure.traceback}",
            RuntimeWarning,
        )
        makes = {i: self._makes[i] for i in failed}
        resets = {i: self.new_reset_call(i) for i in failed}
        timeout = self.workers.start_timeout * len(failed)
        self._pending_restarts.append(PendingRestart(makes, resets, monotonic() + delay, timeout))

    def _check_usable(self) -> None:
        if self._final_error is not None:
            raise self._final_error
        if self._is_closed:
            raise ValueError("the environments are closed: create new ones")


@contextmanager
def close_on_error(pool: WorkerPool) -> Iterator[None]:
    """Context manager that ends all processes if its body raises."""
    try:
        yield
    except BaseException:
        pool.close()
        raise


def env_label(environments: Sequence[int]) -> str:
    """Return ``environment 3``, or ``environments 3, 4``."""
    return f"environment{'s' * (len(environments) > 1)} {', '.join(map(str, environments))}"


def failure_error(
    environments: Sequence[int], failure: CallFailure, reason: str = ""
) -> BrokenEnvironmentError:
    """Return the error for a failure, with the traceback of the environment as a note."""
    error = BrokenEnvironmentError(f"{env_label(environments)} {failure.cause}{reason}")
    if failure.traceback:
        error.add_note(f"In the environment:\n{failure.traceback}")
    return error
