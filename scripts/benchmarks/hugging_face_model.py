"""Training and evaluation of HF's DecisionTransformerModel, in several environments at once.

This module runs in the virtual environment of `hugging_face`, which contains transformers.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from transformers import DecisionTransformerConfig, DecisionTransformerModel

from benchmarks.offline_setting import Setting
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.data import Trajectories, WindowBatch
from rlxf.envs.make import make_vec_env

MAX_EPISODE_LENGTH = 1000
"""Number of time steps with an embedding: the maximum length of episodes."""


class Learner:
    """HF's model and its training: AdamW, warm-up, gradient clipping, squared error over valid steps.

    Args:
        setting: sizes and learning rates.
        trajectories: data with vector observations and Box actions.
        updates: total number of updates, for warm-up and decay.
        seed: random seed of weights and dropout.
        device: device of the model, and of the batches that it gets.
    """

    def __init__(
        self, setting: Setting, trajectories: Trajectories, updates: int, seed: int, device: str = "cpu"
    ):
        torch.manual_seed(seed)
        self.setting, self.trajectories, self.device = setting, trajectories, device
        self.model = DecisionTransformerModel(
            DecisionTransformerConfig(
                state_dim=trajectories.observations.shape[1],
                act_dim=trajectories.actions.shape[1],
                hidden_size=setting.width,
                n_layer=setting.layers,
                n_head=setting.heads,
                n_positions=1024,
                max_ep_len=MAX_EPISODE_LENGTH,
                resid_pdrop=setting.dropout,
                attn_pdrop=setting.dropout,
                embd_pdrop=setting.dropout,
                bos_token_id=0,  # unused, but the defaults cause a warning
                eos_token_id=0,
            )
        ).to(device)
        self.mean = torch.from_numpy(np.array(trajectories.observation_mean)).to(device)
        self.std = torch.from_numpy(np.array(trajectories.observation_std)).to(device)
        self.bound = torch.from_numpy(trajectories.action_space.high).to(device)  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setting.learning_rate, weight_decay=1e-4
        )
        warm, falls = max(1, updates // 10), 1 - setting.decay
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / warm) * (1 - falls * step / updates)
        )

    def update(self, batch: WindowBatch) -> None:
        """Make one optimizer step on a batch of B windows."""
        self.model.train()
        predicted = self.forward(
            batch.observations, batch.actions, batch.return_to_go, batch.time_steps, batch.mask
        )
        loss = ((predicted - batch.actions)[batch.mask] ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        self.schedule.step()

    def forward(
        self, observations: Tensor, actions: Tensor, return_to_go: Tensor, time_steps: Tensor, mask: Tensor
    ) -> Tensor:
        """Predict actions (B, K, A) from raw observations (B, K, D), actions (B, K, A) and returns (B, K).

        Internally, the actions of the model are scaled to [-1, 1].
        """
        predicted = self.model(
            states=(observations - self.mean) / self.std,
            actions=actions / self.bound,
            rewards=None,
            returns_to_go=return_to_go[..., None] / self.setting.return_scale,
            timesteps=time_steps.clamp(max=MAX_EPISODE_LENGTH - 1),
            attention_mask=mask.long(),
        ).action_preds
        return predicted * self.bound


class Player:
    """HF's model, on the CPU, as an agent for `rlxf.evaluate`.

    Its state is the last K steps of each environment.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self.dataset_info = DatasetInfo.of(learner.trajectories)
        self.reference_scores = self.dataset_info.reference_scores
        self.return_range = self.dataset_info.return_range

    def make_env(self, n_envs: int, seed: int | None = None) -> VecEnv:
        """Create the vector environment of the dataset."""
        assert self.dataset_info.env_id is not None
        return make_vec_env(self.dataset_info.env_id, n_envs, seed, self.dataset_info.env_kwargs)

    @torch.no_grad()
    def predict(
        self,
        observation: dict[str, NDArray[Any]],
        state: list[Tensor] | None = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], list[Tensor]]:
        """Predict actions as agents of Stable-Baselines3 do, from observations of `rlxf.envs.ReturnToGo`."""
        self.learner.model.eval()
        tensors = {key: torch.as_tensor(value) for key, value in observation.items()}
        context = (
            self._empty(len(tensors["time_step"])) if state is None else [part.clone() for part in state]
        )
        context[1][:, -1] = tensors["previous_action"]
        steps = (
            tensors["observation"].float(),
            torch.zeros_like(tensors["previous_action"]),
            tensors["return_to_go"][:, 0],
            tensors["time_step"][:, 0],
            torch.ones(len(tensors["time_step"]), dtype=torch.bool),
        )
        context = [
            torch.cat([part[:, 1:], new[:, None]], 1) for part, new in zip(context, steps, strict=True)
        ]
        context[4][tensors["time_step"][:, 0] == 0, :-1] = False
        actions = self.learner.forward(*_without_padding(context))[:, -1]
        return actions.numpy(), context

    def _empty(self, n_envs: int) -> list[Tensor]:
        data, length = self.learner.trajectories, self.learner.setting.context_length
        return [
            torch.zeros(n_envs, length, data.observations.shape[1]),
            torch.zeros(n_envs, length, data.actions.shape[1]),
            torch.zeros(n_envs, length),
            torch.zeros(n_envs, length, dtype=torch.int64),
            torch.zeros(n_envs, length, dtype=torch.bool),
        ]


def _without_padding(context: list[Tensor]) -> list[Tensor]:
    """Set all parts to 0 where the mask, the last part, is False."""
    mask = context[-1]
    return [part * mask.reshape(*mask.shape, *[1] * (part.ndim - 2)) for part in context[:-1]] + [mask]
