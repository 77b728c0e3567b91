"""Reference scores of recorded datasets."""

from typing import Any

from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.collection.random_actions import RandomActions
from rlxf.collection.skills import Skill
from rlxf.envs.trajectories import ReferenceScores
from rlxf.evaluation import evaluate
from rlxf.evaluation.environment import normalised_as_in_training
from rlxf.evaluation.references import references_of

EPISODES = 100
"""Number of episodes to measure the mean return of a random policy, and of the agent."""


def find_references(best: Skill, env: VecEnv, seed: int) -> ReferenceScores | None:
    """Return the known scores (`references_of`), else measure a random policy (0) and the agent (100).

    The result is None without known scores if there is no agent, the agent is not better than the random
    policy, or it is conditioned on a target return.
    """
    known = references_of(best.agent, env)
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
    high = evaluate(agent, normalised_as_in_training(agent, env), EPISODES, seed=seed).mean
    source = f"mean returns of a random policy and of {type(agent).__name__} over {EPISODES} episodes"
    return ReferenceScores(low, high, source) if low < high else None
