"""Distillation of a Decision Transformer into another, usually smaller one, on windows of the data."""

import torch
from torch import Tensor

from rlxf.agents.common.losses import Distillation, HiddenStateDistance, masked_mean
from rlxf.agents.common.numerics import check_parameters
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.context_window import TOKENS_PER_STEP
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.data import Trajectories, WindowBatch, Windows


class DistillationUpdate(OfflineUpdate):
    """Update that minimizes the `Distillation` loss on the steps in the context of both student and teacher.

    Each model reads as many steps as when it acts, all from one segment of an episode. A teacher with a
    longer context therefore uses its full context. If the student has early exits, the outputs of all layers
    are trained, weighted by their loss weights. Its exit prediction treats the teacher's actions as correct.

    Args:
        student: update of the student by its own loss; gives its model, optimizer and settings.
        teacher: model to imitate; it is not changed.
        context_lengths: number of steps K in the context of the student and of the teacher.
        distillation: loss settings.
        generator: CPU generator for the initial projection of hidden states.

    Raises:
        ValueError: if the student and the teacher have different kinds of heads or are on different devices.
        NumericalError: if a parameter of the teacher is not finite.
    """

    resumable = False  # a checkpoint does not hold the projection of hidden states

    def __init__(
        self,
        student: OfflineUpdate,
        teacher: DecisionTransformerModel,
        context_lengths: tuple[int, int],
        distillation: Distillation,
        generator: torch.Generator,
    ):
        assert isinstance(student.trained, DecisionTransformerModel)
        _check_models(student.trained, teacher)
        super().__init__(
            student.trained,
            student.optimizer,
            max_grad_norm=student.max_grad_norm,
            average=student.average,
            accumulation_steps=student.accumulation_steps,
        )
        self.student, self.teacher = student.trained, teacher.eval()
        models = self.student, self.teacher
        pairs = zip(context_lengths, models, strict=True)
        self.steps_read = tuple(length + model.burn_in_steps for length, model in pairs)
        self.shared_steps = min(context_lengths)
        self.distillation = distillation
        student_width, teacher_width = (model.transformer.spec.width for model in models)
        self.hidden = HiddenStateDistance(student_width, teacher_width, generator, _device(self.student))

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return windows of the shorter of the two contexts, whose burn-in completes the longer one.

        Then each step is in the loss with the contexts that it has while acting, also the first steps of an
        episode if the student has the longer context.
        """
        return Windows(trajectories, self.shared_steps, burn_in=max(self.steps_read) - self.shared_steps)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the "loss" and its parts, averaged over the real (unpadded) steps of B windows."""
        steps = self.student.steps(batch).between(-self.steps_read[0])
        exits = self.student.exits(
            steps, slice(1 - TOKENS_PER_STEP * self.shared_steps, None, TOKENS_PER_STEP)
        )
        teacher_outputs, teacher_actions = self._teacher_targets(batch, len(exits.loss_weights))
        weight = batch.mask[:, -self.shared_steps :] * exits.loss_weights[:, None, None]
        head = self.student.loss.head
        teacher = self.teacher.loss.head
        options = self.distillation
        divergence = head.distillation_loss(exits.outputs, teacher, teacher_outputs, options.temperature)
        actions = masked_mean(divergence, weight)
        hidden = masked_mean(self.hidden.distance(exits.outputs, teacher_outputs), weight)
        loss = actions + options.hidden_coef * hidden
        parts = {"loss": loss, "distillation_loss": actions, "hidden_loss": hidden}
        last = steps.between(-self.shared_steps)
        return self.student.add_penalty(self.student.add_exit_loss(parts, exits, teacher_actions, last))

    def after_losses(self) -> None:
        """Check nothing: the losses of the student's own objective are not used."""

    def after_update(self) -> None:
        """Notify the student's transformer; the losses of its own objective have not been trained."""
        self.student.transformer.after_update()

    def loss_count(self, batch: WindowBatch) -> Tensor:
        """Count the real (unpadded) steps in the loss."""
        return batch.mask[:, -self.shared_steps :].sum()

    def clear_gradients(self) -> None:
        """Clear the gradients of the student and of the projection."""
        super().clear_gradients()
        self.hidden.optimizer.zero_grad()

    @torch.no_grad()
    def _teacher_targets(self, batch: WindowBatch, exits: int) -> tuple[Tensor, Tensor]:
        """Return the teacher's outputs and actions at the shared steps, expanded to ``exits`` exits."""
        steps = self.teacher.steps(batch).between(-self.steps_read[1])
        outputs = self.teacher.outputs(steps)[:, -self.shared_steps :]
        actions = self.teacher.loss.head.choose(outputs, deterministic=True)
        return outputs.expand(exits, *outputs.shape), actions.expand(exits, *actions.shape)

    def step(self, parts: dict[str, Tensor]) -> Tensor:
        """Take a step of the student's optimizer and of the optimizer of the hidden-state projection."""
        norm = super().step(parts)
        self.hidden.optimizer.step()
        return norm


def _check_models(student: DecisionTransformerModel, teacher: DecisionTransformerModel) -> None:
    check_parameters(teacher)
    teacher_head, student_head = (type(each.loss.head).__name__ for each in (teacher, student))
    if teacher_head != student_head:
        raise ValueError(
            f"teacher and student must have the same kind of action head, got {teacher_head} and "
            f"{student_head}: give both the same objective"
        )
    devices = _device(teacher), _device(student)
    if devices[0] != devices[1]:
        raise ValueError(
            f"the teacher is on {devices[0]}, the student on {devices[1]}: load both on one device"
        )


def _device(model: DecisionTransformerModel) -> torch.device:
    return next(model.parameters()).device
