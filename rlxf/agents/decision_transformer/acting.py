"""Acting with a Decision Transformer: observations, context window, predictions, datastores."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.progress import track
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from rlxf.agents.common.actions import to_environment
from rlxf.agents.common.arguments import MissingStateWarning
from rlxf.agents.common.calibration import CalibrationMixin, reset_calibration
from rlxf.agents.common.retrieval import DatastoreMixin, RetrievalPolicy, check_no_datastore
from rlxf.agents.decision_transformer.heads import Head
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.algorithm import OfflineAlgorithm
from rlxf.agents.offline.config import DatasetInfo
from rlxf.agents.offline.trajectory_model import ContextWindow
from rlxf.attention.heads.base import Datastore
from rlxf.data import Trajectories, Windows, action_encoder, observation_encoder
from rlxf.envs.wrappers import KEYS, encoded_observation_space
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors
from rlxf.utils.errors import FaultyEnvironmentError, RowError


@dataclass(frozen=True, eq=False)
class ConditionedObservation:
    """Return-conditioned observations of E environments at one step, in the encoding of the dataset.

    Args:
        observations: encoded observations, (E, D) or (E, C, H, W).
        return_to_go: (E,) float32.
        previous_action: (E, ...), in the encoding of the dataset.
        time_steps: (E,) int64.
        batched: False if the observation was of a single environment, without a batch axis.
    """

    observations: Tensor
    return_to_go: Tensor
    previous_action: Tensor
    time_steps: Tensor
    batched: bool

    @classmethod
    def encode(
        cls, observation: Any, dataset_info: DatasetInfo, device: torch.device
    ) -> "ConditionedObservation":
        """Encode an observation of a `ReturnToGo` wrapper, of a single environment or of E environments.

        Raises:
            TypeError: if ``observation`` is not a mapping with the keys of `ReturnToGo`.
            ValueError: if its shape differs from that of the dataset.
            FaultyEnvironmentError: if a number in it is NaN or infinite.
        """
        _check_keys(observation)
        batched = np.ndim(observation["return_to_go"]) == 2
        axis = ... if batched else None
        parts = {key: np.asarray(value)[axis] for key, value in observation.items()}
        return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
        if not np.isfinite(return_to_go).all():
            row = int(np.argmin(np.isfinite(return_to_go)))
            raise FaultyEnvironmentError(f"the return to go of environment {row} is {return_to_go[row]}")
        actions, tensor = action_encoder(dataset_info.action_space), partial(torch.as_tensor, device=device)
        return cls(
            observations=tensor(encode_observations(parts["observation"], dataset_info)),
            return_to_go=tensor(return_to_go),
            previous_action=tensor(actions(parts["previous_action"])),
            time_steps=tensor(parts["time_step"].reshape(-1).astype(np.int64)),
            batched=batched,
        )

    def episode_starts(self, episode_start: Any) -> Tensor:
        """Return a mask (E,) of the environments at the first step of an episode.

        An environment is at the first step if its time step is 0 or ``episode_start`` is True.

        Raises:
            ValueError: if ``episode_start`` does not have shape (E,).
        """
        first = self.time_steps == 0
        if episode_start is None:
            return first
        given = torch.as_tensor(np.atleast_1d(episode_start), dtype=torch.bool, device=first.device)
        if given.shape != first.shape:
            raise ValueError(
                f"episode_start must have shape ({len(first)},), one value per environment, "
                f"got {tuple(given.shape)}"
            )
        return first | given


@torch.no_grad()
def extend_context(
    model: DecisionTransformerModel,
    state: ContextWindow | None,
    encoded: ConditionedObservation,
    start: Tensor,
    length: int,
) -> ContextWindow:
    """Append a step to a context window.

    Args:
        model: model with the feature extractor.
        state: window of the previous steps; None for an empty one.
        encoded: the new step.
        start: (E,) bool, environments at the first step of an episode, whose window is cleared first.
        length: number of steps of an empty window.

    Raises:
        TypeError: if the state is not a context window.
        ValueError: if the window is of another agent, device, or number of environments.
    """
    empty = _empty_context(model, encoded, length)
    if state is None:
        state = empty
    else:
        check_context(state, empty)
    features = model.features(encoded.observations[:, None])[:, 0]
    return state.clear_rows(start).append(
        features, encoded.previous_action, encoded.return_to_go, encoded.time_steps
    )


def check_context(state: ContextWindow, empty: ContextWindow) -> None:
    """Raise an error unless a state passed to `predict` fits the agent and the observation.

    Args:
        state: the state.
        empty: an empty context window of the agent for these environments.

    Raises:
        TypeError: if the state is not a context window.
        ValueError: if the window is of another agent, device, or number of environments.
    """
    advice = "pass state=None to start with an empty context"
    if not isinstance(state, ContextWindow):
        raise TypeError(f"state must be one that predict returned, got {type(state).__name__}; {advice}")
    rows, expected = len(state.mask), len(empty.mask)
    if rows != expected:
        raise ValueError(f"the state is of {rows} environments, the observation of {expected}; {advice}")
    if state.mask.device != empty.mask.device:
        raise ValueError(f"the state is on {state.mask.device}, the agent on {empty.mask.device}; {advice}")
    for name, own in vars(empty).items():
        given = getattr(state, name)
        if given.shape != own.shape or given.dtype != own.dtype:
            raise ValueError(
                f"the state is of another agent: {name} has shape {tuple(given.shape)} and {given.dtype} in "
                f"the state, {tuple(own.shape)} and {own.dtype} in this agent; {advice}"
            )


def _empty_context(
    model: DecisionTransformerModel, encoded: ConditionedObservation, length: int
) -> ContextWindow:
    """Return an empty context window of ``length`` steps for the environments of ``encoded``."""
    rows, like = len(encoded.return_to_go), encoded.return_to_go
    return ContextWindow(
        features=like.new_zeros(rows, length, model.features.width),
        actions=encoded.previous_action.new_zeros(rows, length, *encoded.previous_action.shape[1:]),
        return_to_go=like.new_zeros(rows, length),
        time_steps=encoded.time_steps.new_zeros(rows, length),
        mask=torch.zeros(rows, length, dtype=torch.bool, device=like.device),
    )


def encode_observations(values: NDArray[Any], dataset_info: DatasetInfo) -> NDArray[Any]:
    """Encode observations (E, ...) as the dataset encodes them.

    Raises:
        ValueError: if their shape differs from that of the dataset.
        FaultyEnvironmentError: if a number is NaN or infinite.
    """
    encoder = observation_encoder(encoded_observation_space(dataset_info.observation_space))
    values = encoder.match_axes(values)
    if values.shape[1:] != encoder.space.shape:
        raise ValueError(
            f"observations must have the shape of the dataset, {encoder.space.shape}, got {values.shape[1:]}"
        )
    try:
        return encoder(values)
    except RowError as error:
        raise FaultyEnvironmentError(f"the observation of environment {error.row} {error.fault}") from error


def _check_keys(observation: Any) -> None:
    """Raise TypeError unless an observation is a mapping with the keys of `ReturnToGo`."""
    given = f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        raise TypeError(
            f"a Decision Transformer is conditioned on a target return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap the environment in rlxf.envs.ReturnToGo(env, "
            f"target_return), or call rlxf.evaluate(agent, target_returns=[...])"
        )


ENCODING_BATCH = 256
"""Number of windows in one forward pass."""


class ReturnConditionedPolicy(DatastoreMixin, CalibrationMixin, OfflineAlgorithm):
    """Part of `DecisionTransformer` that acts, conditioned on a target return."""

    policy: DecisionTransformerModel
    _missing_state_warning: MissingStateWarning

    @property
    def head(self) -> Head | RetrievalPolicy:
        """Action head of the policy; with a datastore, the head that also retrieves from it."""
        return self._action_head() if self.datastore is None else self._retrieval_policy(self.datastore)

    def _setup_learn(self, *args: Any, **options: Any) -> tuple[int, BaseCallback]:
        check_no_datastore(self.datastore)
        return super()._setup_learn(*args, **options)

    def train(self, windows: Windows, learning_rate: float) -> None:
        """Run one update; a calibrated exit threshold is reset first, with a warning."""
        reset_calibration(self.policy.transformer)
        super().train(windows, learning_rate)

    def encode(
        self, observation: dict[str, NDArray[Any]], actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Encode observations of `rlxf.envs.ReturnToGo` and actions, (E, ...), as in `Trajectories`."""
        rows = encode_observations(observation["observation"], self.dataset_info)
        return rows, action_encoder(self.dataset_info.action_space)(actions)

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions, as in SB3; ``state`` holds the last K steps.

        Args:
            observation: observation of `rlxf.envs.ReturnToGo`, of a single environment or of E environments.
            state: the `ContextWindow` returned by the previous call; None at the beginning.
            episode_start: (E,) bool, True for the first observation of an episode. Observations with time
                step 0 always start an episode.
            deterministic: return the most likely action instead of a sample. With `Imitation`, Box actions
                are always deterministic.

        Returns:
            The actions, (E, ...), within the bounds of the space, and the state for the next call. The given
            state is not modified.

        Raises:
            TypeError: if the observation is not that of a `ReturnToGo`, or the state is not one that
                `predict` returned.
            ValueError: if the observation's shape differs from the dataset's, the batch size of ``state`` or
                ``episode_start`` differs from the observation's, ``state`` is of another agent or device, or
                a number is NaN or infinite.
            NumericalError: if an output of the transformer is not finite; the message names the cause.

        Warns:
            UserWarning: once, if ``state`` is None in ten consecutive calls without ``episode_start`` at time
                steps other than 0, or in a call whose ``episode_start`` is False for an observation.
        """
        encoded, state = self._append_observation(observation, state, episode_start)
        with torch.no_grad():
            chosen = self.head.choose(self.policy.newest_output(state), deterministic)
        actions = to_environment(chosen, self.action_space)
        return (actions if encoded.batched else actions[0]), state

    @torch.no_grad()
    def action_logits(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the logits (E, A) that `predict` samples from, and the state; arguments as in `predict`.

        Raises the errors of `predict`.

        Raises:
            TypeError: also if the action space is not Discrete.
        """
        if not isinstance(self.action_space, spaces.Discrete):
            raise TypeError(f"action_logits needs Discrete actions, got {self.action_space}")
        _, state = self._append_observation(observation, state, episode_start)
        head: Any = self.head  # of Discrete actions, so it has logits
        (logits,) = head.logits(self.policy.newest_output(state))
        return logits, state

    def observe_action(self, state: ContextWindow, actions: Tensor) -> ContextWindow:
        """Return the state after a step with actions (E,), unchanged; the next observation contains them."""
        return state

    def _append_observation(
        self, observation: NDArray[Any] | dict[str, NDArray[Any]], state: Any, episode_start: Any
    ) -> tuple[ConditionedObservation, ContextWindow]:
        """Encode the observation and append it to the context; return both."""
        encoded = ConditionedObservation.encode(observation, self.dataset_info, self.device)
        start = encoded.episode_starts(episode_start)
        if self.policy.training:  # eval() visits each module, which takes a tenth of the time of a step
            self.policy.eval()
        all_first = bool(start.all())
        self._missing_state_warning.record(
            state, None if episode_start is None and not all_first else all_first
        )
        length = self.context_length + self.policy.burn_in_steps
        return encoded, extend_context(self.policy, state, encoded, start, length)

    def _encode_dataset(self, data: Trajectories, progress_bar: bool) -> Datastore:
        return encode_dataset(self.policy.eval(), self.windows(data), self.device, progress_bar)

    def _action_head(self) -> Any:
        return self.policy.loss.head

    def _checkpoint(self) -> Archive:
        return self._add_datastore(super()._checkpoint())

    @checkpoint_errors()
    def _restore(self, archive: Archive) -> None:
        super()._restore(archive)
        self._restore_datastore(archive)


