"""A small agent learns from a large one, in episodes that either of them plays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from rlxf.agents.distillation import Distillation, HiddenStates
from rlxf.agents.gtrxl.distributions import divergence
from rlxf.agents.gtrxl.exits import added_parts
from rlxf.agents.gtrxl.lessons import Lesson
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout import Segments
from rlxf.agents.gtrxl.update import Update
from rlxf.agents.losses import average
from rlxf.agents.remembering import check_teaches_by_itself
from rlxf.attention import Index

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO

Actor = Literal["student", "teacher"]


@dataclass(frozen=True, eq=False)
class TaughtSegments:
    """What a minibatch is learned from.

    Args:
        segments: what the student saw; N steps.
        wanted: (N, C'), the teacher's outputs at these steps.
    """

    segments: Segments
    wanted: Tensor

    @property
    def weight(self) -> Tensor:
        """(N,), that of the segments."""
        return self.segments.weight


@dataclass(frozen=True)
class Likeness:
    """The loss of `Distillation`, and beside it that of the values, which learn from returns as in PPO.

    It is that of the last output; to this comes what the transformer adds, also for those before it.

    Args:
        distillation: what is minimised.
        teacher: whose heads say what the wanted outputs mean.
        hidden: compares hidden states.
        vf_coef: weight of the value loss, already divided by the variance of returns.
    """

    distillation: Distillation
    teacher: GTrXLPolicy
    hidden: HiddenStates
    vf_coef: float

    def __call__(self, policy: GTrXLPolicy, batch: TaughtSegments) -> dict[str, Tensor]:
        """Means over the real steps of a batch: "loss", and its parts."""
        given, weight = batch.segments, batch.segments.weight
        exits = policy.exits(given.obs, given.previous, given.index, given.state)
        added = added_parts(policy, exits, given, self.vf_coef)
        latent = exits.outputs[-1].flatten(0, 1)
        own, values = policy.heads(latent)
        with torch.no_grad():
            theirs, _ = self.teacher.heads(batch.wanted)
        apart = average(divergence(own, theirs, self.distillation.temperature), weight)
        hidden = average(self.hidden.distance(latent, batch.wanted), weight)
        value_loss = average((given.returns - values).square(), weight)
        loss = apart + self.distillation.hidden_coef * hidden + self.vf_coef * value_loss
        parts = {"distillation_loss": apart, "hidden_loss": hidden, "value_loss": value_loss}
        for part in added.values():
            loss = loss + part
        if (depth := policy.transformer.mean_depth()) is not None:
            parts["mean_depth"] = depth
        return {"loss": loss} | parts | added


class DistillationUpdate(Update):
    """The projection of hidden states learns beside the student."""

    objective: Likeness

    def _step(self, parts: dict[str, Tensor]) -> None:
        self.objective.hidden.optimizer.zero_grad()
        super()._step(parts)
        self.objective.hidden.optimizer.step()


class Teaching(Lesson):
    """A teacher goes along, step by step, with a memory of its own, and says what it would do.

    Episodes must begin anew with the first rollout: the teacher has not seen what was before.

    Args:
        student: learns.
        teacher: stays as it is.
        distillation: what is minimised.
        actor: whose actions are taken.

    Raises:
        ValueError: if the student cannot learn from the teacher, or there is no such actor.
    """

    def __init__(self, student: "GTrXLPPO", teacher: "GTrXLPPO", distillation: Distillation, actor: Actor):
        _check_teacher(student, teacher)
        if actor not in get_args(Actor):
            raise ValueError(f"actor must be one of {', '.join(get_args(Actor))}, got {actor!r}")
        self.teacher, self.distillation, self.actor = teacher.policy, distillation, actor
        self.teacher.set_training_mode(False)
        widths = student.core.width, teacher.core.width
        self.hidden = HiddenStates(*widths, student.order, student.device)
        self._acting = self.teacher.begin(student.n_envs)
        self._outputs: list[Tensor] = []

    def begin(self) -> None:
        """See `Lesson`: a rollout whose steps were all lost is not learned from."""
        self._outputs.clear()

    def choose(self, obs: PyTorchObs, index: Index, own: Distribution) -> Tensor:
        """See `Lesson`; the teacher's output is noted."""
        self._acting.action = self._acting.action.masked_fill(index.position == 0, 0.0)
        output, _ = self.teacher.act(obs, self._acting, index)
        self._outputs.append(output)
        theirs, _ = self.teacher.heads(output)
        actions = {"student": own, "teacher": theirs}[self.actor].get_actions()
        self._acting.took(self.teacher.encode_actions(actions), index)
        return actions

    def learn(self, agent: "GTrXLPPO") -> dict[str, float]:
        """``n_epochs`` passes over the segments."""
        wanted = torch.stack(self._outputs, dim=1)
        objective = Likeness(self.distillation, self.teacher, self.hidden, agent.objective().vf_coef)
        update = DistillationUpdate(agent.policy, objective, agent.max_grad_norm, target_kl=None)
        for _ in range(agent.n_epochs):
            agent._n_updates += 1
            update.epoch(self._minibatches(agent, wanted))
        return update.means()

    @staticmethod
    def _minibatches(agent: "GTrXLPPO", wanted: Tensor) -> Iterator[TaughtSegments]:
        """All segments once, in random order, with the teacher's outputs (E, steps, C')."""
        buffer = agent.rollout_buffer
        for chosen in buffer.shuffled(agent.batch_size // agent.segment_length, agent.order):
            yield TaughtSegments(buffer.segments(chosen, buffer.advantages), buffer.rows(wanted, chosen))


def _check_teacher(student: "GTrXLPPO", teacher: "GTrXLPPO") -> None:
    if teacher is student:
        raise ValueError("the student is its own teacher: load another agent")
    check_teaches_by_itself(teacher.memory)
    for kind in ("observation_space", "action_space"):
        theirs, own = getattr(teacher, kind), getattr(student, kind)
        if theirs != own:
            raise ValueError(f"the teacher's {kind} is {theirs}, the student's {own}: both need the same")
    if teacher.across_episodes != student.across_episodes:
        raise ValueError(
            f"the teacher has across_episodes={teacher.across_episodes}, the student "
            f"across_episodes={student.across_episodes}: both go along with the same episodes"
        )
    if teacher.device != student.device:
        raise ValueError(
            f"the teacher is on {teacher.device}, the student on {student.device}: load both on one device"
        )
