"""Replay of logged episodes: the actions that an agent would take at each logged step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.progress import track
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

from rlxf.agents.common.actions import action_encoder as network_encoder
from rlxf.agents.common.actions import to_environment
from rlxf.data import Trajectories, action_encoder, as_trajectories
from rlxf.data.space_comparison import agent_mismatch, space_mismatches
from rlxf.data.spaces import discrete_start
from rlxf.envs.return_to_go import is_return_conditioned
from rlxf.evaluation.agents import (
    check_has_predict,
    has_persistent_memory,
    is_return_conditioned_agent,
    lacks_statistics,
    training_normalizer,
)
from rlxf.evaluation.rollout import selects_rows
from rlxf.evaluation.seeding import seeded_sampling
from rlxf.utils.warnings import warn_user

EPISODES_PER_BATCH = 256
"""Number of episodes that are replayed in parallel."""
MANY_CALLS = 100_000
"""Number of successive calls of ``predict`` above which a replay warns."""
ObservationLoader = Callable[[NDArray[np.int64], int], Any]
"""Maps step indices (B,) in the data and their common time step to observations for ``predict``."""
StepFunction = Callable[[Any, Any, NDArray[np.bool_]], tuple[Tensor, Any]]
"""Maps observation, state and episode starts (B,) to actions (B, ...) as in `Replay` and the next state."""


@dataclass(frozen=True, eq=False)
class Replay:
    """Actions of an agent at the N logged steps, given the logged history of each step.

    Args:
        actions: chosen actions in the format of the data, int64 (N,) for Discrete, (N, n) for MultiDiscrete
            and MultiBinary. For a stochastic agent with known probabilities of Discrete actions the
            probability of each, float32 (N, A). For Box actions scaled to [-1, 1], float32 (N, A).
        probability: float64 (N,), probability of the logged action; None if it is unknown or not defined.
        return_to_go: float64 (N,), target return minus the rewards before each step, in units of the
            rewards; None for agents that are not conditioned on a return.
    """

    actions: Tensor
    probability: NDArray[np.float64] | None
    return_to_go: NDArray[np.float64] | None


def check_replayable(agent: Any, data: Trajectories) -> None:
    """Raise an error unless an agent can act on logged observations.

    Raises:
        TypeError: if the agent has no ``predict``.
        DatasetError: if its spaces differ from those of the data.
        ValueError: if its memory persists across episodes, or the ``VecNormalize`` of its training is
            missing.

    Warns:
        UserWarning: if the episodes are from another version of the environment of its training data.
    """
    check_has_predict(agent)
    _check_spaces(agent, data)
    check_env_id = getattr(agent, "check_env_id", None)  # offline agents know the environment of their data
    if check_env_id is not None:
        for env_id in data.env_ids:
            check_env_id(env_id)
    if has_persistent_memory(agent):
        raise ValueError(
            "logged episodes are replayed with an empty memory, but the memory of this agent persists across "
            "episodes; train with persist_memory_across_episodes=False"
        )
    if lacks_statistics(agent):
        raise ValueError(
            "the agent was trained on observations normalized by VecNormalize, whose statistics are missing: "
            "load it with rlxf.training.load_normalizer(path, env) as env"
        )


def _check_spaces(agent: Any, data: Trajectories) -> None:
    observation, action = (getattr(agent, f"{name}_space", None) for name in ("observation", "action"))
    if observation is None or action is None:  # any object with predict
        return
    if is_return_conditioned(observation):
        observation = observation["observation"]
    if hasattr(agent, "space_mismatches"):
        mismatches = agent.space_mismatches(data.observation_space, data.action_space)
    else:
        mismatches = space_mismatches((data.observation_space, data.action_space), (observation, action))
    for kind, mismatch in mismatches:
        raise agent_mismatch(data.dataset_ids, kind, mismatch)


def replay(
    agent: Any,
    data: Trajectories,
    target_return: float | None = None,
    deterministic: bool = True,
    seed: int = 0,
    progress_bar: bool = False,
) -> Replay:
    """Return the actions that an agent would take at each step of logged episodes.

    The agent observes the logged history: at step t the observations ``s_0 ... s_t``, the logged actions
    ``a_0 ... a_(t-1)`` instead of its own, and for a return-conditioned agent the return-to-go ``G_t = target
    - r_0 - ... - r_(t-1)``. Episodes run in parallel, step by step through ``predict``, `EPISODES_PER_BATCH`
    at a time. Those that ended are left out if the agent's state can select rows.

    Args:
        agent: object with SB3's ``predict``.
        data: logged episodes.
        target_return: G_0 of a return-conditioned agent; None for other agents.
        deterministic: use the most likely actions. If False, probabilities of Discrete actions come from
            ``action_logits`` of the agent or the distribution of SB3's policy; other actions are samples.
        seed: seed of the samples, see `rlxf.evaluation.seeding.seeded_sampling`. The global generators are
            restored afterwards.
        progress_bar: show a progress bar.

    Raises:
        TypeError, DatasetError, ValueError: as `check_replayable`; also ValueError if ``target_return`` is
            missing, or the agent takes none, and DatasetError if trajectories that were not loaded are
            invalid.

    Warns:
        UserWarning: if more than `MANY_CALLS` calls of ``predict`` follow one another without a progress bar.
    """
    as_trajectories(data)
    check_replayable(agent, data)
    if bool(is_return_conditioned_agent(agent)) != (target_return is not None):
        needed = "needs a target_return" if target_return is None else "takes no target_return"
        raise ValueError(f"the agent {needed}: got {target_return}")
    calls = _successive_calls(data)
    if not progress_bar:
        _warn_of_many_calls(calls, data)
    returns = None if target_return is None else logged_return_to_go(data, target_return)
    load = _raw_observations(agent, data) if returns is None else _conditioned(data, returns)
    step = probability_function(agent, data.action_space) if not deterministic else None
    act = step or _predicted(agent, data.action_space, deterministic)
    actions = _empty_actions(data, step is not None)
    with seeded_sampling([agent], seed):
        replayed = _replay_batches(agent, data, load, act)
        for steps, chosen in track(replayed, "replay", calls, disable=not progress_bar):
            actions[torch.from_numpy(steps)] = chosen
    exact = step is not None or (deterministic and not isinstance(data.action_space, spaces.Box))
    probability = probability_of_logged(actions, data) if exact else None
    return Replay(actions, probability, returns)


def _successive_calls(data: Trajectories) -> int:
    """Return the number of calls of ``predict``: the longest episode of each batch determines its calls."""
    return int(np.sort(data.lengths)[::-1][::EPISODES_PER_BATCH].sum())


def _warn_of_many_calls(calls: int, data: Trajectories) -> None:
    """Warn if there are more than `MANY_CALLS` successive calls of ``predict``."""
    if calls > MANY_CALLS:
        warn_user(
            f"the agent is replayed on the logged episodes with {calls:,} calls of predict, one after "
            f"another, since episodes have up to {int(data.lengths.max()):,} steps: pass progress_bar=True "
            f"to follow the replay, or evaluate on shorter episodes"
        )


def _empty_actions(data: Trajectories, has_probabilities: bool) -> Tensor:
    """Return a tensor for the actions of a `Replay`."""
    if has_probabilities or isinstance(data.action_space, spaces.Box):
        return torch.zeros(data.steps, network_encoder(data.action_space).width)
    return torch.zeros(data.actions.shape, dtype=torch.int64)


def probability_of_logged(actions: Tensor, data: Trajectories) -> NDArray[np.float64]:
    """Return the probability (N,) of the logged discrete actions, given the actions of a `Replay`."""
    logged = torch.from_numpy(np.array(data.actions))
    if actions.is_floating_point():
        return actions.gather(1, logged[:, None])[:, 0].double().numpy()
    return (actions == logged).reshape(data.steps, -1).all(dim=1).double().numpy()


def logged_return_to_go(data: Trajectories, target: float) -> NDArray[np.float64]:
    """Compute ``G_t = target - r_0 - ... - r_(t-1)`` for each step, (N,)."""
    rewards = data.rewards.astype(np.float64)
    before = np.cumsum(rewards) - rewards
    return target - (before - np.repeat(before[data.offsets[:-1]], data.lengths))


def _replay_batches(
    agent: Any, data: Trajectories, load: ObservationLoader, act: StepFunction
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield step indices (n,) and actions (n, ...) of all steps."""
    longest_first = np.argsort(-data.lengths, kind="stable")  # so that running episodes are a prefix
    logged = torch.from_numpy(np.array(data.actions))
    for first in range(0, data.episodes, EPISODES_PER_BATCH):
        episodes = longest_first[first : first + EPISODES_PER_BATCH]
        yield from _replay_episodes(agent, data, episodes, logged, load, act)


