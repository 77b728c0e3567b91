"""Exact resumption of a training run from a file, bit for bit."""

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

from rlxf.agents.common.checkpoint import (
    check_resumable,
    check_same_settings,
    check_unfinished,
    newest_checkpoint_file,
)
from rlxf.agents.gtrxl import checkpoint
from rlxf.agents.gtrxl.memory_recompute import RecentSteps
from rlxf.agents.gtrxl.state_sharding import (
    AGENT_STATE,
    ENVIRONMENT,
    EPISODES,
    LOST,
    WRAPPERS,
    Groups,
    gather_state,
    shard_state,
)
from rlxf.attention import State, TokenIndex
from rlxf.envs import resume
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors
from rlxf.training.resumed_logger import writes_tensorboard
from rlxf.training.state_checks import RNG_GROUP, get_rng_states, set_rng_states
from rlxf.utils.errors import EpisodeLostError

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


RUN = "run"
GRADIENTS = "gradients"
"""Tensor group of the last update's gradients, which `HistogramCallback` logs after the next rollout."""
MATCHING_FIELDS = ("policy", "observation_space", "action_space")


def resume_state(agent: "GTrXLPPO") -> tuple[dict[str, Any], Groups]:
    """Return the documents and tensor groups that a file needs for resumption in addition to the agent."""
    env = agent.get_env()
    assert env is not None
    episodes, actions = _episodes(env)
    own = {
        AGENT_STATE: _agent_state(agent),
        WRAPPERS: _tensors(resume.wrapper_state(env)),
        EPISODES: _tensors(actions),
    }
    environment, groups = gather_state(agent.ranks, episodes, own)
    run = {
        "iterations": agent.iterations,
        "episodes": [{name: float(each[name]) for name in ("r", "l", "t")} for each in _recent(agent)],
        "successes": [float(each) for each in agent.ep_success_buffer or ()],
        "log": _pending(agent.logger),
        ENVIRONMENT: environment,
    }
    groups = {RNG_GROUP: get_rng_states() | {"order": agent.order.get_state()}} | groups
    groups[GRADIENTS] = _gradients(agent)
    return {RUN: run}, {name: group for name, group in groups.items() if group}


def read_run(agent: "GTrXLPPO", path: str | os.PathLike[str], total_timesteps: int) -> Archive:
    """Read the file of a training run with the same settings as the agent.

    Args:
        agent: the agent with its environments.
        path: path of the file, or of a folder of `CheckpointWriter`.
        total_timesteps: total steps to train for, including those in the file.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if the file is damaged, has other contents, or was not written by `CheckpointWriter`.
        ValueError: if settings or spaces differ from the agent's, or the run has ``total_timesteps`` already.
    """
    archive = read_matching_run(agent, path)
    done = archive.documents["agent"]["progress"]["num_timesteps"]
    check_unfinished(done, total_timesteps, "total_timesteps", newest_checkpoint_file(path))
    return archive


def read_matching_run(agent: "GTrXLPPO", path: str | os.PathLike[str]) -> Archive:
    """Read a file like `read_run`, without a check of its steps."""
    file = newest_checkpoint_file(path)
    archive = checkpoint.read_checkpoint(file)
    check_resumable(archive, file)
    own, other = checkpoint.describe(agent), archive.documents["agent"]
    check_same_settings(_compared(own), _compared(other), file)
    return archive


def load_state(agent: "GTrXLPPO", archive: Archive) -> None:
    """Restore weights, progress, memory and environments from the file.

    If the current episodes cannot be restored, a warning names the reason, and the environments will be
    reset.

    Raises:
        CheckpointError: if the contents do not fit the agent.
        ValueError: if the environments have other wrappers.
    """
    env = agent.get_env()
    assert env is not None
    environment, own = restore(agent, archive)
    with checkpoint_errors():
        _load_state(agent, own[AGENT_STATE])
    _resume_or_reset(agent, env, environment, own[EPISODES])


def restore(agent: "GTrXLPPO", archive: Archive) -> tuple[dict[str, Any], Groups]:
    """Restore weights, progress and statistics from the file.

    Returns:
        The document of the current episodes, and the tensors of this process.

    Raises:
        CheckpointError: if the contents do not fit the agent.
        ValueError: if the environments have other wrappers.
    """
    env = agent.get_env()
    assert env is not None
    checkpoint.restore(agent, archive)
    with checkpoint_errors():
        run = archive.documents[RUN]
        environment, own = shard_state(agent.ranks, agent.n_envs, run[ENVIRONMENT], archive.tensors)
    resume.load_wrapper_state(env, _arrays(own[WRAPPERS]))
    with checkpoint_errors():
        agent.iterations = run["iterations"]
        agent.ep_info_buffer = deque(run["episodes"], maxlen=agent._stats_window_size)
        agent.ep_success_buffer = deque(run["successes"], maxlen=agent._stats_window_size)
        _put_gradients(agent, archive.tensors.get(GRADIENTS, {}))
    return environment, own


