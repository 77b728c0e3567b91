"""Registered environments, their specs and their construction.

This module imports only Gymnasium, so that ``import rlxf`` is fast.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, register, registry

from rlxf.utils.extras import install_command
from rlxf.utils.names import did_you_mean, short_repr

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv  # loads torch

TMAZE = "rlxf.envs.tmaze:TMaze"
"""Entry point of the T-Maze."""
_TMAZE_VECTOR, _TMAZE_TENSOR = "rlxf.envs.tmaze_vector:TMazeVector", "rlxf.envs.tmaze_tensor:TMazeTensor"
_TMAZES = (
    ("rlxf/TMaze-v0", _TMAZE_VECTOR, False),
    ("rlxf/TMazeActive-v0", _TMAZE_VECTOR, True),
    ("rlxf/TMazeTensor-v0", _TMAZE_TENSOR, False),
    ("rlxf/TMazeActiveTensor-v0", _TMAZE_TENSOR, True),
)
"""Ids of the T-Mazes, with their vector environments and whether they are active."""
_STITCHING_MAZE = "rlxf.envs.stitching_maze:StitchingMaze"
_MASKED = {
    "rlxf/CartPoleNoVel-v1": ("cart_pole", 500),
    "rlxf/PendulumNoVel-v1": ("pendulum", 200),
    "rlxf/MountainCarContinuousNoVel-v0": ("mountain_car_continuous", 999),
    "rlxf/LunarLanderNoVel-v3": ("lunar_lander", 1000),
}
"""Id of a task without velocities -> its function in `rlxf.envs.masked_velocities`, and its time limit."""
TMAZE_ARGUMENTS = {"corridor_length", "active", "penalty", "penalty_rule"}
"""Arguments of the T-Maze, which it validates."""


def register_envs() -> None:
    """Register the tasks of this package, e.g. ``rlxf/TMaze-v0``; a second call has no effect.

    ``import rlxf`` calls this function, because Gymnasium 1.x does not discover plugins.
    """
    for env_id, vector, active in _TMAZES:
        if env_id not in registry:
            register(
                env_id,
                entry_point=TMAZE,
                vector_entry_point=vector,
                kwargs={"corridor_length": 50, "active": active},
            )
    for env_id, continuous in (("rlxf/StitchingMaze-v0", True), ("rlxf/StitchingMazeDiscrete-v0", False)):
        if env_id not in registry:
            register(
                env_id, entry_point=_STITCHING_MAZE, max_episode_steps=40, kwargs={"continuous": continuous}
            )
    for env_id, (function, steps) in _MASKED.items():
        if env_id not in registry:
            register(env_id, entry_point=f"rlxf.envs.masked_velocities:{function}", max_episode_steps=steps)


_PACKAGES = {"popgym-": "popgym", "MiniGrid-": "minigrid"}
"""Prefix of environment ids -> the package that registers them, of the extra ``memory``."""
_OTHER_PACKAGE = "If another package registers it, install that package and write 'module:id'"
MAX_IDS = 12
"""Largest number of ids that a message lists."""


def package_of(env_id: str) -> str | None:
    """Return ``popgym`` or ``minigrid`` if ``env_id`` has the prefix of this package, or None."""
    return next((package for prefix, package in _PACKAGES.items() if env_id.startswith(prefix)), None)


def find_spec(env_id: str) -> EnvSpec:
    """Import the package that registers ``env_id``, and return the spec.

    This function is for ids from users: ``module:id`` imports the module. For ids from files, use
    `registered_spec`.

    Raises:
        ValueError: if the id is not registered; the message lists similar ids.
    """
    register_envs()
    module, _, name = env_id.rpartition(":")
    before = set(registry)
    _import_package_of(env_id)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        if module:
            found = [each for each in registry if each not in before] or _ids_of(module)
            raise ValueError(
                f"unknown environment id {short_repr(env_id)}: {_module_advice(module, name, found)}"
            ) from error
        similar = ", ".join(get_close_matches(name, registry, n=4)) or "none"
        hint = "" if package_of(name) else f". {_OTHER_PACKAGE}"  # the known package was imported
        raise ValueError(
            f"unknown environment id {short_repr(env_id)}; similar ids: {similar}{hint}"
        ) from error


def _import_package_of(env_id: str) -> None:
    """Import the module that an id names, or the package of the prefix of its name.

    Raises:
        ValueError: if it is not installed, or its import fails.
    """
    module, _, name = env_id.rpartition(":")
    package = package_of(name)
    try:
        if module:
            _import_module_of_user(module)
        else:
            import_module(package or "gymnasium")
    except ModuleNotFoundError as error:
        hint = f"Install the package of this family of tasks with: {install_command('memory')}"
        if not package:
            hint = f"The module must be in the working directory, {Path.cwd()}, or be installed"
        raise ValueError(f"environment id {short_repr(env_id)} needs a package: {error}. {hint}") from error
    except gymnasium.error.Error as error:
        raise ValueError(
            f"the import of {module or package} for {short_repr(env_id)} failed: {error}"
        ) from error


def _ids_of(module: str) -> list[str]:
    """Return the registered ids whose entry points are in a module or in those of its package."""
    entry_points = {
        env_id: getattr(spec.entry_point, "__module__", None) or str(spec.entry_point).partition(":")[0]
        for env_id, spec in registry.items()
    }
    return [env_id for env_id, name in entry_points.items() if f"{name}.".startswith(f"{module}.")]


def _module_advice(module: str, name: str, ids: list[str]) -> str:
    """Return advice for an unknown id of an imported module that registered ``ids``."""
    if isinstance(getattr(sys.modules[module], name, None), type):
        return (
            f"{name} is a class, not an id. Register it in {module}, gymnasium.register('{name}-v0', "
            f"entry_point='{module}:{name}'), and write '{module}:{name}-v0'; in Python, "
            f"rlxf.envs.make_vec_env({name}, n_envs) needs no id"
        )
    listed = ", ".join(get_close_matches(name, ids, n=MAX_IDS, cutoff=0.0)) or "no ids"
    more = f", and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"the module {module} registers {listed}{more}"


def _import_module_of_user(name: str) -> None:
    """Import a module that the user has named, also from the working directory, as ``python -m`` does.

    The working directory becomes the last place in which this process and its workers search for modules, so
    it hides no installed ones.
    """
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        package = name.partition(".")[0]
        if error.name != package or here in sys.path or not PathFinder.find_spec(package, [here]):
            raise
        sys.path.append(here)
        import_module(name)


def known_refusal(env_id: str, kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the option that is wrong, "env" or "env_kwargs", and the reason; None if none is found.

    No environment is created, and ids ``module:id`` and those of other packages are not examined, so that
    nothing is imported for them.

    Args:
        env_id: id of the environment.
        kwargs: its arguments.
    """
    if ":" in env_id or package_of(env_id):
        return None
    try:
        spec = find_spec(env_id)
    except ValueError as error:
        return "env", str(error)
    try:
        refused = [name for name in kwargs if not _is_accepted(spec, name)]
        return ("env_kwargs", _refused_argument(spec, refused[0])) if refused else None
    except Exception:  # the import of its module may fail in any way, which `make_single` reports
        return None


