"""Training that goes on from a file, to the same bits as if it had never ended."""

import os
import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.gtrxl import checkpoint
from rlxf.agents.gtrxl.dividing import (
    ENVIRONMENT,
    EPISODES,
    LOST,
    STAND,
    WRAPPERS,
    Groups,
    divided,
    gathered,
)
from rlxf.agents.gtrxl.past import Past
from rlxf.agents.resuming import check_alike, check_resumable, check_unfinished, newest_file
from rlxf.attention import Index, State
from rlxf.envs import resuming
from rlxf.envs.errors import EpisodeLostError
from rlxf.training import Archive
from rlxf.training.described import described
from rlxf.training.randomness import GROUP, generator_states, set_generator_states
from rlxf.training.tensorboard import writes_tensorboard

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO

RUN = "run"
GRADIENTS = "gradients"
"""Tensors of the gradients of the last update, which `HistogramCallback` shows after the next rollout."""
ALIKE = ("policy", "observation_space", "action_space")


def resumption(agent: "GTrXLPPO") -> tuple[dict[str, Any], Groups]:
    """What a file holds for resuming, beside the agent: documents, and tensors by group."""
    env = agent.get_env()
    assert env is not None
    episodes, actions = _episodes(env)
    own = {
        STAND: _stand(agent),
        WRAPPERS: _tensors(resuming.carried(env)),
        EPISODES: _tensors(actions),
    }
    environment, groups = gathered(agent.ranks, episodes, own)
    run = {
        "iterations": agent.iterations,
        "episodes": [{name: float(each[name]) for name in ("r", "l", "t")} for each in _kept(agent)],
        "successes": [float(each) for each in agent.ep_success_buffer or ()],
        "log": _pending(agent.logger),
        ENVIRONMENT: environment,
    }
    groups = {GROUP: generator_states() | {"order": agent.order.get_state()}} | groups
    groups[GRADIENTS] = _gradients(agent)
    return {RUN: run}, {name: group for name, group in groups.items() if group}


def read_run(agent: "GTrXLPPO", path: str | os.PathLike[str], total_timesteps: int) -> Archive:
    """The file of a run that this agent began alike, or could have begun.

    Args:
        agent: with its environments.
        path: of the file, or of a folder of `Checkpoints`.
        total_timesteps: steps that the agent is asked for, those in the file included.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if it is damaged, foreign, or was not written amid a training.
        ValueError: if its settings or spaces differ from the agent's, or it has so many steps already.
    """
    archive = read_alike(agent, path)
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_unfinished(done, total_timesteps, "total_timesteps", newest_file(path))
    return archive


def read_alike(agent: "GTrXLPPO", path: str | os.PathLike[str]) -> Archive:
    """Read a run like `read_run`, even if no steps are left."""
    file = newest_file(path)
    archive = checkpoint.read(file)
    check_resumable(archive, file)
    own, other = checkpoint.describe(agent), archive.documents["agent"]
    check_alike(_compared(own), _compared(other), file)
    return archive


def take_up(agent: "GTrXLPPO", archive: Archive) -> None:
    """Put weights, progress, memory and environments where they were in the file.

    Where the episodes at hand cannot be gone on with, a warning says why, and the environments will be reset.

    Raises:
        CheckpointError: if something does not fit.
        ValueError: if the environment has other wrappers.
    """
    env = agent.get_env()
    assert env is not None
    environment, own = restore(agent, archive)
    with described():
        _take_stand(agent, own[STAND])
    _go_on_or_begin_fresh(agent, env, environment, own[EPISODES])


def restore(agent: "GTrXLPPO", archive: Archive) -> tuple[dict[str, Any], Groups]:
    """Restore weights, progress and statistics from the file.

    Returns:
        The current episodes, and the tensors of this process.

    Raises:
        CheckpointError: if something does not fit.
        ValueError: if the environment has other wrappers.
    """
    env = agent.get_env()
    assert env is not None
    checkpoint.restore(agent, archive)
    with described():
        run = archive.documents[RUN]
        environment, own = divided(agent.ranks, agent.n_envs, run[ENVIRONMENT], archive.tensors)
    resuming.put_back(env, _arrays(own[WRAPPERS]))
    with described():
        agent.iterations = run["iterations"]
        agent.ep_info_buffer = deque(run["episodes"], maxlen=agent._stats_window_size)
        agent.ep_success_buffer = deque(run["successes"], maxlen=agent._stats_window_size)
        _put_gradients(agent, archive.tensors.get(GRADIENTS, {}))
    return environment, own


def go_on(agent: "GTrXLPPO", archive: Archive) -> None:
    """Log and draw from here on as the run in the file would have; to be called last."""
    with described():
        for name, (value, count, excluded) in archive.documents[RUN]["log"].items():
            agent.logger.name_to_value[name] = float.fromhex(value) if isinstance(value, str) else value
            agent.logger.name_to_count[name] = count
            agent.logger.name_to_excluded[name] = tuple(excluded)
        agent.order.set_state(archive.tensors[GROUP]["order"])
    set_generator_states(archive.tensors[GROUP])


