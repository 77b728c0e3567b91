"""From environments side by side to the spec that makes one of them again."""

import warnings
from dataclasses import replace

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from stable_baselines3.common.vec_env import VecEnv

OF_A_BATCH = ("num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments that `gymnasium.make_vec` adds to those of the environment."""
MONITOR = "stable_baselines3.common.monitor:Monitor"


def recreatable_spec(env: VecEnv) -> EnvSpec | None:
    """The spec of one of the environments; None, and a warning, if no spec makes it again.

    It must survive JSON, in which a dataset keeps it, and give the spaces of ``env``. A function in a
    wrapper, or a wrapper that does not keep its arguments, is more than a spec can hold. SB3's ``Monitor`` is
    left out: it changes nothing.
    """
    try:
        return _checked(_of_one(env.get_attr("spec", 0)[0]), env)
    except Exception as error:  # a stranger's spec is taken apart and made here: anything may fail
        warnings.warn(
            f"no spec makes the environment again ({error!r}): the dataset does not name it, and whoever "
            f"evaluates in it must bring it",
            stacklevel=3,
        )
        return None


def _of_one(spec: EnvSpec) -> EnvSpec:
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in OF_A_BATCH}
    kept = tuple(filter(_changes_something, spec.additional_wrappers))
    return replace(spec, kwargs=kwargs, additional_wrappers=kept)


def _changes_something(wrapper: WrapperSpec) -> bool:
    return wrapper.entry_point != MONITOR


def _checked(spec: EnvSpec, env: VecEnv) -> EnvSpec:
    again = gymnasium.make(EnvSpec.from_json(spec.to_json()))
    spaces = again.observation_space, again.action_space
    again.close()
    if spaces != (env.observation_space, env.action_space):
        raise ValueError(f"{spec.id} has other spaces, {spaces}")
    return spec
