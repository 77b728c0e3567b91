"""The one door to pickle: agents of Stable-Baselines3, for whoever trusts those who made them."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from rlxf.agents.devices import check_device
from rlxf.agents.gtrxl.checkpoint import checkpoint_path
from rlxf.agents.gtrxl.settings import as_training_env
from rlxf.agents.sb3_algorithms import algorithm_of, class_of
from rlxf.training import CheckpointError

NORMALIZER = "vecnormalize.pkl"
"""Where the RL Zoo keeps statistics: in a folder beside the agent's file, of the same name."""


def import_sb3(
    path: str | os.PathLike[str],
    trust: bool = False,
    *,
    env: str | Env | VecEnv | VectorEnv | None = None,
    normalizer: str | os.PathLike[str] | None = None,
    algorithm: str | None = None,
    device: torch.device | str = "auto",
) -> BaseAlgorithm:
    """An agent from the file that Stable-Baselines3's or sb3-contrib's ``save`` wrote, to play or to record.

    Such a file holds pickles: loading it runs whatever code is in them, with all that you may do on this
    machine. Nothing else in rlxf opens it. `collect` records the agent into a dataset, `evaluate` plays its
    episodes; both show it normalised observations where it was trained on such.

    Args:
        path: the file; ".zip" is added if it has no suffix, as in SB3.
        trust: that you trust whoever made the file, and that of ``normalizer``. Without, neither is opened.
        env: what it is to play in, or the id of it: its spaces are compared. None: it only predicts.
        normalizer: file of SB3's ``VecNormalize`` with the statistics under which the agent saw ``env``;
            the RL Zoo's is ``NAME/vecnormalize.pkl`` beside ``NAME.zip``. They stay as they are, and rewards
            are not scaled. None: it saw raw observations.
        algorithm: name as in the RL Zoo: a2c, ddpg, dqn, ppo, sac, td3; with sb3-contrib ars, crossq,
            ppo_lstm (RecurrentPPO), ppo_mask, qrdqn, tqc, trpo. None: the file tells, by its settings.
        device: where tensors live.

    Returns:
        The agent, of the algorithm's own class.

    Raises:
        ValueError: if it is not trusted, the algorithm is not known, ``normalizer`` comes without ``env``, or
            there is no such device.
        FileNotFoundError: if there is no such file.
        CheckpointError: if a file is damaged, of something else, or does not fit ``env``.
        ImportError: if sb3-contrib is needed and not installed.

    Warns:
        UserWarning: if the RL Zoo's statistics lie beside the file and none are passed.
    """
    check_device(device)
    path = checkpoint_path(path)
    _check_trusted(path, trust)
    _check_normalizer(path, env is not None, normalizer)
    with _naming(path):
        name = algorithm or algorithm_of(path)
    found = class_of(name)
    vec_env = _normalised(as_training_env(env, 1, None), normalizer)
    with _naming(path):
        return found.load(path, env=vec_env, device=device)


def _check_trusted(path: Path, trust: bool) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; check the path")
    if trust is not True:  # no other value that only looks like a yes
        raise ValueError(
            f"{path} is not opened: Stable-Baselines3 keeps pickles in its files, and loading them runs "
            f"whatever code they hold. If you trust whoever made it, pass trust=True"
        )


def _check_normalizer(path: Path, has_env: bool, normalizer: str | os.PathLike[str] | None) -> None:
    beside = path.with_suffix("") / NORMALIZER
    if normalizer is None and beside.is_file():
        warnings.warn(
            f"{beside} lies beside {path}: the agent was trained on normalised observations, and is shown "
            f"raw ones; pass normalizer={str(beside)!r}",
            stacklevel=3,
        )
    if normalizer is not None and not has_env:
        raise ValueError(f"normalizer {normalizer} is of observations of an environment: pass env, too")


def _normalised(env: Env | VecEnv | None, normalizer: str | os.PathLike[str] | None) -> Env | VecEnv | None:
    if normalizer is None or env is None:
        return env
    if not Path(normalizer).is_file():
        raise FileNotFoundError(f"there is no file {normalizer}; check the path of the normalizer")
    with _naming(normalizer):
        vec_env = env if isinstance(env, VecEnv) else DummyVecEnv([lambda: env])
        normalised = VecNormalize.load(str(normalizer), vec_env)
    normalised.training = normalised.norm_reward = False
    return normalised


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong is told with the file: what runs from a pickle can raise anything."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{path} cannot be imported: {error}") from error
