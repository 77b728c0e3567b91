"""Construction of single and vector environments from ids, with the packages of known memory tasks."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from inspect import signature
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import FilterObservation, FlattenObservation, TransformObservation
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.action_replay import ActionReplay
from rlxf.envs.curriculum import Curriculum, CurriculumEnv, check_curriculum, check_stages
from rlxf.envs.sb3_vec_env import make_sync_vec_env
from rlxf.envs.spaces import check_has_spaces, check_playable
from rlxf.envs.specs import (
    VECTOR_ARGUMENTS,
    creation_errors,
    find_spec,
    make_single,
    package_of,
    single_arguments,
    single_spec,
    takes_arguments,
)
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.envs.worker_pool import Workers
from rlxf.envs.worker_vec_env import WorkerVecEnv
from rlxf.envs.wrappers import PreviousReward, PreviousTransition
from rlxf.utils.checks import check_int
from rlxf.utils.names import did_you_mean

EnvWrapper = Callable[[gymnasium.Env], gymnasium.Env]
EnvLike = str | gymnasium.Env | VectorEnv | VecEnv
"""Id of an environment, an environment, or several of them."""


def flatten_popgym_observation(env: gymnasium.Env) -> gymnasium.Env:
    """Flatten a Tuple observation (POPGym Autoencode) to a vector, Discrete parts one-hot.

    Other observations stay unchanged.
    """
    return FlattenObservation(env) if isinstance(env.observation_space, spaces.Tuple) else env


def flatten_minigrid_observation(env: gymnasium.Env) -> gymnasium.Env:
    """Flatten the observation to a uint8 vector (4 + 7 * 7 * 20,): direction, then cells, all one-hot.

    MiniGrid's image holds codes of object, color and state. These are categories and are therefore one-hot
    encoded. The mission text is dropped. It carries no information if it never changes, as in all Memory
    tasks.

    Raises:
        TypeError: if the mission differs between episodes, because the task then depends on it.
    """
    from minigrid.wrappers import OneHotPartialObsWrapper

    _check_mission(env)
    flat = FlattenObservation(FilterObservation(OneHotPartialObsWrapper(env), ["direction", "image"]))
    bits = spaces.Box(0, 1, flat.observation_space.shape, np.uint8)
    return TransformObservation(flat, lambda observation: observation.astype(np.uint8), bits)


def _check_mission(env: gymnasium.Env) -> None:
    mission = env.observation_space["mission"]  # type: ignore[index]
    if any(len(words) > 1 for words in mission.ordered_placeholders or []):
        raise TypeError(
            f"the mission of {env} changes between episodes (for example {mission.sample()!r}), and text is "
            "not supported: pass a wrapper_class that encodes it as numbers"
        )


_WRAPPERS: dict[str | None, EnvWrapper] = {
    "popgym": flatten_popgym_observation,
    "minigrid": flatten_minigrid_observation,
}
"""Default wrapper of the environments of a package."""


def make_vec_env(
    env_id: str | Callable[..., gymnasium.Env],
    n_envs: int = 1,
    seed: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    wrapper_class: Callable[..., gymnasium.Env] | None = None,
    previous_reward: bool = False,
    previous_transition: bool = False,
    workers: Workers | None = None,
    curriculum: Curriculum | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    monitor_dir: str | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    **unsupported: Any,
) -> VecEnv:
    """Create ``n_envs`` copies of an environment as one Stable-Baselines3 ``VecEnv``.

    If the environment has a vector entry point with same-step autoreset (``rlxf/TMaze-v0``) and no wrapper
    or argument of `Monitor` is requested, the function uses it (`GymnasiumVecEnv`). Otherwise it calls
    Stable-Baselines3's ``make_vec_env``: each copy is in a `Monitor` and its wrappers, and all are in a
    `DummyVecEnv`. Each episode then has its own seed (`ActionReplay`), so training can be resumed in the
    middle of an episode.

    With ``workers``, the copies run in worker processes (`WorkerVecEnv`). They step in parallel, and an
    environment that raises, dies or hangs is restarted. The steps equal those of copies in this process,
    for any number of processes.

    ``popgym-...`` and ``MiniGrid-...`` ids need the ``memory`` extra. Without a ``wrapper_class``, they get
    the wrappers of `rlxf.envs.make`.

    Args:
        env_id: Gymnasium id; ``module:id`` imports the module first. Or a class or function that creates an
            environment, as in Stable-Baselines3: it need not be registered, but then no file can name it.
        n_envs: number of copies, at least 1.
        seed: copy i is seeded with seed + i at its first reset; None draws the seeds from NumPy's global
            generator, as in Stable-Baselines3.
        env_kwargs: arguments of the environment, including ``render_mode`` (default None).
        wrapper_class: wrapper class, or function of one environment, applied to each copy. Not
            `PreviousTransition`, which previous_transition=True applies.
        previous_reward: add the previous reward to each observation, with `PreviousReward` around all other
            wrappers. The observation is then a Dict.
        previous_transition: add the previous action, reward and done flag to each observation, even across
            episodes, with `PreviousTransition` around all other wrappers.
        workers: number of processes, timeouts and restarts; None for copies in this process. Processes
            support neither nested observation spaces nor text.
        curriculum: easier tasks with which each copy begins (`CurriculumEnv`); None for none. With a
            curriculum, an environment's vector entry point is not used. Each stage is made once in this
            process, also with ``workers``, to compare the spaces.
        wrapper_kwargs: arguments of ``wrapper_class`` after the environment.
        monitor_dir: folder in which each `Monitor` writes its file; None for no files.
        monitor_kwargs: arguments of each `Monitor`, e.g. the keys of infos that it records.
        unsupported: no argument; the error for one of Stable-Baselines3's ``make_vec_env`` names the
            alternative.

    Raises:
        BrokenEnvironmentError: if an environment cannot be created in its process.
        ValueError: if the id is unknown (with similar ids), n_envs is less than 1, there are more processes
            than environments, the stages of the curriculum have different spaces, or an environment already
            has the wrapper `PreviousTransition`.
        TypeError: if ``env_id`` is neither an id nor a class or function, if n_envs is not an int, if
            ``curriculum`` is not a `Curriculum`, if the environment does not accept env_kwargs, if a space
            is not supported (`check_playable`), or if an argument is unknown.
        DependencyNotInstalled: if the environment needs an extra of rlxf that is not installed; the message
            has the command that installs it.
    """
    _check_no_unsupported(unsupported)
    check_int("n_envs", n_envs)
    check_curriculum(curriculum)
    kwargs = env_kwargs or {}
    if wrapper_class is not None and wrapper_kwargs:
        wrapper_class = partial(wrapper_class, **wrapper_kwargs)
    spec = find_spec(env_id) if isinstance(env_id, str) else None
    chosen = wrapper_class, workers, curriculum, monitor_dir, monitor_kwargs
    single = previous_reward or previous_transition or any(value is not None for value in chosen)
    if not single and spec is not None and _has_vector_entry_point(spec, kwargs):
        vec_env = _vector_entry_point_env(spec, n_envs, kwargs)
        if vec_env is not None:
            vec_env.seed(seed)
            return vec_env
    make = _env_fn(env_id, kwargs)
    if curriculum is not None:
        env_fns = [_env_fn(stage, arguments) for stage, arguments in curriculum.tasks(env_id, kwargs)]
        make = partial(CurriculumEnv, env_fns, curriculum, check_stages(env_fns))
    wrap = _wrapper("" if spec is None else spec.id, wrapper_class, previous_reward, previous_transition)
    return make_vec_env_from(make, n_envs, seed, wrap, workers, monitor_dir, monitor_kwargs)


_ALTERNATIVES = {
    "vec_env_cls": "leave it out for copies in this process, use workers=Workers(PROCESSES) of rlxf.envs for "
    "processes, or pass a VecEnv of your own to the agent",
    "vec_env_kwargs": "workers=Workers(...) of rlxf.envs has the options of processes",
    "start_index": "copies are numbered from 0; pass another seed for other episodes",
}
"""Remedies for the arguments of Stable-Baselines3's ``make_vec_env`` that this one lacks."""


