"""From an environment id to a `VecEnv`, or to one environment as it stands in there."""

import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.arguments import argument_errors, make_single
from rlxf.envs.memory_tasks import family_of
from rlxf.envs.previous_reward import PreviousReward
from rlxf.envs.previous_transition import PreviousTransition
from rlxf.envs.registration import register_envs
from rlxf.envs.replayable import Replayable
from rlxf.envs.side_by_side import side_by_side
from rlxf.envs.spaces import check_playable
from rlxf.envs.vector import as_vec_env
from rlxf.envs.workers import Workers, WorkerVecEnv
from rlxf.utils.extras import install_command

View = Callable[[gymnasium.Env], gymnasium.Env]
OTHER_PACKAGE = "If it comes with a package of its own, install that and write 'package:id'"


def make_vec_env(
    env_id: str,
    n_envs: int,
    seed: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    wrapper_class: View | None = None,
    previous_reward: bool = False,
    previous_transition: bool = False,
    workers: Workers | None = None,
) -> VecEnv:
    """``n_envs`` copies of a registered environment as one Stable-Baselines3 ``VecEnv``.

    Where the environment comes with a vector form that resets in the same step (``rlxf/TMaze-v0``) and no
    wrapper is asked for, that form is used (`GymnasiumVecEnv`). Otherwise this is Stable-Baselines3's
    ``make_vec_env``: each copy in a `Monitor`, then in its wrappers, in a `DummyVecEnv`. Each episode has a
    seed of its own then (`Replayable`), so that a training can be resumed amid it.

    With ``workers`` the copies are in processes of their own (`WorkerVecEnv`): what takes long is done at
    the same time, and an environment that raises, dies or hangs begins anew. However many processes there
    are, the same steps come out as from copies in this process.

    ``popgym-...`` and ``MiniGrid-...`` ids come with the ``memory`` extra. Without a ``wrapper_class`` they
    get the views of `rlxf.envs.memory_tasks`.

    Args:
        env_id: Gymnasium id; ``module:id`` imports the module first.
        n_envs: number of copies, at least 1.
        seed: copy i is seeded with seed + i at its first reset; None: with fresh randomness.
        env_kwargs: arguments of the environment itself; ``render_mode`` is one, and None unless given.
        wrapper_class: a wrapper, or a function of one environment, put around each copy.
        previous_reward: put the reward of the step before into each observation, by `PreviousReward`
            around all other wrappers. The observation is then a Dict.
        previous_transition: put action, reward and end of the step before into each observation, also across
            episodes, by `PreviousTransition` around all other wrappers.
        workers: how many processes, and how patient; None for copies in this process.

    Raises:
        BrokenEnvironmentError: if an environment cannot be made in its process.
        ValueError: if the id is unknown (with the nearest ones), n_envs is less than 1, or there are more
            processes than environments.
        TypeError: if the environment does not take env_kwargs, or a space is not supported
            (`check_playable`).
    """
    if n_envs < 1:
        raise ValueError(f"n_envs must be at least 1, got {n_envs}")
    kwargs = env_kwargs or {}
    spec = find_spec(env_id)
    single = wrapper_class is not None or previous_reward or previous_transition or workers is not None
    if spec.vector_entry_point is not None and not single:
        vec_env = _own_vector_form(spec, n_envs, kwargs)
        if vec_env is not None:
            vec_env.seed(seed)
            return vec_env
    view = _view(spec.id, wrapper_class, previous_reward, previous_transition)
    return copies(partial(make_single, spec, **kwargs), n_envs, seed, view, workers)


def copies(
    make: Callable[[], gymnasium.Env],
    n_envs: int,
    seed: int | None,
    view: View | None = None,
    workers: Workers | None = None,
) -> VecEnv:
    """``n_envs`` environments as Stable-Baselines3's ``make_vec_env`` makes them, whatever they show.

    Args:
        make: one environment.
        n_envs: how many.
        seed: as in `make_vec_env`.
        view: wrappers to put around each; None for none.
        workers: as in `make_vec_env`.

    Raises:
        TypeError: if a space is not supported (`check_playable`).
    """
    # Asked for is a class, used is a function of functions.
    together: Any = side_by_side if workers is None else partial(WorkerVecEnv, workers=workers)
    return env_util.make_vec_env(make, n_envs, seed, wrapper_class=view, vec_env_cls=together)


