"""Online distillation of a GTrXL into another, usually smaller one, on the steps of its rollouts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.accumulation import Losses
from rlxf.agents.common.datastore import TEACHER_REASON, check_no_datastore
from rlxf.agents.common.losses import Distillation, HiddenStateDistance, masked_mean
from rlxf.agents.common.numerics import check_parameters
from rlxf.agents.gtrxl.losses import PPOLoss, segment_outputs, total_loss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch, SegmentBuffer
from rlxf.agents.gtrxl.training_algorithm import PolicyUpdate, TrainingAlgorithm
from rlxf.attention import TokenIndex

Actor = Literal["student", "teacher"]


@dataclass(frozen=True, eq=False)
class DistillationBatch(SegmentBatch):
    """Minibatch of a distillation update: segments of the student, and outputs of the teacher.

    Args:
        target: (N, C'), outputs of the teacher at the steps of the segments.
    """

    target: Tensor


@dataclass(frozen=True)
class DistillationLoss:
    """Loss of `Distillation` plus PPO's losses of values, which use returns, and reconstructed observations.

    All apply to the output of the last pass. Auxiliary losses of the transformer are added, e.g. those for
    early exits.

    Args:
        distillation: the distillation loss.
        teacher: policy whose heads turn the target outputs into distributions.
        hidden: distance of hidden states.
        ppo: PPO's loss, whose policy loss is replaced.
    """

    distillation: Distillation
    teacher: GTrXLPolicy
    hidden: HiddenStateDistance
    ppo: PPOLoss

    def __call__(self, policy: GTrXLPolicy, batch: DistillationBatch) -> Losses:
        """Return means over the steps of weight 1 in a minibatch: "loss" and its terms."""
        latent, added = segment_outputs(policy, batch, self.ppo.vf_coef)
        student, values = policy.heads(latent)
        with torch.no_grad():
            teacher, _ = self.teacher.heads(batch.target)
        divergence = policy.action_head.divergence(student, teacher, self.distillation.temperature)
        kl = masked_mean(divergence, batch.weight)
        hidden = masked_mean(self.hidden.distance(latent, batch.target), batch.weight)
        predictions, parts = self.ppo.prediction_losses(policy, latent, values, batch)
        loss = kl + self.distillation.hidden_coef * hidden + predictions
        parts |= {"distillation_loss": kl, "hidden_loss": hidden}
        return total_loss(policy, loss, parts, added)


class DistillationUpdate(PolicyUpdate):
    """Update of the student together with the projection of hidden states."""

    objective: DistillationLoss

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        self.objective.hidden.optimizer.zero_grad()

    def _step(self, parts: Losses) -> None:
        super()._step(parts)
        self.objective.hidden.optimizer.step()


class DistillationTraining(TrainingAlgorithm):
    """Training by distillation: a teacher processes the same steps with its own memory.

    The environments must be reset before the first rollout, because the teacher has no memory of earlier
    steps.

    Args:
        student: policy to train.
        teacher: policy that provides the targets; it is not changed.
        n_envs: number of environments.
        distillation: the distillation loss.
        actor: policy whose actions are taken, "student" or "teacher".
        generator: initializes the projection of hidden states, and orders the minibatches.

    Raises:
        ValueError: if spaces, device or memory of the teacher do not fit the student, or actor is unknown.
        NumericalError: if a parameter of the teacher is not finite.
    """

    resumable = False

    def __init__(
        self,
        student: GTrXLPolicy,
        teacher: GTrXLPolicy,
        n_envs: int,
        distillation: Distillation,
        actor: Actor,
        generator: torch.Generator,
    ):
        super().__init__(student, generator)
        _check_teacher(student, teacher)
        if actor not in get_args(Actor):
            raise ValueError(f"actor must be one of {', '.join(get_args(Actor))}, got {actor!r}")
        self.teacher = teacher
        self.distillation = distillation
        self.actor = actor
        self.teacher.set_training_mode(False)
        self.hidden = HiddenStateDistance(student.core.width, teacher.core.width, generator, student.device)
        self._state = self.teacher.initial_state(n_envs)
        self._outputs: list[Tensor] = []

    def start_rollout(self) -> None:
        """Clear the stored teacher outputs, including those of a rollout without an update."""
        self._outputs.clear()

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Choose the actions of the student or the teacher, by ``actor``, and store the teacher's output."""
        self._state.action = self._state.action.masked_fill(index.position == 0, 0.0)
        output, _ = self.teacher.act(obs, self._state, index)
        self._outputs.append(output)
        distribution, _ = self.teacher.heads(output)
        actions = self.policy.explore(own) if self.actor == "student" else distribution.sample()
        self._state.store_encoded_action(self.teacher.encode_actions(actions), index)
        return actions

    def start_update(
        self, loss: PPOLoss, max_grad_norm: float, target_kl: float | None, accumulation_steps: int = 1
    ) -> PolicyUpdate:
        """Return an update with `DistillationLoss`; ``target_kl`` is ignored."""
        objective = DistillationLoss(self.distillation, self.teacher, self.hidden, loss)
        return DistillationUpdate(
            self.policy, objective, max_grad_norm, target_kl=None, accumulation_steps=accumulation_steps
        )

    def minibatches(self, buffer: SegmentBuffer, segments: int, advantages: Tensor) -> Iterable[Any]:
        """Yield the minibatches of the buffer with the teacher's outputs at their steps."""
        outputs = torch.stack(self._outputs, dim=1)
        for chosen in buffer.shuffled(segments, self.order):
            batch = buffer.segments(chosen, advantages)
            yield DistillationBatch(**vars(batch), target=buffer.rows(outputs, chosen))


def _check_teacher(student: GTrXLPolicy, teacher: GTrXLPolicy) -> None:
    check_parameters(teacher)
    check_no_datastore(None if teacher.retrieval is None else teacher.retrieval.datastore, TEACHER_REASON)
    for name in ("observation_space", "action_space", "persist_memory_across_episodes", "device"):
        expected, actual = getattr(student, name), getattr(teacher, name)
        if expected != actual:
            raise ValueError(
                f"the teacher's {name} is {actual}, the student's is {expected}: they must be equal"
            )
