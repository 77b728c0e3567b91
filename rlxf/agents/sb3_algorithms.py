"""Which algorithm of Stable-Baselines3 or sb3-contrib wrote a file: read from its JSON, without pickle."""

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
"""Name, as in the RL Zoo -> its class, and what its files say; special ones first, for the first that fits.

Files say names of settings, settings that are numbers with their values, and the module of the policy.
"""
DATA = "data"
"""The member with the settings: JSON, with a pickle in base64 wherever JSON would not do."""


def algorithm_of(path: Path) -> str:
    """Name of the algorithm that wrote the file. Nothing in it is run.

    Raises:
        ValueError: if the file does not tell.
        Exception: of any kind if it is damaged or of something else.
    """
    with zipfile.ZipFile(path) as file:
        said = _facts(json.loads(file.read(DATA)))
    for name, (_, marks) in ALGORITHMS.items():
        if marks <= said:
            return name
    raise ValueError(f"it does not tell its algorithm: pass algorithm=..., one of {', '.join(ALGORITHMS)}")


def class_of(name: str) -> type[BaseAlgorithm]:
    """The class of the algorithm.

    Raises:
        ValueError: if there is none of this name.
        ImportError: if sb3-contrib is needed and not installed.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is not known; there are {', '.join(ALGORITHMS)}")
    home, _ = ALGORITHMS[name]
    try:
        return resolve_name(home)
    except ImportError as error:
        package = home.partition(":")[0].replace("_", "-")
        raise ImportError(f"{name} comes with {package}: pip install {package}") from error


def _facts(data: dict[str, Any]) -> set[str]:
    numbers = {f"{key}={value}" for key, value in data.items() if isinstance(value, int | float)}
    return {*data, *numbers, _module(data)}


def _module(data: dict[str, Any]) -> str:
    """Of the policy's class: it stands beside its pickle, for people to read."""
    policy = data.get("policy_class")
    return str(policy.get("__module__")) if isinstance(policy, dict) else ""