def _gradients(agent: "GTrXLPPO") -> dict[str, Tensor]:
    """Return the gradients of the last update if the logger writes TensorBoard events, else {}."""
    if not writes_tensorboard(agent.logger):
        return {}
    named = agent.policy.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _put_gradients(agent: "GTrXLPPO", gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in agent.policy.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)


def _compared(document: Mapping[str, Any]) -> dict[str, Any]:
    return document["settings"] | {name: document[name] for name in ALIKE}


def _kept(agent: "GTrXLPPO") -> list[dict[str, Any]]:
    return list(agent.ep_info_buffer or ())


def _pending(logger: Logger) -> dict[str, Any]:
    """What was recorded and waits for the next line: whole numbers, and others as text that is exact."""
    return {
        name: [_exact(value), logger.name_to_count[name], logger.name_to_excluded[name] or ()]
        for name, value in logger.name_to_value.items()
        if isinstance(value, int | float | np.number)
    }


def _exact(value: Any) -> int | str:
    """A number as JSON can hold it, NaN included."""
    return int(value) if isinstance(value, int | np.integer) else float(value).hex()


def _episodes(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        return resuming.episodes_of(env)
    except EpisodeLostError as error:
        return {LOST: str(error)}, {}


def _go_on_or_begin_fresh(
    agent: "GTrXLPPO", env: VecEnv, document: dict[str, Any], actions: Mapping[str, Tensor]
) -> None:
    """Where one of several processes cannot go on with its episodes, all of them begin fresh ones."""
    own = {LOST: _why_lost(env, document, actions)}
    reasons = [each.documents[LOST] for each in agent.ranks.gathered_archives(Archive(own, {}))]
    if any(reasons):
        _begin_fresh(agent, env, next(filter(None, reasons)))


def _why_lost(env: VecEnv, document: dict[str, Any], actions: Mapping[str, Tensor]) -> str | None:
    """Go on with the episodes at hand, or say why that cannot be done."""
    if LOST in document:
        return str(document[LOST])
    try:
        resuming.go_on(env, document, _arrays(actions))
    except EpisodeLostError as error:
        return str(error)
    return None


def _begin_fresh(agent: "GTrXLPPO", env: VecEnv, reason: str) -> None:
    """New episodes, of seeds that the run has not played."""
    warnings.warn(f"the environments begin fresh episodes, so the bits will differ: {reason}", stacklevel=2)
    agent._last_obs = None
    if agent.seed is not None:
        seeds = np.random.SeedSequence([agent.seed, agent.num_timesteps])
        env.seed(int(seeds.generate_state(1)[0]) + agent.ranks.rows(agent.n_envs).start)


def _stand(agent: "GTrXLPPO") -> dict[str, Tensor]:
    """Where the agent stands: what it saw last, and what it remembers."""
    acting, past = agent._acting, agent.past
    stand = {
        "position": acting.position,
        "episode": acting.episode,
        "action": acting.action,
        "filler": agent._filler,
        "episode_start": torch.as_tensor(agent._last_episode_starts),
    }
    stand |= _state_tensors("memory", agent.rollout_buffer.remembered)
    stand |= {"past.previous": past.previous} | _index_tensors("past", past.index)
    return stand | _named("past.obs", past.obs) | _named("obs", agent._last_obs)


def _take_stand(agent: "GTrXLPPO", stand: Mapping[str, Tensor]) -> None:
    device = agent.device
    there = {name: tensor.to(device) for name, tensor in stand.items()}
    agent._begin_anew()
    acting = agent._acting
    acting.position, acting.episode, acting.action = there["position"], there["episode"], there["action"]
    agent._filler = there["filler"]
    agent._last_episode_starts = stand["episode_start"].numpy()
    agent._last_obs = _unnamed("obs", _arrays(stand))
    agent.rollout_buffer.replace_memory(_state("memory", there))
    agent._past = Past(_unnamed("past.obs", there), there["past.previous"], _index("past", there))


def _index_tensors(name: str, index: Index) -> dict[str, Tensor]:
    return {f"{name}.position": index.position, f"{name}.episode": index.episode}


def _index(name: str, tensors: Mapping[str, Tensor]) -> Index:
    return Index(tensors[f"{name}.position"], tensors[f"{name}.episode"])


def _state_tensors(name: str, state: State) -> dict[str, Tensor]:
    own = {f"{name}.hidden": state.hidden} | _index_tensors(name, state.index)
    return own if state.older is None else own | _state_tensors(f"{name}.older", state.older)


def _state(name: str, tensors: Mapping[str, Tensor]) -> State:
    older = _state(f"{name}.older", tensors) if f"{name}.older.hidden" in tensors else None
    return State(tensors[f"{name}.hidden"], _index(name, tensors), older)


def _named(name: str, obs: Any) -> dict[str, Tensor]:
    """Observations, or the parts of a Dict of them, by name."""
    if isinstance(obs, dict):
        return {f"{name}[{key}]": torch.as_tensor(part) for key, part in obs.items()}
    return {name: torch.as_tensor(obs)}


def _unnamed(name: str, values: Mapping[str, Any]) -> Any:
    if name in values:
        return values[name]
    start = f"{name}["
    return {key[len(start) : -1]: value for key, value in values.items() if key.startswith(start)}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
