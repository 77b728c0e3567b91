"""What a run was started with, in TensorBoard's HPARAMS tab."""

import json
from typing import Any

from stable_baselines3.common.logger import HParam, Logger

METRICS = ("rollout/ep_rew_mean", "eval/mean_reward", "eval/iqm", "eval/success_rate")


def log_hyperparameters(logger: Logger, config: dict[str, Any]) -> None:
    """Show the configuration beside what the run achieves."""
    values = {name: value if _is_plain(value) else json.dumps(value) for name, value in config.items()}
    hidden = ("stdout", "log", "json", "csv")
    logger.record("hparams", HParam(values, dict.fromkeys(METRICS, 0.0)), exclude=hidden)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
