"""State of online fine-tuning in a file: replay, current episodes, and the position in the rounds."""

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
"""Name of the document in a file."""
WRAPPERS, EPISODES, COLLECTOR, REPLAY = "wrappers", "episodes", "collector", "replay"
"""Names of groups of tensors in a file."""
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
    """Read the file of a `learn_online` with the settings of this agent.

    Args:
        agent: with its data.
        path: of the file, or of a folder of `Checkpoints`.
        steps: requested steps, including those in the file.
        options: those of `learn_online` that change what is learned.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, foreign, or was not written during a `learn_online`.
        ResumeError: if settings, data or options differ, or it has so many steps already.
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
    """Restore replay, rounds and environments from the file.

    If the current episodes cannot be continued, a warning gives the reason and fresh ones begin.

    Raises:
        CheckpointError: if something does not fit.
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
        warnings.warn(f"the environments begin fresh episodes, so the bits will differ: {lost}", stacklevel=3)
        collector.forget()
        _seed_anew(env, rounds.agent)


def _why_lost(env: VecEnv, document: Mapping[str, Any], actions: Mapping[str, NDArray[Any]]) -> str | None:
    """Continue the current episodes, or return the reason why that is impossible."""
    if LOST in document:
        return str(document[LOST])
    try:
        resuming.go_on(env, document, actions)
    except EpisodeLostError as error:
        return str(error)
    return None


def _seed_anew(env: VecEnv, agent: "DecisionTransformer") -> None:
    """Seed the environments for new episodes that the run has not played."""
    if agent.seed is not None:
        seeds = np.random.SeedSequence([agent.seed, agent.num_timesteps])
        env.seed(int(seeds.generate_state(1)[0]))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
