"""Options of offline training, published settings, and the environment to evaluate in."""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import KZL, ODT, DecisionTransformer, Imitation
from rlxf.agents.decision_transformer.objectives import OBJECTIVES
from rlxf.attention import TransformerSpec
from rlxf.cli.options.common import Count, Device, given_options, options
from rlxf.cli.options.env_options import EnvOptions, json_object
from rlxf.cli.run_config import FLOAT32_BYTES
from rlxf.training import parse_schedule, schedule_to_text

DEFAULTS = {name: each.default for name, each in inspect.signature(DecisionTransformer).parameters.items()}
"""Argument of `DecisionTransformer` -> default."""


@options
class WindowOptions:
    """Options of AdamW and of the windows of the data."""

    context_length: Count = DEFAULTS["context_length"]
    """Context length in environment steps, including the current one."""
    batch_size: Count = DEFAULTS["batch_size"]
    """Number of windows per update."""
    learning_rate: str = "0.0001"
    """Learning rate of AdamW over the training: NUMBER, linear:START:END or cosine:START:END."""
    weight_decay: float = DEFAULTS["weight_decay"]
    """Weight decay coefficient of AdamW."""
    warmup_updates: Count | None = DEFAULTS["warmup_updates"]
    """Number of updates in which the learning rate rises from 0. None means a tenth of the training."""
    max_grad_norm: float = DEFAULTS["max_grad_norm"]
    """Maximum norm of the gradient; larger gradients are clipped."""
    return_scale: float | None = DEFAULTS["return_scale"]
    """Divisor of returns. None means the standard deviation of the returns-to-go in the data."""
    episode_length: Count | None = DEFAULTS["episode_length"]
    """Number of time steps with an embedding. None means the longest episode of the data."""
    device: Device = "auto"

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent or of the pretraining."""
        return asdict(self) | {"learning_rate": parse_schedule(self.learning_rate)}

    def memory_usage(self, core: TransformerSpec) -> dict[str, int]:
        """Return the bytes of a batch, three tokens per step, and of the time-step embeddings."""
        tokens = 3 * self.context_length * self.batch_size
        windows = f"windows of batch_size {self.batch_size}, context_length {self.context_length}"
        return {
            windows: tokens * core.width * FLOAT32_BYTES,
            f"episode_length {self.episode_length}": (self.episode_length or 0) * core.width * FLOAT32_BYTES,
        }


@options
class OfflineOptions(WindowOptions):
    """`WindowOptions` and the training objective."""

    objective: Literal["Imitation", "MaximumEntropy"] = "Imitation"
    """Training objective. MaximumEntropy trains a stochastic policy, which can be fine-tuned online."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError: if the objective is unknown, e.g. in a ``config.json``.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        return super().arguments() | {"objective": OBJECTIVES[self.objective]()}


PUBLISHED = {"kzl": KZL, "odt": ODT}
"""Name on the command line -> settings."""


def settings_name(args: Sequence[str]) -> str | None:
    """Return the value of ``--settings NAME``; None if it is missing or unknown."""
    name = given_options(args, "settings").get("settings")
    return name if name in PUBLISHED else None


def default_options(name: str) -> dict[str, Any]:
    """Return the default options of the command with the published settings of this name."""
    learner = {**PUBLISHED[name]}
    core = learner.pop("core")
    learner["learning_rate"] = str(schedule_to_text(learner["learning_rate"]))
    learner["objective"] = type(learner.get("objective", Imitation())).__name__
    return {"settings": name, "learner": OfflineOptions(**learner), "core": core}


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
