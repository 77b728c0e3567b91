"""Saved state of online fine-tuning: replay buffer, current episodes and progress of the rounds."""

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.decision_transformer.resuming import read_alike
from rlxf.agents.resuming import check_alike, check_unfinished, newest_file
from rlxf.envs import resuming
from rlxf.envs.errors import EpisodeLostError
from rlxf.training import Archive, CheckpointError
from rlxf.training.described import described

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer
    from rlxf.agents.decision_transformer.rounds import Rounds

ONLINE = "online"
"""Name of the JSON document in a checkpoint."""
WRAPPERS, EPISODES, COLLECTOR, REPLAY = "wrappers", "episodes", "collector", "replay"
"""Names of the groups of tensors in a checkpoint."""
LOST = "lost"


def online_state(rounds: "Rounds") -> Archive:
    """Return the state, in addition to the agent, that `learn_online` needs to continue."""
    env = rounds.collector.env
    document: dict[str, Any] = {"options": rounds.options, "finished": rounds.finished}
    document["rounds"] = rounds.state()
    actions: Mapping[str, NDArray[Any]] = {}
    try:
        document["environment"], actions = resuming.episodes_of(env)
    except EpisodeLostError as error:
        document["environment"] = {LOST: str(error)}
    groups = {
        WRAPPERS: resuming.carried(env),
        EPISODES: actions,
        COLLECTOR: rounds.collector.arrays(),
        REPLAY: rounds.replay.arrays(),
    }
    tensors = {name: _tensors(group) for name, group in groups.items() if group}
    return Archive({ONLINE: document}, tensors)


def read_online_run(
    agent: "DecisionTransformer", path: str | os.PathLike[str], steps: int, options: dict[str, Any]
) -> Archive:
    """Read a checkpoint that `learn_online` wrote for an agent with the same settings and data.

    Args:
        agent: agent with its dataset.
        path: path of the file, or of a folder of `Checkpoints`.
        steps: requested total number of steps, including those in the file.
        options: options of `learn_online` that affect the result.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, of another format, or was not written during `learn_online`.
        ResumeError: if settings, data or options differ, or the run has reached ``steps`` already.
    """
    file = newest_file(path)
    archive = read_alike(agent, file)
    if ONLINE not in archive.documents:
        raise CheckpointError(
            f"{file} was not written during learn_online: load it, and call learn_online without resume_from"
        )
    with described():
        options_of_run, finished = (archive.documents[ONLINE][name] for name in ("options", "finished"))
        done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_alike(options, options_of_run, file)
    if finished:  # else updates may be left after the last step
        check_unfinished(done, steps, "steps", file)
    return archive


def load_online_state(rounds: "Rounds", archive: Archive) -> None:
    """Restore replay buffer, rounds and environments from a checkpoint.

    If the current episodes cannot be continued, a warning gives the reason and the environments are reset.

    Raises:
        CheckpointError: if the checkpoint does not match the run.
        ValueError: if the environment has other wrappers.
    """
    document, groups = archive.documents[ONLINE], archive.tensors
    env, collector = rounds.collector.env, rounds.collector
    with described():
        rounds.load_state(document["rounds"])
        rounds.replay.load_arrays(_arrays(groups.get(REPLAY, {})), document["rounds"]["added"])
        collector.load_arrays(_arrays(groups[COLLECTOR]), rounds.agent.device)
    resuming.put_back(env, _arrays(groups.get(WRAPPERS, {})))
    lost = _why_lost(env, document["environment"], _arrays(groups.get(EPISODES, {})))
    if lost is not None:
        warnings.warn(
            f"the environments are reset, so results will not be bitwise equal to those of the uninterrupted "
            f"run: {lost}",
            stacklevel=3,
        )
        collector.forget()
        _reseed(env, rounds.agent)


def _why_lost(env: VecEnv, document: Mapping[str, Any], actions: Mapping[str, NDArray[Any]]) -> str | None:
    """Continue the current episodes, or return the reason why that is impossible."""
    if LOST in document:
        return str(document[LOST])
    try:
        resuming.go_on(env, document, actions)
    except EpisodeLostError as error:
        return str(error)
    return None


def _reseed(env: VecEnv, agent: "DecisionTransformer") -> None:
    """Seed the environments such that new episodes differ from those already collected."""
    if agent.seed is not None:
        seeds = np.random.SeedSequence([agent.seed, agent.num_timesteps])
        env.seed(int(seeds.generate_state(1)[0]))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
