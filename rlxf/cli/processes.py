"""Options of environments in worker processes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlxf.cli.counts import Count

if TYPE_CHECKING:
    from rlxf.envs.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Options of worker processes, for environments that are slow or may crash or hang."""

    workers: Count = 0
    """Number of worker processes for the environments. 0 uses this process: faster for simple environments.
    Environments that raise, crash or hang in a worker are restarted in new episodes; the others continue.
    With one worker per environment, a crash does not affect other environments."""
    env_timeout: float = 60.0
    """Time limit in seconds for a step of the environments of a worker; all others wait for it.
    A worker that exceeds the limit is killed, with all programs that its environments have started."""
    env_restarts: Count = 5
    """Maximum number of consecutive restarts of an environment; the next failure ends the run.
    A completed episode, or 1000 steps, resets the count."""

    def asked(self, n_envs: int) -> "Workers | None":
        """Return the worker settings for ``n_envs`` environments; None if ``workers`` is 0.

        Raises:
            ValueError: if a number is out of range.
        """
        if not self.workers:
            return None
        from rlxf.envs.workers import Workers

        return Workers(min(self.workers, n_envs), self.env_timeout, restarts=self.env_restarts)