def _replay_episodes(
    agent: Any,
    data: Trajectories,
    episodes: NDArray[np.int64],
    logged: Tensor,
    load: ObservationLoader,
    act: StepFunction,
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    first, lengths = data.offsets[episodes], data.lengths[episodes]
    observe = getattr(agent, "observe_action", None)
    state: Any = None
    for t in range(int(lengths.max())):
        running = int((lengths > t).sum())
        selects = selects_rows(agent, state)
        rows = running if selects else len(episodes)
        if selects and state is not None and t and running < int((lengths >= t).sum()):
            state = state.rows(torch.arange(rows))
        steps = first[:rows] + np.minimum(t, lengths[:rows] - 1)  # ended episodes repeat their last step
        chosen, state = act(load(steps, t), state, np.full(rows, t == 0))
        if observe is not None:
            state = observe(state, logged[torch.from_numpy(steps)].to(agent.device))
        yield steps[:running], chosen[:running]


def _predicted(agent: Any, space: spaces.Space[Any], deterministic: bool) -> StepFunction:
    """Return a step function with the actions of ``predict``."""
    encode_rows = action_encoder(space)
    scale = network_encoder(space).select(network_encoder(space), nn.Identity())

    def act(observation: Any, state: Any, start: NDArray[np.bool_]) -> tuple[Tensor, Any]:
        actions, state = agent.predict(observation, state, start, deterministic)
        chosen: Tensor = scale(torch.from_numpy(encode_rows(np.asarray(actions))))
        return chosen, state

    return act


def probability_function(agent: Any, space: spaces.Space[Any]) -> StepFunction | None:
    """Return a step function with the probabilities of Discrete actions, or None if the agent has none."""
    if not isinstance(space, spaces.Discrete):
        return None
    if hasattr(agent, "action_logits"):

        def from_logits(observation: Any, state: Any, start: NDArray[np.bool_]) -> tuple[Tensor, Any]:
            logits, state = agent.action_logits(observation, state, start)
            return logits.softmax(dim=-1).float().cpu(), state

        return from_logits
    policy = getattr(agent, "policy", None)
    if getattr(type(policy), "get_distribution", None) is not ActorCriticPolicy.get_distribution:
        return None

    @torch.no_grad()
    def from_distribution(observation: Any, state: Any, start: NDArray[np.bool_]) -> tuple[Tensor, Any]:
        assert isinstance(policy, ActorCriticPolicy)
        policy.set_training_mode(False)
        distribution: Any = policy.get_distribution(policy.obs_to_tensor(observation)[0]).distribution
        return distribution.probs.float().cpu(), state

    return from_distribution


def _raw_observations(agent: Any, data: Trajectories) -> ObservationLoader:
    """Return a loader of observations as the environments of the agent return them."""
    encoder = data.encoder
    normalizer = training_normalizer(agent)

    def load(steps: NDArray[np.int64], t: int) -> Any:
        raw = encoder.decode(data.observations[steps])
        return raw if normalizer is None else normalizer.normalize_obs(raw)

    return load


def _conditioned(data: Trajectories, returns: NDArray[np.float64]) -> ObservationLoader:
    """Return a loader of observations as `rlxf.envs.ReturnToGo` returns them."""
    encoder = data.encoder
    nested = isinstance(data.observation_space, spaces.Dict | spaces.Tuple)
    actions = to_environment(torch.from_numpy(np.array(data.actions)), data.action_space)
    first_action = np.broadcast_to(discrete_start(data.action_space), actions.shape[1:])

    def load(steps: NDArray[np.int64], t: int) -> Any:
        rows = data.observations[steps]
        before = actions[steps - 1] if t else np.repeat(first_action[None], len(steps), axis=0)
        return {
            "observation": rows if nested else encoder.decode(rows),
            "return_to_go": returns[steps, None].astype(np.float32),
            "previous_action": before.astype(actions.dtype),
            "time_step": np.full((len(steps), 1), t),
        }

    return load
