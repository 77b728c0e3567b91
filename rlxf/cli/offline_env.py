"""Environments for an agent that was trained on datasets."""

import warnings
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.cli.task import Task, json_object


def make_offline_env(
    agent: DecisionTransformer, env: str | None, env_kwargs: dict[str, Any], n_envs: int
) -> VecEnv:
    """Make environments with the spaces of the agent. Observations do not contain the return-to-go.

    Args:
        agent: agent whose datasets may name an environment.
        env: Gymnasium id; None for the environment of the datasets.
        env_kwargs: arguments of the environment. They update those of the datasets, if it is theirs.
        n_envs: number of environments.

    Raises:
        ValueError: if neither ``env`` nor the datasets name an environment, it is unknown, its spaces differ
            from those of the datasets, or only the datasets name it and their description needs trust.
        TypeError: if the environment does not accept the arguments.

    Warns:
        UserWarning: if ``env`` is that of the datasets, and their description is ignored because it needs
            trust.
    """
    check_named(agent, env)
    given = json_object(env_kwargs)
    untrusted = _untrusted_parts(agent, env, given)
    if env is None or (env == agent.facts.env_id and not untrusted):
        return agent.make_env(n_envs, env_kwargs=given)
    if untrusted:
        warnings.warn(
            f"the data describe {env} with {', '.join(untrusted)}, which is not used: pass --env-kwargs, or "
            f"--trust-data (--trust for a run) if you trust the author of the data",
            stacklevel=2,
        )
    made = Task(env=env, env_kwargs=env_kwargs).make(n_envs, None)
    agent.check_env(made)
    return made


def _untrusted_parts(agent: DecisionTransformer, env: str | None, given: dict[str, Any]) -> list[str]:
    """Return the untrusted parts of the description of the named environment in the datasets."""
    if agent.trust or env is None or env != agent.facts.env_id or agent.facts.env is None:
        return []
    return agent.facts.env.needs_trust(given)


def check_named(agent: DecisionTransformer, env: str | None, otherwise: str = "") -> None:
    """Raise ValueError unless the datasets or ``env`` name an environment.

    Args:
        agent: agent trained on the datasets.
        env: Gymnasium id, or None.
        otherwise: alternative advice, appended to the message.
    """
    if env is None and agent.facts.env_id is None:
        ids = ", ".join(agent.facts.dataset_ids)
        raise ValueError(f"the datasets {ids} do not name their environment: pass --env ID{otherwise}")