def make_env(
    env_id: str,
    env_kwargs: dict[str, Any] | None = None,
    wrapper_class: View | None = None,
    previous_reward: bool = False,
    previous_transition: bool = False,
) -> gymnasium.Env:
    """One environment that shows what those of `make_vec_env` show; arguments and errors are the same."""
    spec = find_spec(env_id)
    view = _view(spec.id, wrapper_class, previous_reward, previous_transition)
    return view(make_single(spec, **(env_kwargs or {})))


def find_spec(env_id: str) -> EnvSpec:
    """The registered spec of ``env_id``, after importing the package that brings it.

    It is for ids from users: ``module:id`` imports the module. For ids from files use `registered_spec`.

    Raises:
        ValueError: if nothing of this name is registered; it lists the nearest names.
    """
    register_envs()
    module, _, name = env_id.rpartition(":")
    family = family_of(name)
    try:
        import_module(module or (family.module if family else "gymnasium"))
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment id {env_id!r} needs a package: {error}. {_hint(name)}") from error
    except gymnasium.error.Error as error:
        near = ", ".join(get_close_matches(name, gymnasium.registry, n=4)) or "none"
        hint = "" if family else f". {OTHER_PACKAGE}"  # the package of a family was imported
        raise ValueError(f"unknown environment id {env_id!r}; near names: {near}{hint}") from error


def registered_spec(env_id: str) -> EnvSpec:
    """Return the registered spec of an id that was read from a file.

    Only the package of a known family (`rlxf.envs.memory_tasks`) is imported, and not from the working
    directory, where a folder of that name may be part of the file's own folder.

    Raises:
        ValueError: if the id is ``module:id``, which would import a module that the file chose, or nothing of
            this name is registered.
    """
    if ":" in env_id:
        raise ValueError(
            f"the file names the environment {env_id!r}, and a module that a file names is not imported: if "
            f"you know the module, give the environment yourself (--env module:id; in Python env=...), or "
            f"state that you trust the author of the file (--trust)"
        )
    family = family_of(env_id)
    if family and _in_working_folder(family.module):
        raise ValueError(
            f"{family.module} would be imported from the working directory, for an id that a file names, "
            f"{env_id!r}: run the command in another folder, or give the environment with --env"
        )
    return find_spec(env_id)


def _in_working_folder(module: str) -> bool:
    found = None if module in sys.modules else importlib.util.find_spec(module)
    places = () if found is None else (found.submodule_search_locations or [found.origin or ""])
    return any(Path(place).resolve().parent == Path.cwd() for place in places)


def _hint(name: str) -> str:
    if family_of(name):
        return f"This family of tasks comes with: {install_command('memory')}"
    return OTHER_PACKAGE


def _own_vector_form(spec: EnvSpec, n_envs: int, kwargs: dict[str, Any]) -> VecEnv | None:
    """The vector form, None if it resets in the next step: its filler rows are a cost without a gain."""
    with argument_errors(spec, kwargs):
        env = gymnasium.make_vec(spec.id, n_envs, vectorization_mode="vector_entry_point", **kwargs)
    if env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
        return as_vec_env(env)
    env.close()
    return None


def _family_view(env_id: str) -> View:
    family = family_of(env_id)
    return family.view if family else lambda env: env


def _view(env_id: str, wrapper_class: View | None, previous_reward: bool, previous_transition: bool) -> View:
    """All wrappers, the innermost first; then the check of spaces.

    The outer ones know nothing of an episode that the next step needs, and one of them takes a reset with a
    seed for a beginning: so they stand around `Replayable`.
    """
    asked = {PreviousReward: previous_reward, PreviousTransition: previous_transition}
    outer = [view for view, wanted in asked.items() if wanted]
    views = [wrapper_class or _family_view(env_id), Replayable, *outer]

    def viewed(env: gymnasium.Env) -> gymnasium.Env:
        for view in views:
            env = view(env)
        check_playable(env.observation_space, env.action_space)
        return env

    return viewed
