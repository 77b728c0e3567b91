"""How many processes environments get, and what is done where they break."""

from dataclasses import dataclass
from itertools import pairwise

LONGEST_BACK_OFF = 60.0
"""Seconds."""
GOOD_STEPS = 1000
"""Of an environment since its last break: as good as an episode that ends, which some tasks have none of."""


@dataclass(frozen=True)
class Workers:
    """Processes that environments run in.

    An environment breaks when it raises, when its process dies, or when that does not answer in time. Those
    that break together begin anew together, in a process of their own; the others go on meanwhile.

    Args:
        number: of processes; each has as many environments as the next, or one more. As many as there are
            environments keeps one that dies or hangs from taking others along; fewer cost less time.
        timeout: seconds in which a process must have stepped its environments once, with the resets of
            those that end, or answered a question: for attributes, pictures. All environments wait for the
            slowest, so it is what one that hangs costs.
        start_timeout: seconds in which an environment must be made and reset, imports included. A method
            that it is asked for (``env_method``) may take as long.
        restarts: how often in a row an environment may break; one episode that ends, or `GOOD_STEPS` steps,
            set the count back.
        back_off: seconds from the first break to the restart; twice as long after each break in a row, up to
            `LONGEST_BACK_OFF`.

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
        """Seconds from the last of so many breaks in a row to the restart."""
        return float(min(self.back_off * 2.0 ** (breaks - 1), LONGEST_BACK_OFF))

    def shares(self, n_envs: int) -> list[range]:
        """The environments of each process.

        Raises:
            ValueError: if there are more processes than environments.
        """
        if self.number > n_envs:
            raise ValueError(
                f"workers must be at most the number of environments, {n_envs}, got {self.number}"
            )
        ends = [n_envs * k // self.number for k in range(self.number + 1)]
        return [range(start, end) for start, end in pairwise(ends)]