def _check_no_unsupported(arguments: dict[str, Any]) -> None:
    """Raise TypeError for unknown arguments, and for those of `_ALTERNATIVES` with a value."""
    for name, value in arguments.items():
        if name not in _ALTERNATIVES:
            similar = did_you_mean(name, signature(make_vec_env).parameters)
            raise TypeError(f"make_vec_env takes no argument {name!r}{similar}")
        if value:
            raise TypeError(f"make_vec_env takes no argument {name!r}: {_ALTERNATIVES[name]}")


@contextmanager
def as_vectorized(env: EnvLike, n_envs: int) -> Iterator[VecEnv]:
    """Context manager for a ``VecEnv`` of ``env``; of an id, ``n_envs`` environments, closed at the end.

    Raises:
        TypeError: if ``env`` is not an environment or an id.
        ValueError: if the id is unknown.
    """
    check_is_env(env)
    if isinstance(env, str):
        with closing(make_vec_env(env, n_envs)) as made:
            yield made
    elif isinstance(env, VectorEnv):
        yield as_vec_env(env)
    elif isinstance(env, gymnasium.Env):
        yield make_sync_vec_env([lambda: env])
    else:
        yield env


def check_is_env(env: Any) -> None:
    """Raise TypeError unless ``env`` is an id, an environment, or several of them."""
    if not isinstance(env, EnvLike):
        advice = "; pass make_vec_env(FUNCTION_OR_CLASS, n_envs) of rlxf.envs" if callable(env) else ""
        raise TypeError(f"env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got {env!r}{advice}")


def _checked_maker(maker: Any) -> Callable[..., gymnasium.Env]:
    """Return a class or function that creates an environment; raise TypeError for other objects."""
    if not callable(maker):
        raise TypeError(
            f"make_vec_env needs a Gymnasium id, or a class or function that creates an environment; "
            f"got {maker!r}. Pass a VecEnv or a VectorEnv to the agent directly"
        )
    return cast(Callable[..., gymnasium.Env], maker)


