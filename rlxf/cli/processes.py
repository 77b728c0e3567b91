"""The options of environments that run in processes of their own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlxf.cli.counts import Count

if TYPE_CHECKING:
    from rlxf.envs.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes of environments: for those that take long, and for those that raise, die or hang."""

    workers: Count = 0
    """Processes to spread the environments over; 0 for none but this one, which is faster for small tasks. An
    environment that raises, dies or hangs there begins a new episode, while the others go on; with as many
    processes as environments, none takes others along."""
    env_timeout: float = 60.0
    """Seconds in which a process must have stepped its environments, and for which all others wait. One that
    hangs is killed, with the programs that its environments have started."""
    env_restarts: Count = 5
    """How often in a row one environment may break before the run ends: without an episode that ends, or 1000
    steps, in between."""

    def asked(self, n_envs: int) -> "Workers | None":
        """For so many environments; None for none.

        Raises:
            ValueError: if a number is out of range.
        """
        if not self.workers:
            return None
        from rlxf.envs.workers import Workers

        return Workers(min(self.workers, n_envs), self.env_timeout, restarts=self.env_restarts)
