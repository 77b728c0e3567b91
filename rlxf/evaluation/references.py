"""Which returns count as 0 and as 100."""

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.ids import env_id_of
from rlxf.envs.trajectories.reference_scores import ReferenceScores, tabled_scores


def references_of(agent: Any, env: VecEnv) -> ReferenceScores | None:
    """Those that the agent brings from its data, else those of the environment in `TABLE`, else None."""
    own = getattr(agent, "reference_scores", None)
    return _tabled(env) if own is None else own


def _tabled(env: VecEnv) -> ReferenceScores | None:
    env_id = env_id_of(env)
    return None if env_id is None else tabled_scores(env_id)