def restore_generators(agent: "GTrXLPPO", archive: Archive) -> None:
    """Restore pending log values and random number generators; must be called last."""
    with checkpoint_errors():
        for name, (value, count, excluded) in archive.documents[RUN]["log"].items():
            agent.logger.name_to_value[name] = float.fromhex(value) if isinstance(value, str) else value
            agent.logger.name_to_count[name] = count
            agent.logger.name_to_excluded[name] = tuple(excluded)
        agent.order.set_state(archive.tensors[RNG_GROUP]["order"])
    set_rng_states(archive.tensors[RNG_GROUP])


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
    return document["settings"] | {name: document[name] for name in MATCHING_FIELDS}


def _recent(agent: "GTrXLPPO") -> list[dict[str, Any]]:
    return list(agent.ep_info_buffer or ())


def _pending(logger: Logger) -> dict[str, Any]:
    """Return the recorded values before the next log line: integers, and floats as exact hexadecimal text."""
    return {
        name: [_exact(value), logger.name_to_count[name], logger.name_to_excluded[name] or ()]
        for name, value in logger.name_to_value.items()
        if isinstance(value, int | float | np.number)
    }


def _exact(value: Any) -> int | str:
    """Return a number in an exact JSON format that includes NaN."""
    return int(value) if isinstance(value, int | np.integer) else float(value).hex()


def _episodes(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        return resume.episode_state(env)
    except EpisodeLostError as error:
        return {LOST: str(error)}, {}


def _resume_or_reset(
    agent: "GTrXLPPO", env: VecEnv, document: dict[str, Any], actions: Mapping[str, Tensor]
) -> None:
    """Resume the current episodes; if a process cannot, all processes start new episodes."""
    own = {LOST: _resume_episodes(env, document, actions)}
    reasons = [each.documents[LOST] for each in agent.ranks.gather_archives(Archive(own, {}))]
    if any(reasons):
        _start_new_episodes(agent, env, next(filter(None, reasons)))


def _resume_episodes(env: VecEnv, document: dict[str, Any], actions: Mapping[str, Tensor]) -> str | None:
    """Resume the current episodes; return the reason if that is impossible, else None."""
    if LOST in document:
        return str(document[LOST])
    try:
        resume.resume_episodes(env, document, _arrays(actions))
    except EpisodeLostError as error:
        return str(error)
    return None


def _start_new_episodes(agent: "GTrXLPPO", env: VecEnv, reason: str) -> None:
    """Start new episodes with seeds that the run has not used."""
    warnings.warn(
        f"the environments start new episodes, so the resumed run is not bit-identical: {reason}",
        stacklevel=2,
    )
    agent._last_obs = None
    if agent.seed is not None:
        seeds = np.random.SeedSequence([agent.seed, agent.num_timesteps])
        env.seed(int(seeds.generate_state(1)[0]) + agent.ranks.rows(agent.n_envs).start)


def _agent_state(agent: "GTrXLPPO") -> dict[str, Tensor]:
    """Return the agent's state between rollouts: last observations, recurrent state and memory."""
    acting, past = agent._acting, agent.recent_steps
    state = {
        "position": acting.position,
        "episode": acting.episode,
        "action": acting.action,
        "filler": agent._filler,
        "episode_start": torch.as_tensor(agent._last_episode_starts),
    }
    state |= _state_tensors("memory", agent.rollout_buffer.memory)
    state |= {"past.previous": past.previous} | _index_tensors("past", past.index)
    return state | _named("past.obs", past.obs) | _named("obs", agent._last_obs)


def _load_state(agent: "GTrXLPPO", state: Mapping[str, Tensor]) -> None:
    device = agent.device
    on_device = {name: tensor.to(device) for name, tensor in state.items()}
    agent._reset_memory()
    acting = agent._acting
    acting.position, acting.episode = on_device["position"], on_device["episode"]
    acting.action = on_device["action"]
    agent._filler = on_device["filler"]
    agent._last_episode_starts = state["episode_start"].numpy()
    agent._last_obs = _unnamed("obs", _arrays(state))
    agent.rollout_buffer.replace_memory(_state("memory", on_device))
    obs = _unnamed("past.obs", on_device)
    agent._past = RecentSteps(obs, on_device["past.previous"], _index("past", on_device))


def _index_tensors(name: str, index: TokenIndex) -> dict[str, Tensor]:
    return {f"{name}.position": index.position, f"{name}.episode": index.episode}


def _index(name: str, tensors: Mapping[str, Tensor]) -> TokenIndex:
    return TokenIndex(tensors[f"{name}.position"], tensors[f"{name}.episode"])


def _state_tensors(name: str, state: State) -> dict[str, Tensor]:
    own = {f"{name}.hidden": state.hidden} | _index_tensors(name, state.index)
    return own if state.older is None else own | _state_tensors(f"{name}.older", state.older)


def _state(name: str, tensors: Mapping[str, Tensor]) -> State:
    older = _state(f"{name}.older", tensors) if f"{name}.older.hidden" in tensors else None
    return State(tensors[f"{name}.hidden"], _index(name, tensors), older)


def _named(name: str, obs: Any) -> dict[str, Tensor]:
    """Return observations, or the entries of Dict observations, by name."""
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
