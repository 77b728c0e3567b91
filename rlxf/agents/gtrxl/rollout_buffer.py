"""Rollout buffer of segments with their memory; hidden states are stored once, windows are views."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.numerics import ADVICE
from rlxf.agents.gtrxl.gae import generalized_advantage_estimate
from rlxf.agents.gtrxl.rollout_memory import RecentSteps, StateBuffer, map_obs
from rlxf.attention import State, TokenIndex, TransformerSpec
from rlxf.attention.token_index import EMPTY
from rlxf.training import NumericalError
from rlxf.training.distributed.group import ProcessGroup


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Minibatch of B segments of T steps, with their N = B T steps flattened.

    Args:
        obs: N observations.
        previous: (N, A), the encoded previous actions.
        actions: (N, ...), actions taken in the rollout.
        log_probs: (N,), log probabilities of the actions in the rollout.
        values: (N,), value estimates in the rollout.
        advantages: (N,), advantage estimates.
        returns: (N,), targets of the values.
        weight: (N,), 1 for a step to train on, 0 for a filler row.
        index: (B, T), positions and episodes of the steps.
        state: memory before each segment.
    """

    obs: PyTorchObs
    previous: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weight: Tensor
    index: TokenIndex
    state: State


@dataclass(frozen=True, eq=False)
class RolloutStep:
    """Step of the policy in E environments, without its results.

    Args:
        obs: E observations.
        previous: (E, A), the encoded previous actions.
        index: (E, 1), positions and episodes of the step.
        hidden: (L, E, C), the inputs of each layer.
        actions: (E, ...), as sampled.
        values: (E,), value estimates.
        log_probs: (E,), log probabilities of the actions.
    """

    obs: PyTorchObs
    previous: Tensor
    index: TokenIndex
    hidden: Tensor
    actions: Tensor
    values: Tensor
    log_probs: Tensor


