"""Reference scores of a dataset that is recorded."""

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
"""Of a random policy and of the agent, to measure what they return."""


def find_references(best: Skill, env: VecEnv, seed: int) -> ReferenceScores | None:
    """Those that are known of the environment (`references_of`); else 0 is a random policy and 100 the agent.

    None if there is no agent, it is no better than random, or it only returns what it is asked for.
    """
    known = references_of(best.agent, env)
    if known is not None or best.agent is None or best.target_return is not None:
        return known
    return _measure(best.agent, env, seed)


def as_metadata(references: ReferenceScores) -> dict[str, Any]:
    """As Minari keeps them."""
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
