"""Registration of the package's environments, specs of environments and checks of their arguments.

This module imports only Gymnasium, so that ``import rlxf`` is fast.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id, register, registry

from rlxf.utils.extras import install_command

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv  # loads torch

_ENTRY_POINT = "rlxf.envs.tmaze.env:TMaze"
_CHECKED = {"corridor_length", "active", "penalty", "penalty_rule"}
_KWARGS: dict[str, dict[str, object]] = {
    "rlxf/TMaze-v0": {"corridor_length": 50, "active": False},
    "rlxf/TMazeActive-v0": {"corridor_length": 50, "active": True},
}


def register_envs() -> None:
    """Register ``rlxf/TMaze-v0`` and ``rlxf/TMazeActive-v0``; a second call has no effect.

    ``import rlxf`` calls this function, because Gymnasium 1.x does not discover plugins.
    """
    for env_id, kwargs in _KWARGS.items():
        if env_id not in registry:
            register(
                env_id,
                entry_point=_ENTRY_POINT,
                vector_entry_point="rlxf.envs.tmaze.vector:TMazeVector",
                kwargs=kwargs,
            )


def checks_argument(spec: EnvSpec, name: str) -> bool:
    """Return whether ``spec`` is a task of this package that rejects harmful values of argument ``name``."""
    return spec.entry_point == _ENTRY_POINT and name in _CHECKED


def spec_of(env: "VecEnv") -> EnvSpec | None:
    """Return the Gymnasium spec of the first environment; None if it was not created from an id."""
    try:
        spec: EnvSpec | None = env.get_attr("spec", 0)[0]
    except (AttributeError, NotImplementedError):  # not a Gymnasium environment
        return None
    return spec


def env_id_of(env: "VecEnv") -> str | None:
    """Return the Gymnasium id of the first environment; None if it was not created from an id."""
    return getattr(spec_of(env), "id", None)


def is_other_version(one: str, other: str) -> bool:
    """Return whether two ids differ only in their version, as Walker2d-v4 and Walker2d-v5 do."""
    *name, version = parse_env_id(one)
    *other_name, other_version = parse_env_id(other)
    return name == other_name and version != other_version


class TransparentWrapper(gymnasium.Wrapper):
    """Base class of wrappers that change no space, so `spec` is that of the environment."""

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the wrapped environment."""
        return self.env.spec

    def reset_inner(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset the wrapped environment; older environments take no options, so None is not passed."""
        return self.env.reset(seed=seed, **({} if options is None else {"options": options}))


UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


EXTRAS = {"gymnasium.envs.box2d": "box2d", "gymnasium.envs.mujoco": "mujoco"}
"""Module of environments -> extra of rlxf with the packages that they need."""


def make_single(spec: EnvSpec, **kwargs: Any) -> gymnasium.Env:
    """Call ``gymnasium.make(spec, **kwargs)`` with the errors of `creation_errors`."""
    with creation_errors(spec, kwargs):
        return gymnasium.make(spec, **kwargs)


@contextmanager
def creation_errors(spec: EnvSpec, kwargs: dict[str, Any]) -> Iterator[None]:
    """Name the environment in errors of its creation, and the extra of rlxf that it needs.

    Raises:
        TypeError: with the unknown argument and the accepted ones, or with the arguments that were passed.
        DependencyNotInstalled: with the command that installs the extra in `EXTRAS`.
    """
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        extra = next((extra for module, extra in EXTRAS.items() if module in str(spec.entry_point)), None)
        if extra is None:
            raise
        raise gymnasium.error.DependencyNotInstalled(
            f"{spec.id} needs packages that are not installed; install them with: {install_command(extra)}"
        ) from error
    except TypeError as error:
        match = UNEXPECTED.search(str(error))
        if match is not None and match[1] in kwargs:
            raise TypeError(f"{spec.id} takes no argument {match[1]!r}{_advice(spec, match[1])}") from error
        if spec.id in str(error):
            raise
        raise TypeError(f"{error}, raised during the creation of {spec.id} with {kwargs}") from error


def accepted_arguments(spec: EnvSpec) -> list[str]:
    """Return the names of the arguments of an environment, including those passed on to base classes."""
    if spec.entry_point is None:
        return []
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    classes: list[Any] = list(creator.__mro__[:-1]) if isinstance(creator, type) else []
    functions = [base.__init__ for base in classes] or [creator]
    names: dict[str, None] = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names |= {each.name: None for each in parameters if each.kind in _NAMED and each.name != "self"}
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
            break
    return list(names)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _advice(spec: EnvSpec, name: str) -> str:
    accepted = accepted_arguments(spec)
    near = get_close_matches(name, accepted, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it takes {', '.join(accepted)}" if accepted else "; it takes none"
