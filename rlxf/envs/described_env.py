"""Environments that a file describes, and the parts of a description that need trust.

A dataset, a checkpoint and the ``config.json`` of a run name an environment. The author of the file chose
the name, so it is only looked up among the environments registered in this process. Everything else in
a description can run code or open files: an entry point and a wrapper are imported, and an argument such as
``xml_file`` is a path. It is used only if the caller trusts the file.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from gymnasium.envs.registration import EnvSpec, registry

from rlxf.envs.specs import TMAZE, TMAZE_ARGUMENTS, find_spec, registered_spec, single_arguments
from rlxf.utils.env_ids import is_other_version

LIMIT = "max_episode_steps"
IMAGES = "render_mode", "width", "height", "camera_id", "camera_name", "default_camera_config"
"""Arguments of environments that change their images only."""


@dataclass(frozen=True)
class DescribedEnv:
    """Description of an environment in a file.

    Args:
        id: Gymnasium id.
        kwargs: arguments of the environment.
        max_episode_steps: time limit; None for the registered one.
        wrappers: names of additional wrappers.

    Raises:
        ValueError: if id is not a string, or kwargs is not a mapping.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not isinstance(self.kwargs, Mapping):
            raise ValueError(f"an environment is an id and its arguments, got {self.id!r}, {self.kwargs!r}")

    def is_same_task(self, spec: EnvSpec | None) -> bool:
        """Return whether returns are comparable to those in a registered environment, of any version.

        Its name must be the same, and so must its arguments except for those of images, and its time limit.
        The answer is True for an unknown environment, ``spec=None``.
        """
        if spec is None:
            return True
        if spec.id != self.id and not is_other_version(spec.id, self.id):
            return False
        given = getattr(spec, "kwargs", {})  # environments of other packages may have specs of their own
        limit = given.get(LIMIT) or getattr(spec, LIMIT, None)
        registered = registry[self.id].kwargs if self.id in registry else {}
        own = _without_images({**registered, **self.kwargs})
        other = _without_images(single_arguments(spec, given))
        return own == other and len({self.max_episode_steps, limit} - {None}) < 2

    def needs_trust(self, given: Collection[str] = ()) -> list[str]:
        """Return the parts of the description that differ from the registered environment and need trust.

        Arguments of the T-Maze need no trust, because it validates them, nor does a shorter time limit.

        Args:
            given: names of arguments that the caller overrides.

        Raises:
            ValueError: if the environment is not registered, or the id is ``module:id``.
        """
        registered = registered_spec(self.id)
        untrusted = [
            f"{name}={value!r}"
            for name, value in self.kwargs.items()
            if name not in given and not _is_safe(registered, name, value)
        ]
        untrusted += [f"wrapper {name}" for name in self.wrappers]
        if not self._limit_fits(registered):
            untrusted.append(f"max_episode_steps={self.max_episode_steps!r}")
        return untrusted

    def registration(self) -> str | None:
        """Describe why the environment that is registered here is not the described one; None if it is.

        Nothing that the description names is run or imported. If the id is not registered, other registered
        versions of it are named. A shorter time limit is no difference.
        """
        try:
            differences = self.needs_trust()
        except ValueError as error:
            versions = ", ".join(sorted(each for each in registry if is_other_version(each, self.id)))
            if not versions:
                return str(error)
            return (
                f"{self.id} is not registered here, but {versions}: dynamics and rewards may differ between "
                f"versions, so returns of evaluations are not comparable with those of the data"
            )
        if not differences:
            return None
        return (
            f"the data describe {self.id} with {', '.join(differences)}, which differs from the environment "
            f"registered here and is only used with trust (--trust-data, in Python trust=True)"
        )

    def local_spec(self, given: Collection[str] = ()) -> EnvSpec:
        """Return the spec of the registered environment, with the parts that need no trust.

        Args:
            given: as in `needs_trust`.

        Raises:
            ValueError: if the environment is not registered, or the description has parts that need trust.
        """
        if untrusted := self.needs_trust(given):
            raise ValueError(
                f"the file describes {self.id!r} with {', '.join(untrusted)}, which is not used without "
                f"trust, as it can run code or read files: pass the environment yourself "
                f"({self._options()}; in Python env=...), or state that you trust the author of the file "
                f"(--trust-data for a dataset, --trust for a run; in Python trust=True)"
            )
        return self._spec_from(registered_spec(self.id))

    def trusted_spec(self) -> EnvSpec:
        """Return the spec of the environment with all arguments and the time limit of the description.

        The caller must trust the file: the module of an id ``module:id`` is imported. Wrappers are left out.

        Raises:
            ValueError: if the environment is not registered.
        """
        return self._spec_from(find_spec(self.id))

    def _spec_from(self, registered: EnvSpec) -> EnvSpec:
        steps = self.max_episode_steps or registered.max_episode_steps
        return replace(registered, kwargs={**registered.kwargs, **self.kwargs}, max_episode_steps=steps)

    def _options(self) -> str:
        """Return the command-line options for this environment, without its wrappers."""
        kwargs = f" --env-kwargs {quote(json.dumps(self.kwargs, default=repr))}" if self.kwargs else ""
        return f"--env {quote(self.id)}{kwargs}"

    def _limit_fits(self, registered: EnvSpec) -> bool:
        steps = self.max_episode_steps
        limit = registered.max_episode_steps or math.inf
        return steps is None or (type(steps) is int and 1 <= steps <= limit)


def _without_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON values, without those that change images only, and without a time limit."""
    kept = {name: value for name, value in arguments.items() if name not in (*IMAGES, LIMIT)}
    values: dict[str, Any] = json.loads(_as_json(kept))
    return values


def _is_safe(registered: EnvSpec, name: str, value: Any) -> bool:
    """Return whether the T-Maze validates the argument, or its value is that of the registration."""
    if registered.entry_point == TMAZE and name in TMAZE_ARGUMENTS:
        return True
    return name in registered.kwargs and _as_json(registered.kwargs[name]) == _as_json(value)


def _as_json(value: Any) -> str:
    """Encode a value as JSON for a comparison in which a tuple equals a list."""
    return json.dumps(value, default=repr, sort_keys=True)