def _is_accepted(spec: EnvSpec, name: str) -> bool:
    """Return whether Gymnasium takes an argument of this name for an environment, or may take it."""
    of_make = inspect.signature(gymnasium.make).parameters.keys() - {"id", "kwargs"}
    if name in {*spec.kwargs, *VECTOR_ARGUMENTS, *of_make}:
        return True
    entry_points = [each for each in (spec.entry_point, spec.vector_entry_point) if each is not None]
    return any(takes_arguments(each, [name]) for each in entry_points)


def registered_spec(env_id: str) -> EnvSpec:
    """Return the registered spec of an id that was read from a file.

    Of other packages, only ``popgym`` and ``minigrid`` are imported, and not from the working directory,
    which may be the folder of the file.

    Raises:
        ValueError: if the id is ``module:id``, which would import a module chosen by the file, or the id is
            not registered.
    """
    if ":" in env_id:
        raise ValueError(
            f"the file names the environment {short_repr(env_id)}, and a module that a file names is "
            f"not imported without your consent: if you made the file, or trust its author, add --trust "
            f"(in Python trust=True); otherwise pass the environment (--env module:id where this "
            f"option exists, or in Python env=...)"
        )
    package = package_of(env_id)
    if package and _in_working_folder(package):
        raise ValueError(
            f"the id {short_repr(env_id)} comes from a file, and its package {package} would be "
            f"imported from the working directory: run the command in another folder, or pass "
            f"the environment with --env"
        )
    return find_spec(env_id)


def _in_working_folder(module: str) -> bool:
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    paths = () if spec is None else (spec.submodule_search_locations or [spec.origin or ""])
    return any(Path(path).resolve().parent == Path.cwd() for path in paths)


def spec_of(env: "VecEnv") -> EnvSpec | None:
    """Return the Gymnasium spec of the first environment; None if it was not created from an id.

    The attribute ``spec`` of other environments, such as those of EnvPool, is another object without an id.
    """
    try:
        spec: EnvSpec | None = env.get_attr("spec", 0)[0]
    except (AttributeError, NotImplementedError):  # not a Gymnasium environment
        return None
    return spec if hasattr(spec, "id") else None