def _env_fn(
    env_id: str | Callable[..., gymnasium.Env], kwargs: dict[str, Any]
) -> Callable[[], gymnasium.Env]:
    """Return a function that creates the environment of an id, class or function, without wrappers."""
    if isinstance(env_id, str):
        return partial(make_single, find_spec(env_id), **kwargs)
    return partial(_checked_maker(env_id), **kwargs)


def make_vec_env_from(
    make: Callable[[], gymnasium.Env],
    n_envs: int,
    seed: int | None,
    wrapper: EnvWrapper | None = None,
    workers: Workers | None = None,
    monitor_dir: str | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
) -> VecEnv:
    """Create ``n_envs`` environments with Stable-Baselines3's ``make_vec_env``.

    Nested observation spaces are supported unless there are ``workers``.

    Args:
        make: function that creates one environment.
        n_envs: number of environments.
        seed: as in `make_vec_env`.
        wrapper: function that wraps each environment; None for no wrappers.
        workers: as in `make_vec_env`.
        monitor_dir: as in `make_vec_env`.
        monitor_kwargs: as in `make_vec_env`.

    Raises:
        TypeError: if a space is not supported (`check_playable`).
    """
    # The annotation is a class, but make_vec_env only calls it with the list of functions.
    vec_env_cls: Any = make_sync_vec_env if workers is None else partial(WorkerVecEnv, workers=workers)
    return env_util.make_vec_env(
        make,
        n_envs,
        seed,
        monitor_dir=monitor_dir,
        wrapper_class=wrapper,
        vec_env_cls=vec_env_cls,
        monitor_kwargs=monitor_kwargs,
    )


def make_env(
    env_id: str | EnvSpec,
    env_kwargs: dict[str, Any] | None = None,
    wrapper_class: EnvWrapper | None = None,
    previous_reward: bool = False,
    previous_transition: bool = False,
) -> gymnasium.Env:
    """Create one environment with the wrappers of `make_vec_env`; arguments and errors are the same.

    ``env_id`` can also be the spec of an environment, e.g. of another instance. Arguments of a vector
    environment, such as its number of copies, are left out.
    """
    spec = single_spec(find_spec(env_id) if isinstance(env_id, str) else env_id)
    wrap = _wrapper(spec.id, wrapper_class, previous_reward, previous_transition)
    return wrap(make_single(spec, **single_arguments(spec, env_kwargs or {})))


def _has_vector_entry_point(spec: EnvSpec, kwargs: dict[str, Any]) -> bool:
    """Return whether the environment has a vector entry point that accepts the arguments."""
    if spec.vector_entry_point is None or "max_episode_steps" in kwargs:
        return False
    try:
        return takes_arguments(spec.vector_entry_point, kwargs.keys() - VECTOR_ARGUMENTS)
    except (ImportError, gymnasium.error.DependencyNotInstalled):  # `creation_errors` describes it
        return True


def _vector_entry_point_env(spec: EnvSpec, n_envs: int, kwargs: dict[str, Any]) -> VecEnv | None:
    """Create the environment's own vector environment; None if it does not reset in the same step.

    Next-step autoreset costs one reset step per episode.
    """
    with creation_errors(spec, kwargs):
        env = gymnasium.make_vec(spec.id, n_envs, vectorization_mode="vector_entry_point", **kwargs)
    if env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
        return as_vec_env(env)
    env.close()
    return None


def _check_no_previous_transition(env: gymnasium.Env) -> None:
    """Raise ValueError if an environment for `ActionReplay` has `PreviousTransition` among its wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, PreviousTransition):
            raise ValueError(
                f"pass previous_transition=True instead of the wrapper {type(env).__name__}: make_vec_env "
                f"resets the environment with a seed before each episode, at which the wrapper clears the "
                f"previous transition"
            )
        env = env.env


def _wrapper(
    env_id: str, wrapper_class: EnvWrapper | None, previous_reward: bool, previous_transition: bool
) -> EnvWrapper:
    """Return a function that applies all wrappers, innermost first, and then checks the spaces.

    The outer wrappers hold no state that a replay of the episode lacks, so they can wrap `ActionReplay`. They
    must wrap it, because `ActionReplay` resets with a seed, at which `PreviousTransition` clears its state.
    """
    optional = {PreviousReward: previous_reward, PreviousTransition: previous_transition}
    outer = [wrapper for wrapper, enabled in optional.items() if enabled]
    wrappers = [wrapper_class or _WRAPPERS.get(package_of(env_id), lambda env: env), ActionReplay, *outer]

    def wrap(env: gymnasium.Env) -> gymnasium.Env:
        inner, *others = wrappers
        env = inner(env)
        _check_no_previous_transition(env)
        check_has_spaces(env)  # the first wrapper, which may be the user's, may define them
        for wrapper in others:
            env = wrapper(env)
        check_playable(env.observation_space, env.action_space)
        return env

    return wrap
