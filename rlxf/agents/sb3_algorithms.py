"""Detection of the Stable-Baselines3 or sb3-contrib algorithm of a file from its JSON, without pickle."""

import json
import zipfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

ALGORITHMS = {
    "ppo_lstm": ("sb3_contrib:RecurrentPPO", {"clip_range", "sb3_contrib.common.recurrent.policies"}),
    "ppo_mask": ("sb3_contrib:MaskablePPO", {"clip_range", "sb3_contrib.common.maskable.policies"}),
    "ppo": ("stable_baselines3:PPO", {"clip_range"}),
    "trpo": ("sb3_contrib:TRPO", {"cg_max_steps"}),
    "a2c": ("stable_baselines3:A2C", {"gae_lambda"}),
    "qrdqn": ("sb3_contrib:QRDQN", {"exploration_fraction", "sb3_contrib.qrdqn.policies"}),
    "dqn": ("stable_baselines3:DQN", {"exploration_fraction"}),
    "tqc": ("sb3_contrib:TQC", {"top_quantiles_to_drop_per_net"}),
    "crossq": ("sb3_contrib:CrossQ", {"target_entropy", "policy_delay"}),
    "sac": ("stable_baselines3:SAC", {"target_entropy"}),
    "ddpg": ("stable_baselines3:DDPG", {"policy_delay=1", "target_noise_clip=0.0"}),
    "td3": ("stable_baselines3:TD3", {"target_policy_noise"}),
    "ars": ("sb3_contrib:ARS", {"n_delta"}),
}
"""Name as in the RL Zoo -> (class, markers of its files); the first entry whose markers are all present wins.

A marker is the name of a setting, a numeric setting with its value, or the module of the policy class.
"""
DATA = "data"
"""Archive member with the settings: JSON, with base64 pickles for values that JSON cannot hold."""


def algorithm_of(path: Path) -> str:
    """Return the name of the algorithm that wrote the file, without running code from it.

    Raises:
        ValueError: if the algorithm is not recognised.
        Exception: of any kind if the file is damaged or has other contents.
    """
    with zipfile.ZipFile(path) as file:
        facts = _facts(json.loads(file.read(DATA)))
    for name, (_, marks) in ALGORITHMS.items():
        if marks <= facts:
            return name
    raise ValueError(f"its algorithm is not recognised: pass algorithm=..., one of {', '.join(ALGORITHMS)}")


def class_of(name: str) -> type[BaseAlgorithm]:
    """Return the class of an algorithm.

    Raises:
        ValueError: if the name is unknown.
        ImportError: if sb3-contrib is needed and not installed.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    location, _ = ALGORITHMS[name]
    try:
        return resolve_name(location)
    except ImportError as error:
        package = location.partition(":")[0].replace("_", "-")
        raise ImportError(f"{name} requires {package}: pip install {package}") from error


def _facts(data: dict[str, Any]) -> set[str]:
    numbers = {f"{key}={value}" for key, value in data.items() if isinstance(value, int | float)}
    return {*data, *numbers, _module(data)}


def _module(data: dict[str, Any]) -> str:
    """Return the module of the policy class, which SB3 stores as readable text next to its pickle."""
    policy = data.get("policy_class")
    return str(policy.get("__module__")) if isinstance(policy, dict) else ""
