"""Environments for an agent that learned from data."""

import warnings
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.cli.task import Task, json_object


def make_offline_env(
    agent: DecisionTransformer, env: str | None, env_kwargs: dict[str, Any], n_envs: int
) -> VecEnv:
    """Environments that the agent can play in; they show no return to go.

    Args:
        agent: learned from data, which may name an environment.
        env: Gymnasium id; None for what the data name.
        env_kwargs: arguments of the environment; in that of the data they change those of the data.
        n_envs: how many.

    Raises:
        ValueError: if neither names an environment, it is unknown, its spaces are not those of the data, or
            only the data name it and their description needs trust.
        TypeError: if it does not take the arguments.

    Warns:
        UserWarning: if ``env`` is that of the data and its description needs trust, so it is ignored.
    """
    check_named(agent, env)
    given = json_object(env_kwargs)
    left_out = _left_out(agent, env, given)
    if env is None or (env == agent.facts.env_id and not left_out):
        return agent.make_env(n_envs, env_kwargs=given)
    if left_out:
        warnings.warn(
            f"the data describe {env} with {', '.join(left_out)}, which is not used: give --env-kwargs, or "
            f"--trust-data (of a run: --trust) if you trust the author of the data",
            stacklevel=2,
        )
    made = Task(env=env, env_kwargs=env_kwargs).make(n_envs, None)
    agent.check_env(made)
    return made


def _left_out(agent: DecisionTransformer, env: str | None, given: dict[str, Any]) -> list[str]:
    """Return the untrusted parts of the data's description of the named environment."""
    if agent.trust or env is None or env != agent.facts.env_id or agent.facts.env is None:
        return []
    return agent.facts.env.needs_trust(given)


def check_named(agent: DecisionTransformer, env: str | None, otherwise: str = "") -> None:
    """Raise ValueError unless the data or ``env`` name an environment.

    Args:
        agent: learned from the data.
        env: Gymnasium id, or None.
        otherwise: what else the user can do, the end of the message.
    """
    if env is None and agent.facts.env_id is None:
        ids = ", ".join(agent.facts.dataset_ids)
        raise ValueError(
            f"the data, {ids}, do not say which environment they are from: name it with --env ID{otherwise}"
        )