def env_id_of(env: "VecEnv") -> str | None:
    """Return the Gymnasium id of the first environment; None if it was not created from an id."""
    return getattr(spec_of(env), "id", None)


_EXTRAS = {"gymnasium.envs.box2d": "box2d", "gymnasium.envs.mujoco": "mujoco"}
"""Module of environments -> extra of rlxf with the packages that they need."""


VECTOR_ARGUMENTS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments that `gymnasium.make_vec` adds to those of an environment."""


def single_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec of one environment, without the arguments of `single_arguments`."""
    return replace(spec, kwargs=single_arguments(spec, spec.kwargs))


def single_arguments(spec: EnvSpec, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without those that `gymnasium.make_vec` adds or only the vector class accepts."""
    given = {name: value for name, value in kwargs.items() if name not in VECTOR_ARGUMENTS}
    unknown = set(given) - set(inspect.signature(gymnasium.make).parameters)
    if not unknown or spec.vector_entry_point is None:
        return given
    try:
        single, vector = map(_accepted_arguments, (spec.entry_point, spec.vector_entry_point))
    except (ImportError, gymnasium.error.DependencyNotInstalled):  # `creation_errors` describes it
        return given
    only_vector = set() if single is None else unknown & set(vector or ()) - set(single)
    return {name: value for name, value in given.items() if name not in only_vector}


def make_single(spec: EnvSpec, **kwargs: Any) -> gymnasium.Env:
    """Call ``gymnasium.make(spec, **kwargs)`` with the errors of `creation_errors`."""
    with creation_errors(spec, kwargs):
        return gymnasium.make(spec, **kwargs)


@contextmanager
def creation_errors(spec: EnvSpec, kwargs: dict[str, Any]) -> Iterator[None]:
    """Name the environment in errors of its creation, and the extra of rlxf that it needs.

    Raises:
        TypeError: with the unknown argument and the accepted ones, or with the arguments that were passed.
        DependencyNotInstalled: with the command that installs the extra in `_EXTRAS`, or with the module that
            is missing.
    """
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        extra = next((extra for module, extra in _EXTRAS.items() if module in str(spec.entry_point)), None)
        if extra is None:
            raise
        raise gymnasium.error.DependencyNotInstalled(
            f"{spec.id} needs packages that are not installed; install them with: {install_command(extra)}"
        ) from error
    except ModuleNotFoundError as error:
        raise gymnasium.error.DependencyNotInstalled(
            f"{spec.id} needs a package that is not installed: {error}; install the package that contains it"
        ) from error
    except TypeError as error:
        match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if match is not None and match[1] in {**spec.kwargs, **kwargs}:
            raise TypeError(_refused_argument(spec, match[1])) from error
        if spec.id in str(error):
            raise
        raise TypeError(f"{error}, raised during the creation of {spec.id} with {kwargs}") from error


def _refused_argument(spec: EnvSpec, name: str) -> str:
    """Return a message about an argument that an environment does not take."""
    accepted = _accepted_arguments(spec.entry_point)
    listing = "" if accepted is None else f"it takes {', '.join(accepted) or 'none'}"
    return f"{spec.id} takes no argument {name!r}{did_you_mean(name, accepted or (), listing)}"


def _accepted_arguments(entry_point: Any) -> list[str] | None:
    """Return the names of the arguments of an entry point, including those passed on to base classes.

    They are unknown, None, if a function creates the environment and passes on any argument.
    """
    if entry_point is None:
        return []
    creator = _load_creator(entry_point)
    classes: list[Any] = list(creator.__mro__[:-1]) if isinstance(creator, type) else []
    functions = [base.__init__ for base in classes] or [creator]
    names: dict[str, None] = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names |= {each.name: None for each in parameters if each.kind in _NAMED and each.name != "self"}
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
            return list(names)
    return list(names) if classes else None


def takes_arguments(entry_point: Any, names: Iterable[str]) -> bool:
    """Return whether an entry point takes the named arguments; True if it passes any argument on.

    Raises:
        ImportError, DependencyNotInstalled: if the entry point cannot be loaded.
    """
    parameters = inspect.signature(_load_creator(entry_point)).parameters
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return passes_on or parameters.keys() >= set(names)


def _load_creator(entry_point: Any) -> Any:
    """Return the class or function of an entry point, which may be given by its name."""
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def declares_images(spec: EnvSpec) -> bool:
    """Return False if an environment declares that it has no render mode ``rgb_array``, else True."""
    metadata = getattr(_load_creator(spec.entry_point), "metadata", {})
    return "rgb_array" in metadata.get("render_modes", ["rgb_array"])


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
