"""Optional properties of agents, which may be any objects with SB3's ``predict``."""

from typing import Any

from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from rlxf.data.reference_scores import ReferenceScores
from rlxf.envs.described_env import DescribedEnv
from rlxf.envs.return_to_go import is_return_conditioned


def check_has_predict(agent: object) -> None:
    """Raise TypeError unless an object has ``predict``."""
    if not callable(getattr(agent, "predict", None)):
        raise TypeError(f"agent must have predict(obs, state, episode_start, deterministic), got {agent!r}")


def is_return_conditioned_agent(agent: Any) -> bool | None:
    """Return whether an agent acts for a target return; None if it is not known.

    It is the attribute ``return_conditioned``. Without it, an agent with the observation space of
    `ReturnToGo` is conditioned.
    """
    space = getattr(agent, "observation_space", None)
    by_space = None if space is None else is_return_conditioned(space)
    return getattr(agent, "return_conditioned", by_space)


def return_range(agent: Any) -> tuple[float, float] | None:
    """Return the smallest and the largest return of an episode in the agent's data; None if unknown."""
    return getattr(agent, "return_range", None)


def reference_scores(agent: Any) -> ReferenceScores | None:
    """Return the reference scores of the agent's data; None if there are none."""
    return getattr(agent, "reference_scores", None)


def recorded_env(agent: Any) -> DescribedEnv | None:
    """Return the environment that the agent's data name; None if they name none, or there are no data."""
    return getattr(getattr(agent, "dataset_info", None), "env", None)


def has_persistent_memory(agent: Any) -> bool:
    """Return whether the memory of an agent persists across episodes."""
    return bool(getattr(agent, "persist_memory_across_episodes", False))


def saw_normalized_observations(agent: Any) -> bool:
    """Return whether an agent of rlxf was trained on observations normalized by a ``VecNormalize``."""
    return bool(getattr(agent, "normalized_observations", False))


def training_normalizer(agent: Any) -> VecNormalize | None:
    """Return the ``VecNormalize`` that normalizes observations in training; None if there is none."""
    found = agent.get_vec_normalize_env() if hasattr(agent, "get_vec_normalize_env") else None
    return found if found is not None and found.norm_obs else None


def lacks_statistics(agent: Any) -> bool:
    """Return whether an agent was trained on normalized observations, but has no ``VecNormalize``."""
    return saw_normalized_observations(agent) and training_normalizer(agent) is None


def own_env(agent: Any) -> VecEnv | None:
    """Return the environment that an agent has; None if it has none."""
    return agent.get_env() if hasattr(agent, "get_env") else None


def training_env(agent: Any) -> VecEnv | None:
    """Return the environment in which an agent trains; None if it has none, or trains on data.

    An agent that trains on data has an attribute ``trains_in_env`` that is False.
    """
    return own_env(agent) if getattr(agent, "trains_in_env", True) else None


def has_compiled_step(agent: Any) -> bool:
    """Return whether the acting step of an agent is compiled for a number of environments."""
    return bool(getattr(agent, "has_compiled_step", False))


def mean_depth(agent: Any) -> float | None:
    """Return the mean passes per token since the last call; None without adaptive depth."""
    return agent.mean_predict_depth() if hasattr(agent, "mean_predict_depth") else None
