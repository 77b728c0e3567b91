"""Online distillation of a GTrXL teacher into a student, in episodes of either agent."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.common.datastore import check_teacher_without_datastore
from rlxf.agents.common.losses import Distillation, HiddenStateDistance, masked_mean
from rlxf.agents.gtrxl.heads import divergence
from rlxf.agents.gtrxl.losses import PPOLoss, auxiliary_losses
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch, SegmentBuffer
from rlxf.agents.gtrxl.training_algorithm import PolicyUpdate, TrainingAlgorithm
from rlxf.attention import TokenIndex

Actor = Literal["student", "teacher"]


@dataclass(frozen=True, eq=False)
class DistillationBatch:
    """Minibatch of a distillation update.

    Args:
        segments: segments of the student; N steps.
        target: (N, C'), outputs of the teacher at these steps.
    """

    segments: SegmentBatch
    target: Tensor

    @property
    def weight(self) -> Tensor:
        """Weights of the steps, (N,), see `SegmentBatch`."""
        return self.segments.weight


@dataclass(frozen=True)
class DistillationLoss:
    """Loss of `Distillation` plus PPO's value loss, which uses returns.

    Both apply to the output of the last pass. Auxiliary losses of the transformer are added, e.g. those for
    early exits.

    Args:
        distillation: the distillation loss.
        teacher: policy whose heads turn the target outputs into distributions.
        hidden: distance of hidden states.
        vf_coef: weight of the value loss, already divided by the variance of returns.
    """

    distillation: Distillation
    teacher: GTrXLPolicy
    hidden: HiddenStateDistance
    vf_coef: float

    def __call__(self, policy: GTrXLPolicy, batch: DistillationBatch) -> dict[str, Tensor]:
        """Return means over the steps of weight 1 in a minibatch: "loss" and its terms."""
        segments, weight = batch.segments, batch.segments.weight
        exits = policy.exit_outputs(segments.obs, segments.previous, segments.index, segments.state)
        added = auxiliary_losses(policy, exits, segments, self.vf_coef)
        latent = exits.outputs[-1].flatten(0, 1)
        student, values = policy.heads(latent)
        with torch.no_grad():
            teacher, _ = self.teacher.heads(batch.target)
        kl = masked_mean(divergence(student, teacher, self.distillation.temperature), weight)
        hidden = masked_mean(self.hidden.distance(latent, batch.target), weight)
        value_loss = masked_mean((segments.returns - values).square(), weight)
        loss = kl + self.distillation.hidden_coef * hidden + self.vf_coef * value_loss
        parts = {"distillation_loss": kl, "hidden_loss": hidden, "value_loss": value_loss}
        for part in added.values():
            loss = loss + part
        if (depth := policy.transformer.mean_depth()) is not None:
            parts["mean_depth"] = depth
        return {"loss": loss} | parts | added


class DistillationUpdate(PolicyUpdate):
    """Update of the student together with the projection of hidden states."""

    objective: DistillationLoss

    def _step(self, parts: dict[str, Tensor]) -> None:
        self.objective.hidden.optimizer.zero_grad()
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
        generator: initializes the projection of hidden states.

    Raises:
        ValueError: if spaces, device or memory of the teacher do not fit the student, or actor is unknown.
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
        _check_teacher(student, teacher)
        if actor not in get_args(Actor):
            raise ValueError(f"actor must be one of {', '.join(get_args(Actor))}, got {actor!r}")
        self.teacher, self.distillation, self.actor = teacher, distillation, actor
        self.teacher.set_training_mode(False)
        widths = student.core.width, teacher.core.width
        self.hidden = HiddenStateDistance(*widths, generator, student.device)
        self._state = self.teacher.initial_state(n_envs)
        self._outputs: list[Tensor] = []

    def start_rollout(self) -> None:
        """Clear the stored teacher outputs, also those of a rollout without an update."""
        self._outputs.clear()

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Choose actions by `Actor`, and store the teacher's output."""
        self._state.action = self._state.action.masked_fill(index.position == 0, 0.0)
        output, _ = self.teacher.act(obs, self._state, index)
        self._outputs.append(output)
        distribution, _ = self.teacher.heads(output)
        actions = {"student": own, "teacher": distribution}[self.actor].get_actions()
        self._state.observe_action(self.teacher.encode_actions(actions), index)
        return actions

    def start_update(
        self, policy: GTrXLPolicy, loss: PPOLoss, max_grad_norm: float, target_kl: float | None
    ) -> DistillationUpdate:
        """Return an update with `DistillationLoss`, which no bound on the KL divergence stops."""
        objective = DistillationLoss(self.distillation, self.teacher, self.hidden, loss.vf_coef)
        return DistillationUpdate(policy, objective, max_grad_norm, target_kl=None)

    def minibatches(
        self, buffer: SegmentBuffer, segments: int, advantages: Tensor, order: torch.Generator
    ) -> Iterator[DistillationBatch]:
        """Yield the minibatches of the buffer with the teacher's outputs at their steps."""
        outputs = torch.stack(self._outputs, dim=1)
        for chosen in buffer.shuffled(segments, order):
            yield DistillationBatch(buffer.segments(chosen, advantages), buffer.rows(outputs, chosen))


def _check_teacher(student: GTrXLPolicy, teacher: GTrXLPolicy) -> None:
    if teacher is student:
        raise ValueError("teacher and student are the same agent: pass another agent as the teacher")
    check_teacher_without_datastore(None if teacher.retrieval is None else teacher.retrieval.datastore)
    for kind in ("observation_space", "action_space"):
        expected, actual = getattr(student, kind), getattr(teacher, kind)
        if expected != actual:
            raise ValueError(
                f"the teacher's {kind} is {actual}, the student's is {expected}: they must match"
            )
    if teacher.persist_memory_across_episodes != student.persist_memory_across_episodes:
        raise ValueError(
            f"the teacher has persist_memory_across_episodes={teacher.persist_memory_across_episodes}, "
            f"the student persist_memory_across_episodes={student.persist_memory_across_episodes}: they "
            f"must match"
        )
    if teacher.device != student.device:
        raise ValueError(
            f"the teacher is on {teacher.device}, the student on {student.device}: load both on the same "
            f"device"
        )
