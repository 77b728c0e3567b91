"""A small Decision Transformer learns from a large one, on windows of the data."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.decision_transformer.settings import other_spaces
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.agents.decision_transformer.update import Update
from rlxf.agents.distillation import Distillation, HiddenStates
from rlxf.agents.losses import average
from rlxf.agents.remembering import check_teaches_by_itself
from rlxf.envs.trajectories import Trajectories, WindowBatch, Windows

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


class DistillationUpdate(Update):
    """The loss of `Distillation` in place of the student's own, on the steps that both read.

    Each reads as many steps as it acts from, of one stretch of an episode; so a teacher with a longer context
    tells what it would do with all of it. Where tokens of the student may leave early, all its outputs learn,
    each by its share, and it learns when to leave; what the teacher would do is what is right.

    Args:
        student: learns.
        teacher: stays as it is.
        distillation: what is minimised.

    Raises:
        ValueError: if the student cannot learn from the teacher.
    """

    def __init__(
        self, student: "DecisionTransformer", teacher: "DecisionTransformer", distillation: Distillation
    ):
        _check_teacher(student, teacher)
        super().__init__(student.policy, student.optimizer, student.max_grad_norm)
        self.student, self.teacher = student.policy, teacher.policy.eval()
        self.steps_read = tuple(each.context_length + each.policy.remembered for each in (student, teacher))
        self.window = student.context_length
        self.both = min(student.context_length, teacher.context_length)
        self.distillation = distillation
        widths = student.core.width, teacher.core.width
        self.hidden = HiddenStates(*widths, student.order, student.device)

    def windows(self, trajectories: Trajectories) -> Windows:
        """Windows of the student's steps, with what either has to read before them."""
        return Windows(trajectories, self.window, burn_in=max(self.steps_read) - self.window)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """ "loss", and its parts, over the real steps of B windows."""
        steps = self._steps(self.student, batch, self.steps_read[0])
        exits = self.student.exits(steps, slice(1 - TOKENS * self.both, None, TOKENS))
        wanted, right = self._teaching(batch, len(exits.shares))
        weight = batch.mask[:, -self.both :] * exits.shares[:, None, None]
        head, temperature = self.student.loss.head, self.distillation.temperature
        apart = head.distance(exits.outputs, self.teacher.loss.head, wanted, temperature)
        actions, hidden = average(apart, weight), average(self.hidden.distance(exits.outputs, wanted), weight)
        loss = actions + self.distillation.hidden_coef * hidden
        parts = {"loss": loss, "distillation_loss": actions, "hidden_loss": hidden}
        last = steps.between(steps.mask.shape[1] - self.both, steps.mask.shape[1])
        return self.student.with_penalty(self.student.with_lesson(parts, exits, right, last))

    @torch.no_grad()
    def _teaching(self, batch: WindowBatch, passes: int) -> tuple[Tensor, Tensor]:
        """The teacher's outputs at the steps that both read, and its actions; the same for all passes N."""
        outputs = self._read(self.teacher, batch, self.steps_read[1])[:, -self.both :]
        actions = self.teacher.loss.head.choose(outputs, deterministic=True)
        return outputs.expand(passes, *outputs.shape), actions.expand(passes, *actions.shape)

    def step(self, parts: dict[str, Tensor]) -> Tensor:
        """See `Update`; the projection of hidden states learns, too."""
        self.hidden.optimizer.zero_grad()
        norm = super().step(parts)
        self.hidden.optimizer.step()
        return norm

    @classmethod
    def _read(cls, model: DecisionTransformerModel, batch: WindowBatch, steps: int) -> Tensor:
        """What the head reads at the last of the steps (B, K, C)."""
        return model.read(cls._steps(model, batch, steps))

    @staticmethod
    def _steps(model: DecisionTransformerModel, batch: WindowBatch, steps: int) -> Steps:
        """The last steps of windows, as a model reads them."""
        columns = batch.mask.shape[1]
        return model.steps(batch).between(columns - steps, columns)


def _check_teacher(student: "DecisionTransformer", teacher: "DecisionTransformer") -> None:
    check_teaches_by_itself(teacher.memory)
    for kind, mismatch in other_spaces(teacher, student):
        raise ValueError(f"the teacher has other {kind} than the student: {mismatch}")
    theirs, own = (type(each.policy.loss.head).__name__ for each in (teacher, student))
    if theirs != own:
        raise ValueError(
            f"the teacher tells actions by a {theirs}, the student by a {own}: give both the same objective"
        )
    if teacher.device != student.device:
        raise ValueError(
            f"the teacher is on {teacher.device}, the student on {student.device}: load both on one device"
        )
