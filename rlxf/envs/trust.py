"""Environments that a file describes, and which parts of the description are used without trust.

A dataset, a checkpoint and the ``config.json`` of a run name an environment. The author of the file chose
the name, so it is only looked up among the environments registered in this process. Everything else in
a description can run code or open files: an entry point and a wrapper are imported, and an argument such as
``xml_file`` is a path. It is used only if the caller trusts the file.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from gymnasium.envs.registration import EnvSpec

from rlxf.envs.make import find_spec, registered_spec
from rlxf.envs.registration import checks_argument


@dataclass(frozen=True)
class DescribedEnv:
    """An environment as a file describes it.

    Args:
        id: Gymnasium id.
        kwargs: arguments of the environment.
        max_episode_steps: time limit; None for the registered one.
        wrappers: names of additional wrappers.

    Raises:
        ValueError: if a value is of another type.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not isinstance(self.kwargs, Mapping):
            raise ValueError(f"an environment is an id and its arguments, got {self.id!r}, {self.kwargs!r}")

    def needs_trust(self, given: Collection[str] = ()) -> list[str]:
        """Parts of the description that differ from the registered environment and need trust.

        Arguments of the T-Maze need none, because it checks each of them. A shorter time limit needs none.

        Args:
            given: names of arguments for which the caller gives a value of their own.

        Raises:
            ValueError: if the environment is not registered, or the id is ``module:id``.
        """
        known = registered_spec(self.id)
        unknown = [
            f"{name}={value!r}"
            for name, value in self.kwargs.items()
            if name not in given and not _is_known(known, name, value)
        ]
        unknown += [f"wrapper {name}" for name in self.wrappers]
        if not self._limit_fits(known):
            unknown.append(f"max_episode_steps={self.max_episode_steps!r}")
        return unknown

    def local_spec(self, given: Collection[str] = ()) -> EnvSpec:
        """The registered environment, with those parts of the description that need no trust.

        Args:
            given: as in `needs_trust`.

        Raises:
            ValueError: if the environment is not registered, or the description has more than that.
        """
        more = self.needs_trust(given)
        if more:
            raise ValueError(
                f"the file describes {self.id!r} with {', '.join(more)}, which is not used without trust, as "
                f"it can run code or read files: give the environment yourself ({self._options()}; in Python "
                f"env=...), or state that you trust the author of the file (--trust-data for a dataset, "
                f"--trust for a run; in Python trust=True)"
            )
        return self._completed(registered_spec(self.id))

    def trusted_spec(self) -> EnvSpec:
        """The environment with all arguments and the time limit of the description.

        Only for a file that the caller trusts: the module of an id ``module:id`` is imported. Wrappers are
        left out.

        Raises:
            ValueError: if the environment is not registered.
        """
        return self._completed(find_spec(self.id))

    def _completed(self, known: EnvSpec) -> EnvSpec:
        steps = self.max_episode_steps or known.max_episode_steps
        return replace(known, kwargs={**known.kwargs, **self.kwargs}, max_episode_steps=steps)

    def _options(self) -> str:
        """Options of the command line that name this environment, without its wrappers."""
        kwargs = f" --env-kwargs {quote(json.dumps(self.kwargs, default=repr))}" if self.kwargs else ""
        return f"--env {quote(self.id)}{kwargs}"

    def _limit_fits(self, known: EnvSpec) -> bool:
        steps, most = self.max_episode_steps, known.max_episode_steps
        if steps is None:
            return True
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        return whole and (most is None or steps <= most)


def _is_known(known: EnvSpec, name: str, value: Any) -> bool:
    if checks_argument(known, name):
        return True
    return name in known.kwargs and _as_json(known.kwargs[name]) == _as_json(value)


def _as_json(value: Any) -> str:
    """Text by which values are compared: a tuple equals the list that JSON makes of it."""
    return json.dumps(value, default=repr, sort_keys=True)
