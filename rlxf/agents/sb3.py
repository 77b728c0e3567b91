"""Import of agents that Stable-Baselines3 or sb3-contrib saved.

The algorithm of a file is detected without unpickling; loading the agent unpickles it.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from rlxf.agents.common.arguments import check_device
from rlxf.agents.common.checkpoint import checkpoint_path
from rlxf.agents.common.training_env import as_training_env
from rlxf.training import CheckpointError
from rlxf.utils.warnings import warn_user

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


def detect_algorithm(path: Path) -> str:
    """Return the name of the algorithm that wrote the file, without running code from it.

    Raises:
        ValueError: if the algorithm is not recognized.
        Exception: of any kind if the file is damaged or has other contents.
    """
    with zipfile.ZipFile(path) as file:
        present = _markers(json.loads(file.read(DATA)))
    for name, (_, markers) in ALGORITHMS.items():
        if markers <= present:
            return name
    raise ValueError(f"its algorithm is not recognized: pass algorithm=..., one of {', '.join(ALGORITHMS)}")


def algorithm_class(name: str) -> type[BaseAlgorithm]:
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


def _markers(data: dict[str, Any]) -> set[str]:
    """Return all markers in the settings; SB3 stores the policy's module both as text and as a pickle."""
    numbers = {f"{key}={value}" for key, value in data.items() if isinstance(value, int | float)}
    policy = data.get("policy_class")
    return {*data, *numbers, str(policy.get("__module__") if isinstance(policy, dict) else "")}


NORMALIZER = "vecnormalize.pkl"
"""File name of statistics in the RL Zoo, in a folder next to the agent's file.

The folder has the name of the file without its suffix.
"""


def import_sb3(
    path: str | os.PathLike[str],
    trust: bool = False,
    *,
    env: str | Env | VecEnv | VectorEnv | None = None,
    normalizer: str | os.PathLike[str] | None = None,
    algorithm: str | None = None,
    device: torch.device | str = "auto",
) -> BaseAlgorithm:
    """Load an agent that ``save`` of Stable-Baselines3 or sb3-contrib wrote, to evaluate or record it.

    The file holds pickles: loading it runs the code in them with your permissions on this machine. No other
    function of rlxf opens it. `collect` records the agent's episodes as a dataset, and `evaluate` computes
    its returns; both normalize observations if ``normalizer`` is passed here.

    Args:
        path: the file; ".zip" is added if it has no suffix, as in SB3.
        trust: True if you trust the author of the file and of ``normalizer``. Otherwise neither is opened.
        env: environment to act in, or its id; its spaces must match the agent's. None: the agent only
            predicts.
        normalizer: file of SB3's ``VecNormalize`` with the statistics of the agent's training; the RL Zoo's
            is ``NAME/vecnormalize.pkl`` next to ``NAME.zip``. The statistics are frozen, and rewards are not
            scaled. None: the agent was trained on raw observations.
        algorithm: name as in the RL Zoo: a2c, ddpg, dqn, ppo, sac, td3; with sb3-contrib ars, crossq,
            ppo_lstm (RecurrentPPO), ppo_mask, qrdqn, tqc, trpo. None: derived from the settings in the file.
        device: device of the tensors.

    Returns:
        The agent, an instance of the algorithm's class.

    Raises:
        ValueError: if ``trust`` is not True, ``algorithm`` is unknown, ``normalizer`` is passed without
            ``env``, or the device does not exist.
        FileNotFoundError: if a file does not exist.
        CheckpointError: if a file is damaged, has other contents, holds an algorithm that is not recognized,
            or does not fit ``env``.
        ImportError: if sb3-contrib is needed and not installed.

    Warns:
        UserWarning: if the RL Zoo's statistics exist next to the file and no ``normalizer`` is passed.
    """
    check_device(device)
    path = checkpoint_path(path)
    _check_trusted(path, trust)
    _check_normalizer(path, env is not None, normalizer)
    with _import_errors(path):
        name = algorithm or detect_algorithm(path)
    agent_class = algorithm_class(name)
    with ExitStack() as stack:
        vec_env = as_training_env(env, 1, None)
        if isinstance(env, str):
            stack.callback(vec_env.close)  # if the agent is not loaded
        vec_env = _normalized(vec_env, normalizer)
        with _import_errors(path):
            agent = agent_class.load(path, env=vec_env, device=device)
        stack.pop_all()
    return agent


def _check_trusted(path: Path, trust: bool) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"the file {path} does not exist; check the path")
    if trust is not True:  # other truthy values are not explicit consent
        raise ValueError(
            f"{path} is not opened: files of Stable-Baselines3 hold pickles, and loading them runs the code "
            f"in them. If you trust the author of the file, pass trust=True"
        )


def _check_normalizer(path: Path, has_env: bool, normalizer: str | os.PathLike[str] | None) -> None:
    statistics = path.with_suffix("") / NORMALIZER
    if normalizer is None and statistics.is_file():
        warn_user(
            f"{statistics} exists next to {path}, so the agent was probably trained on normalized "
            f"observations; pass normalizer={str(statistics)!r}"
        )
    if normalizer is not None and not has_env:
        raise ValueError(f"normalizer {normalizer} needs an environment to wrap: pass env=..., too")


def _normalized(env: Env | VecEnv | None, normalizer: str | os.PathLike[str] | None) -> Env | VecEnv | None:
    if normalizer is None or env is None:
        return env
    if not Path(normalizer).is_file():
        raise FileNotFoundError(f"the file {normalizer} does not exist; check the path of the normalizer")
    with _import_errors(normalizer):
        vec_env = env if isinstance(env, VecEnv) else DummyVecEnv([lambda: env])
        normalized = VecNormalize.load(str(normalizer), vec_env)
    normalized.training = normalized.norm_reward = False
    return normalized


@contextmanager
def _import_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any exception to a CheckpointError that names the file; code in a pickle can raise anything."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{path} cannot be imported: {error}") from error
