"""Spec that recreates the environment of a dataset."""

import warnings
from dataclasses import replace

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from stable_baselines3.common.vec_env import VecEnv

OF_A_BATCH = ("num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments that `gymnasium.make_vec` adds to those of the environment."""
MONITOR = "stable_baselines3.common.monitor:Monitor"


def recreatable_spec(env: VecEnv) -> EnvSpec | None:
    """Return the spec of one of the environments; None, with a warning, if the spec does not recreate it.

    The spec must be serialisable as JSON, which datasets store, and recreate the spaces of ``env``. This is
    not possible for wrappers with a function as an argument, or wrappers that do not record their arguments.
    SB3's ``Monitor`` is left out, because it does not change the results of steps.
    """
    try:
        return _check_spec(_single_spec(env.get_attr("spec", 0)[0]), env)
    except Exception as error:  # the spec of an arbitrary environment may fail in any way
        warnings.warn(
            f"the spec of the environment does not recreate it ({error!r}): the dataset is stored without an "
            f"environment, so pass env to evaluate agents that are trained on it",
            stacklevel=3,
        )
        return None


def _single_spec(spec: EnvSpec) -> EnvSpec:
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in OF_A_BATCH}
    wrappers = tuple(filter(_is_not_monitor, spec.additional_wrappers))
    return replace(spec, kwargs=kwargs, additional_wrappers=wrappers)


def _is_not_monitor(wrapper: WrapperSpec) -> bool:
    return wrapper.entry_point != MONITOR


def _check_spec(spec: EnvSpec, env: VecEnv) -> EnvSpec:
    recreated = gymnasium.make(EnvSpec.from_json(spec.to_json()))
    spaces = recreated.observation_space, recreated.action_space
    recreated.close()
    if spaces != (env.observation_space, env.action_space):
        raise ValueError(f"the spec of {spec.id} gives other spaces, {spaces}")
    return spec
