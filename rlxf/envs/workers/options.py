"""Options of worker processes: their number, timeouts and restarts."""

from dataclasses import dataclass
from itertools import pairwise

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
            hanging environment delays all by this time.
        start_timeout: seconds for the creation and the reset of an environment, including imports; also the
            limit of ``env_method``.
        restarts: maximum number of failures in a row of an environment. A finished episode, or `GOOD_STEPS`
            steps, reset the count.
        back_off: seconds from the first failure to the restart. It doubles with each failure in a row, up to
            `MAX_BACK_OFF`.

    Raises:
        ValueError: if a number is out of range.
    """

    number: int
    timeout: float = 60.0
    start_timeout: float = 120.0
    restarts: int = 5
    back_off: float = 1.0

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"workers must be at least 1, got {self.number}")
        for name in ("timeout", "start_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.restarts < 0:
            raise ValueError(f"restarts must be at least 0, got {self.restarts}")
        if not self.back_off >= 0:
            raise ValueError(f"back_off must be at least 0 seconds, got {self.back_off}")

    def delay(self, breaks: int) -> float:
        """Return the seconds from the last of ``breaks`` failures in a row to the restart."""
        return float(min(self.back_off * 2.0 ** (breaks - 1), MAX_BACK_OFF))

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