@torch.no_grad()
def encode_dataset(
    model: DecisionTransformerModel, windows: Windows, device: torch.device, progress_bar: bool = False
) -> Datastore:
    """Return a datastore with the key, the action and the episode of each step of the data.

    The key is the input of the head while acting: the output at the state token of the newest of K steps.
    Each step is therefore encoded from the window that ends with it, which takes about one window per step.
    The first K steps of an episode come from one window, since the model is causal.
    """
    data = windows.trajectories
    keys = torch.empty(data.steps, model.transformer.spec.width, device=device)
    with_first, later = starts(windows)
    for batch in track(_batches(with_first), "encode starts", disable=not progress_bar):
        steps, y = first_steps(model, windows, batch, device)
        keys[steps] = y
    for batch in track(_batches(later), "encode steps", disable=not progress_bar):
        window = windows.starting_at(batch).to(device)
        keys[torch.from_numpy(batch + windows.length - 1)] = model.newest_output(model.steps(window))
    episodes = np.repeat(np.arange(data.episodes), data.lengths)
    actions = torch.from_numpy(np.array(data.actions))
    return Datastore(keys, actions.to(device), torch.from_numpy(episodes).to(device))


def starts(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first steps of the windows that begin an episode, and those of the later, full windows."""
    offsets = windows.trajectories.offsets
    step = np.arange(windows.trajectories.steps)
    end = np.repeat(offsets[1:], windows.trajectories.lengths)
    return offsets[:-1].copy(), np.setdiff1d(step[step + windows.length <= end], offsets[:-1])


def first_steps(
    model: DecisionTransformerModel, windows: Windows, first: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the indices (N,) of the steps in windows that begin episodes, and the outputs (N, C) there."""
    batch = windows.starting_at(first).to(device)
    y, mask = model.outputs(model.steps(batch)), batch.mask[:, model.burn_in_steps :]
    steps = torch.from_numpy(first).to(device)[:, None] + batch.time_steps[:, model.burn_in_steps :]
    return steps[mask], y[mask]


def _batches(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [starts[i : i + ENCODING_BATCH] for i in range(0, len(starts), ENCODING_BATCH)]