class SegmentBuffer:
    """Rollout buffer for E environments, which includes the memory of M steps before the rollout.

    The inputs of each layer are stored once for every step: (L, E, M + steps, C). The memory of a segment
    that begins at step s is the slice [s, s + M) of it, a view. Older steps that one layer reads, as
    with `KNN` memory, are stored separately, once.

    Args:
        observation_space: observation space of an environment.
        action_space: action space of an environment.
        core: specification of the transformer.
        encoded_action_width: size A of an encoded action.
        n_envs: environments E.
        n_steps: steps of a rollout; a multiple of ``segment_length``.
        segment_length: steps T through which gradients flow.
        device: device of the buffer.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        core: TransformerSpec,
        encoded_action_width: int,
        n_envs: int,
        n_steps: int,
        segment_length: int,
        device: torch.device,
    ):
        assert core.memory is not None
        self.n_envs, self.n_steps, self.segment_length = n_envs, n_steps, segment_length
        self.memory_length = core.memory.length
        self.obs = _empty_observations(observation_space, (n_envs, n_steps), device)
        self.previous = torch.zeros(n_envs, n_steps, encoded_action_width, device=device)
        self.actions = _empty_actions(action_space, (n_envs, n_steps), device)
        self.rewards, self.values, self.log_probs, self.advantages, self.returns = (
            torch.zeros(n_envs, n_steps, device=device) for _ in range(5)
        )
        self.dones = torch.zeros(n_envs, n_steps, dtype=torch.bool, device=device)
        sizes = core.width, n_envs, n_steps, device
        self.recent = StateBuffer(core.layers, self.memory_length, *sizes)
        self._older_layer = core.memory.older_layer(core.layers)
        older_length = core.memory.holds - self.memory_length
        self.older = None if self._older_layer is None else StateBuffer(1, older_length, *sizes)
        self.step = 0

    def inputs(self, steps: slice) -> RecentSteps:
        """Return the inputs of some steps of the rollout, as views."""
        obs = map_obs(lambda x: x[:, steps], self.obs)
        return RecentSteps(obs, self.previous[:, steps], self.steps_index.at(steps))

    @property
    def hidden(self) -> Tensor:
        """Inputs of each layer at the last M steps and at the steps of the rollout, (L, E, M + steps, C)."""
        return self.recent.hidden

    @property
    def index(self) -> TokenIndex:
        """Positions and episodes of the last M steps and of the steps of the rollout, (E, M + steps)."""
        return self.recent.index

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        steps = [self.previous, self.actions, self.rewards, self.values, self.log_probs]
        steps += [self.advantages, self.returns, self.dones, *_parts(self.obs)]
        older = 0 if self.older is None else self.older.nbytes
        return sum(tensor.nbytes for tensor in steps) + self.recent.nbytes + older

    @property
    def weight(self) -> Tensor:
        """Weights (E, steps): 1 for a step to train on, 0 for a filler row."""
        return (self.index.episode[:, self.memory_length :] != EMPTY).to(self.rewards.dtype)

    @property
    def steps_index(self) -> TokenIndex:
        """Positions and episodes of the steps of the rollout, (E, steps)."""
        return self.index.at(slice(self.memory_length, None))

    @property
    def filled(self) -> float:
        """Share of the memory at the end of the rollout that belongs to the current episode."""
        episode = self.index.episode[:, self.step :]
        return ((episode == episode[:, -1:]) & (episode != EMPTY)).float().mean().item()

    def clear_memory(self) -> None:
        """Clear the memory before the next rollout."""
        self.recent.clear()
        if self.older is not None:
            self.older.clear()
        self.step = 0

    def _state(self, select: Callable[[StateBuffer], State]) -> State:
        """Return the selected states of the last M steps, with those of older steps, if they are stored."""
        older = None if self.older is None else select(self.older)
        return replace(select(self.recent), older=older)

    @property
    def memory(self) -> State:
        """Memory at the start of the next rollout: the last M steps, as views."""
        return self._state(lambda states: states.before(self.step))

    def start_rollout(self) -> State:
        """Start a new rollout, and return its memory: the last M steps of the previous rollout."""
        steps, self.step = self.step, 0
        return self._state(lambda states: states.start_rollout(steps))

    def replace_memory(self, state: State) -> None:
        """Replace the memory before the rollout, M steps."""
        self.recent.replace_memory(state)
        if self.older is not None and state.older is not None:
            self.older.replace_memory(state.older)

    def add(self, step: RolloutStep, rewards: Tensor, dones: Tensor, index: TokenIndex) -> None:
        """Store one step of all environments.

        Args:
            step: the step of the policy.
            rewards: (E,).
            dones: (E,) bool, whether the step ended its episode.
            index: (E, 1), position and episode; episode -1 for filler rows and crashed environments.
        """
        for stored, new in zip(_parts(self.obs), _parts(step.obs), strict=True):
            stored[:, self.step] = new
        for name in ("previous", "actions", "values", "log_probs"):
            getattr(self, name)[:, self.step] = getattr(step, name)
        self.rewards[:, self.step], self.dones[:, self.step] = rewards, dones
        if self.older is not None and self._older_layer is not None:
            leaving = self.recent.before(self.step).at(slice(1))
            self.older.add(self.step, leaving.hidden[self._older_layer, None, :, 0], leaving.index)
        self.recent.add(self.step, step.hidden, index)
        self.step += 1

    def finish(self, next_values: Tensor, gamma: float, gae_lambda: float, critic_lambda: float) -> None:
        """Compute advantages and returns.

        Args:
            next_values: (E,), values of the observations after the last step.
            gamma: discount factor.
            gae_lambda: lambda of the advantages.
            critic_lambda: lambda of the returns, ``G_t = A_t(critic_lambda) + V(s_t)``.
        """
        rewards, values, dones = self.rewards.T, self.values.T, self.dones.T
        steps = rewards, values, next_values, dones, gamma
        self.advantages.copy_(generalized_advantage_estimate(*steps, gae_lambda).T)
        self.returns.copy_(generalized_advantage_estimate(*steps, critic_lambda).T + self.values)

    def check_finite(self, environments: Sequence[int]) -> None:
        """Raise NumericalError unless all advantages and returns are finite.

        Args:
            environments: numbers of the E environments, for the message.
        """
        for name, numbers in {"advantage": self.advantages, "return": self.returns}.items():
            if not numbers.isfinite().all():
                row, step = (~numbers.isfinite()).nonzero()[0].tolist()
                value = numbers[row, step].item()
                raise NumericalError(
                    f"the {name} of environment {environments[row]} is {value} at step {step} of the "
                    f"rollout: its values or rewards are too large; {ADVICE}"
                )

    def minibatches(
        self, segments: int, advantages: Tensor, generator: torch.Generator, ranks: ProcessGroup
    ) -> Iterator[SegmentBatch]:
        """Yield all segments once in random order, in minibatches of ``segments``.

        The segments of all processes are shuffled together. Each process yields its own segments of a
        minibatch, so their number varies. A process without a segment in a minibatch yields one of weight 0.

        Args:
            segments: segments in a minibatch of all processes; the last minibatch may have fewer.
            advantages: (E, steps), normalized if required.
            generator: generator of the order, with the same state in all processes.
            ranks: the process group; all processes have the same number of environments.
        """
        number = self.n_envs * self._per_environment
        for chosen in _shuffled(number * ranks.world_size, segments, generator):
            own = ranks.local_indices(chosen, number).to(self.hidden.device)
            yield self.segments(own, advantages) if len(own) else self._of_no_weight(advantages)

    def _of_no_weight(self, advantages: Tensor) -> SegmentBatch:
        first = self.segments(torch.zeros(1, dtype=torch.long, device=self.hidden.device), advantages)
        return replace(first, weight=torch.zeros_like(first.weight))

    def shuffled(self, segments: int, generator: torch.Generator) -> Sequence[Tensor]:
        """Return the numbers of all segments in random order, in minibatches of ``segments``."""
        number = self.n_envs * self._per_environment
        return [chosen.to(self.hidden.device) for chosen in _shuffled(number, segments, generator)]

    def segments(self, chosen: Tensor, advantages: Tensor) -> SegmentBatch:
        """Return the segments with numbers ``chosen`` (B,), counted environment by environment."""
        rows = partial(self.rows, chosen=chosen)
        environment, number = chosen // self._per_environment, chosen % self._per_environment
        steps = self.steps_index.position, self.steps_index.episode
        return SegmentBatch(
            obs=map_obs(rows, self.obs),
            previous=rows(self.previous),
            actions=rows(self.actions),
            log_probs=rows(self.log_probs),
            values=rows(self.values),
            advantages=rows(advantages),
            returns=rows(self.returns),
            weight=rows(self.weight),
            index=TokenIndex(*(rows(x).unflatten(0, (-1, self.segment_length)) for x in steps)),
            state=self._state(lambda x: x.before_segments(environment, number, self.segment_length)),
        )

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the steps of the chosen segments (B,) of x (E, steps, ...), flattened: (B T, ...)."""
        return x.unflatten(1, (-1, self.segment_length)).flatten(0, 1)[chosen].flatten(0, 1)

    @property
    def _per_environment(self) -> int:
        return self.n_steps // self.segment_length


def _shuffled(number: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Return the integers below ``number`` in random order, in batches of ``size``."""
    return torch.randperm(number, generator=generator).split(size)


def _parts(obs: PyTorchObs) -> list[Tensor]:
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def _empty_observations(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> PyTorchObs:
    if isinstance(space, spaces.Dict):
        return {key: _empty_like(part, batch, device) for key, part in space.spaces.items()}
    return _empty_like(space, batch, device)


def _empty_actions(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros in the format of SB3's distributions: Box actions flattened, discrete ones as int64."""
    whole = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    dtype = torch.long if whole else torch.float32
    shape = (spaces.utils.flatdim(space),) if isinstance(space, spaces.Box) else space.shape
    return torch.zeros(*batch, *shape, dtype=dtype, device=device)  # type: ignore[misc]


def _empty_like(space: spaces.Space, batch: tuple[int, int], device: torch.device) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return torch.zeros(*batch, *(space.shape or ()), dtype=dtype, device=device)
