"""Options of offline training and of the environment to evaluate in."""

import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.decision_transformer.objectives import OBJECTIVES
from rlxf.cli.argument_checks import Count
from rlxf.cli.options.env_options import EnvOptions, json_object
from rlxf.training import parse_schedule


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of AdamW and of the windows of the data."""

    context_length: Count = 20
    """Context length in environment steps, including the current one."""
    batch_size: Count = 64
    """Number of windows per update."""
    learning_rate: str = "0.0001"
    """Learning rate of AdamW over the training: NUMBER, linear:START:END or cosine:START:END."""
    weight_decay: float = 1e-4
    """Weight decay coefficient of AdamW."""
    warmup_updates: Count | None = None
    """Number of updates in which the learning rate rises from 0. None means a tenth of the training."""
    max_grad_norm: float = 0.25
    """Maximum norm of the gradient; larger gradients are clipped."""
    return_scale: float | None = None
    """Divisor of returns. None means the standard deviation of the returns-to-go in the data."""
    episode_length: Count | None = None
    """Number of time steps with an embedding. None means the longest episode of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. "auto" selects the GPU if there is one."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent or of the pretraining."""
        return asdict(self) | {"learning_rate": parse_schedule(self.learning_rate)}


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(WindowOptions):
    """`WindowOptions` and the training objective."""

    objective: Literal["Imitation", "MaximumEntropy"] = "Imitation"
    """Training objective. MaximumEntropy trains a stochastic policy, which can be finetuned online."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError: if the objective is unknown, e.g. in a ``config.json``.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        return super().arguments() | {"objective": OBJECTIVES[self.objective]()}


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
    check_env_named(agent, env)
    given = json_object(env_kwargs)
    untrusted = _untrusted_parts(agent, env, given)
    if env is None or (env == agent.dataset_info.env_id and not untrusted):
        return agent.make_env(n_envs, env_kwargs=given)
    if untrusted:
        warnings.warn(
            f"the data describe {env} with {', '.join(untrusted)}, which is not used: pass --env-kwargs, or "
            f"--trust-data (--trust for a run) if you trust the author of the data",
            stacklevel=2,
        )
    made = EnvOptions(env=env, env_kwargs=env_kwargs).make(n_envs, None)
    agent.check_env(made)
    return made


def _untrusted_parts(agent: DecisionTransformer, env: str | None, given: dict[str, Any]) -> list[str]:
    """Return the untrusted parts of the description of the named environment in the datasets."""
    if agent.trust or env is None or env != agent.dataset_info.env_id or agent.dataset_info.env is None:
        return []
    return agent.dataset_info.env.needs_trust(given)


def check_env_named(agent: DecisionTransformer, env: str | None, otherwise: str = "") -> None:
    """Raise ValueError unless the datasets or ``env`` name an environment.

    Args:
        agent: agent trained on the datasets.
        env: Gymnasium id, or None.
        otherwise: alternative advice, appended to the message.
    """
    if env is None and agent.dataset_info.env_id is None:
        ids = ", ".join(agent.dataset_info.dataset_ids)
        raise ValueError(f"the datasets {ids} do not name their environment: pass --env ID{otherwise}")
