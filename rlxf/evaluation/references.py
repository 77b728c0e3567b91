"""Reference scores for the normalisation of returns."""

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.ids import env_id_of
from rlxf.envs.trajectories.reference_scores import ReferenceScores, tabled_scores


def references_of(agent: Any, env: VecEnv) -> ReferenceScores | None:
    """Return the reference scores of the agent's data, else of the environment in `TABLE`, else None."""
    scores = getattr(agent, "reference_scores", None)
    return _tabled(env) if scores is None else scores


def _tabled(env: VecEnv) -> ReferenceScores | None:
    env_id = env_id_of(env)
    return None if env_id is None else tabled_scores(env_id)
