"""Metadata of a recorded dataset: description, environment spec and reference scores."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.collection.behavior_policy import BehaviorPolicy, RandomActions
from rlxf.data import ReferenceScores
from rlxf.evaluation import evaluate
from rlxf.evaluation.environment import reference_scores_of, with_training_normalization

EPISODES = 100
"""Number of episodes to measure the mean return of a random policy, and of the agent."""


def measure_reference_scores(best: BehaviorPolicy, env: VecEnv, seed: int) -> ReferenceScores | None:
    """Return the known scores (`reference_scores_of`), else measure a random policy (0) and the agent (100).

    The result is None without known scores if there is no agent, the agent is not better than the random
    policy, or it is conditioned on a target return.
    """
    known = reference_scores_of(best.agent, env)
    if known is not None or best.agent is None or best.target_return is not None:
        return known
    return _measure(best.agent, env, seed)


def as_metadata(references: ReferenceScores) -> dict[str, Any]:
    """Return the reference scores as Minari metadata."""
    return {
        "ref_min_score": references.minimum,
        "ref_max_score": references.maximum,
        "num_episodes_average_score": EPISODES,
    }


def _measure(agent: PolicyPredictor, env: VecEnv, seed: int) -> ReferenceScores | None:
    low = evaluate(RandomActions(env.action_space, seed), env, EPISODES, seed=seed).mean
    high = evaluate(agent, with_training_normalization(agent, env), EPISODES, seed=seed).mean
    source = f"mean returns of a random policy and of {type(agent).__name__} over {EPISODES} episodes"
    return ReferenceScores(low, high, source) if low < high else None


VECTOR_ARGUMENTS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments that `gymnasium.make_vec` adds to those of the environment."""
MONITOR = "stable_baselines3.common.monitor:Monitor"


def recreatable_spec(env: VecEnv) -> EnvSpec | None:
    """Return the spec of one of the environments; None, with a warning, if the spec does not recreate it.

    The spec must be serializable as JSON, which datasets store, and recreate the spaces of ``env``. This is
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
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in VECTOR_ARGUMENTS}
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


def build_metadata(
    policies: Sequence[BehaviorPolicy],
    counts: Sequence[int],
    spec: EnvSpec | None,
    references: ReferenceScores | None,
    seed: int,
    author: str | None,
    algorithm_name: str | None,
) -> dict[str, Any]:
    """Return Minari metadata: policies and their episodes, seed, versions and reference scores.

    Args:
        policies: policies that were recorded.
        counts: number of episodes of each policy.
        spec: spec of the environment; None if unknown.
        references: reference scores; None if unknown.
        seed: seed of the recording.
        author: author of the dataset; None for no author.
        algorithm_name: algorithm name; None for the names of the agents' classes.
    """
    names = dict.fromkeys(
        "random" if policy.agent is None else type(policy.agent).__name__ for policy in policies
    )
    played = "; ".join(
        f"{count} episodes of {policy}" for policy, count in zip(policies, counts, strict=True)
    )
    env_name = "An environment without a spec" if spec is None else spec.id
    versions = f"Recorded by rlxf {version('rlxf')} with gymnasium {gymnasium.__version__}, seed {seed}."
    source = "" if references is None else f" Reference scores: {references.source}."
    return {
        "algorithm_name": algorithm_name or ", ".join(names),
        "description": f"{env_name}: {played}. {versions}{source}",
        **({} if author is None else {"author": {author}}),
        **({} if references is None else as_metadata(references)),
    }
