"""Acting step of a `DecisionTransformer` with a context window as a function of tensors, for export."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlxf.agents.common.cores import check_exportable
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.observations import ConditionedObservation, EncodedObservation, initial_actions
from rlxf.agents.offline.tensor_encoding import encode_actions, encode_observations
from rlxf.attention.functional_step import copies, named_tensors, with_tensors
from rlxf.envs.return_to_go import KEYS, encoded_observation_space
from rlxf.export.acting_step import (
    ActingStep,
    EnvironmentActions,
    as_observation,
    copy_for_export,
    observation_parts,
    tensor_name,
    zeros_of,
)

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.model import DecisionTransformerModel
    from rlxf.agents.decision_transformer.predicted_return import PredictedReturnModel

CPU = torch.device("cpu")


class WindowActingStep(ActingStep):
    """Acting step of a model whose state is a window of steps; base of both kinds of conditioning.

    Args:
        model: model of the agent; it is copied.
        info: spaces of the dataset.
        space: space of the observations of the step.
        envs: number of environments E.

    Raises:
        ValueError: if the model acts from the whole episode, its core cannot be exported, or the space is
            nested deeper than a Dict.
    """

    def __init__(
        self, model: "DecisionTransformerModel", info: DatasetInfo, space: spaces.Space[Any], envs: int
    ):
        model.check_window("export")
        check_exportable(model.transformer.spec)
        model = copy_for_export(model)
        examples = {name: zeros_of(part, envs) for name, part in observation_parts(space).items()}
        template = first_window(model, info, envs)
        empty = {name: torch.zeros_like(x) for name, x in named_tensors(template).items()}
        super().__init__("DecisionTransformer", (space, info.action_space), examples, empty)
        self.model = model
        self.info = info
        self._template = template
        self.decode = EnvironmentActions(info.action_space)

    def act(self, encoded: ConditionedObservation, start: Tensor, window: Any) -> tuple[Tensor, Any]:
        """Return actions (E, ...) of the environments, and the window with the new step."""
        window = self.model.append_step(window, encoded, start)
        chosen = self.model.loss.head.choose(self.model.newest_output(window), True)
        return self.decode(chosen), window


class TargetReturnStep(WindowActingStep):
    """Acting step for a target return: its observations are those of `rlxf.envs.ReturnToGo`."""

    def __init__(self, model: "DecisionTransformerModel", info: DatasetInfo, envs: int):
        self._encoded = encoded_observation_space(info.observation_space)
        parts = (
            self._encoded,
            spaces.Box(-np.inf, np.inf, (1,), np.float32),
            info.action_space,
            spaces.Box(0, np.iinfo(np.int64).max, (1,), np.int64),
        )
        super().__init__(model, info, spaces.Dict(dict(zip(KEYS, parts, strict=True))), envs)

    def varied_observations(self, since_start: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return observations within their bounds, with the time step."""
        name = tensor_name("time_step")
        time_step = torch.full_like(self.observations[name], since_start)
        return super().varied_observations(since_start, generator) | {name: time_step}

    def forward(
        self, observations: dict[str, Tensor], episode_start: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        parts = as_observation(observations)
        encoded = ConditionedObservation(
            observations=encode_observations(self._encoded, parts["observation"]),
            batched=True,
            return_to_go=parts["return_to_go"].flatten(),
            previous_action=encode_actions(self.info.action_space, parts["previous_action"]),
            time_steps=parts["time_step"].flatten(),
        )
        start = (encoded.time_steps == 0) | episode_start
        actions, window = self.act(encoded, start, with_tensors(self._template, copies(state)))
        return actions, named_tensors(window)


class PredictedReturnStep(WindowActingStep):
    """Acting step of a model that predicts the return: its observations are those of the environments."""

    model: "PredictedReturnModel"

    def __init__(self, model: "PredictedReturnModel", info: DatasetInfo, envs: int):
        super().__init__(model, info, info.observation_space, envs)
        self._initial_actions = initial_actions(info, envs, CPU)

    def forward(
        self, observations: dict[str, Tensor], episode_start: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rows = encode_observations(self.info.observation_space, as_observation(observations))
        before = with_tensors(self._template, copies(state))
        plain = EncodedObservation(rows, batched=True)
        encoded = self.model.continue_episode(plain, before, episode_start, self._initial_actions)
        actions, window = self.act(encoded, episode_start, before)
        window = self.model.observe_action(window, encode_actions(self.info.action_space, actions))
        return actions, named_tensors(window)


@torch.no_grad()
def first_window(model: "DecisionTransformerModel", info: DatasetInfo, envs: int) -> Any:
    """Return the state of a model after a step with an observation of zeros."""
    first = ConditionedObservation(
        observations=torch.as_tensor(np.zeros((envs, *info.encoder.shape), info.encoder.dtype)),
        batched=True,
        return_to_go=torch.zeros(envs),
        previous_action=initial_actions(info, envs, CPU),
        time_steps=torch.zeros(envs, dtype=torch.long),
    )
    return model.append_step(None, first, torch.ones(envs, dtype=torch.bool))
