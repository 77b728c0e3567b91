"""From what an environment shows to the steps that the model reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.decision_transformer.facts import Facts
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.steps import Steps
from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.return_to_go import KEYS, shown_space
from rlxf.envs.trajectories import action_encoder, observation_encoder
from rlxf.envs.trajectories.encoders import ImageEncoder
from rlxf.envs.trajectories.errors import RowError


@dataclass(frozen=True, eq=False)
class Shown:
    """What E environments show at one step, as the data would have it.

    Args:
        observations: encoded, (E, D) or (E, C, H, W).
        return_to_go: (E,) float32.
        previous_action: as the data have actions, (E, ...).
        time_steps: (E,) int64.
        batched: False if it was one environment without an axis for it.
    """

    observations: Tensor
    return_to_go: Tensor
    previous_action: Tensor
    time_steps: Tensor
    batched: bool


def read_shown(observation: Any, facts: Facts, device: torch.device) -> Shown:
    """An observation of a `ReturnToGo`, of one environment or of E.

    Raises:
        TypeError: if it is no such observation.
        ValueError: if its shape is not that of the data.
        FaultyEnvironmentError: if a number in it is NaN or infinite.
    """
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        given = (
            f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
        )
        raise TypeError(
            f"a Decision Transformer is asked for a return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap the environment: rlxf.envs.ReturnToGo(env, target_return) "
            f"does that, and rlxf.evaluate(agent, target_returns=[...])"
        )
    batched = np.ndim(observation["return_to_go"]) == 2
    parts = {
        key: np.asarray(value) if batched else np.asarray(value)[None] for key, value in observation.items()
    }
    actions = action_encoder(facts.action_space)
    return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
    _check_finite(return_to_go)
    return Shown(
        observations=torch.as_tensor(encode_observations(parts["observation"], facts), device=device),
        return_to_go=torch.as_tensor(return_to_go, device=device),
        previous_action=torch.as_tensor(actions(parts["previous_action"]), device=device),
        time_steps=torch.as_tensor(parts["time_step"].reshape(-1).astype(np.int64), device=device),
        batched=batched,
    )


def no_steps(model: DecisionTransformerModel, shown: Shown, length: int) -> Steps:
    """Room for ``length`` steps of as many environments as are shown, none of them taken."""
    rows, like = len(shown.return_to_go), shown.return_to_go
    return Steps(
        features=like.new_zeros(rows, length, model.features.width),
        actions=shown.previous_action.new_zeros(rows, length, *shown.previous_action.shape[1:]),
        return_to_go=like.new_zeros(rows, length),
        time_steps=shown.time_steps.new_zeros(rows, length),
        mask=torch.zeros(rows, length, dtype=torch.bool, device=like.device),
    )


@torch.no_grad()
def one_step_on(model: DecisionTransformerModel, state: Steps, shown: Shown, start: Tensor) -> Steps:
    """The last steps and the one shown; ``start`` (E,) bool marks those of which it is the first."""
    features = model.features(shown.observations[:, None])[:, 0]
    return state.begun(start).followed_by(
        features, shown.previous_action, shown.return_to_go, shown.time_steps
    )


def started(shown: Shown, episode_start: Any) -> Tensor:
    """(E,) bool: who is at the first step of an episode, by what is said and by the time step.

    Raises:
        ValueError: if there are not E of them.
    """
    first = shown.time_steps == 0
    if episode_start is None:
        return first
    said = torch.as_tensor(np.atleast_1d(episode_start), dtype=torch.bool, device=first.device)
    if said.shape != first.shape:
        raise ValueError(f"episode_start is of shape {tuple(said.shape)}, the observation of {len(first)}")
    return first | said


def encode_observations(values: NDArray[Any], facts: Facts) -> NDArray[Any]:
    """What a `ReturnToGo` shows of E environments, as rows of the data.

    Raises:
        ValueError: if the shape is another one.
        FaultyEnvironmentError: if a number is NaN or infinite.
    """
    encoder = observation_encoder(shown_space(facts.observation_space))
    if isinstance(encoder, ImageEncoder):
        values = _axes_as_in_data(values, encoder)
    if values.shape[1:] != encoder.space.shape:
        raise ValueError(
            f"an observation has shape {values.shape[1:]}, in the data it is {encoder.space.shape}"
        )
    try:
        return encoder(values)
    except RowError as error:
        raise FaultyEnvironmentError(f"the observation of environment {error.row} {error.fault}") from error


def _axes_as_in_data(images: NDArray[Any], encoder: ImageEncoder) -> NDArray[Any]:
    """Images (E, ...) with their channels where the data have them, first or last."""
    wanted = encoder.space.shape
    turned = (np.moveaxis(images, 1, -1), np.moveaxis(images, -1, 1)) if images.ndim == 4 else ()
    return next((view for view in (images, *turned) if view.shape[1:] == wanted), images)


def _check_finite(return_to_go: NDArray[np.float32]) -> None:
    if not np.isfinite(return_to_go).all():
        row = int(np.argmin(np.isfinite(return_to_go)))
        raise FaultyEnvironmentError(f"the return to go of environment {row} is {return_to_go[row]}")
