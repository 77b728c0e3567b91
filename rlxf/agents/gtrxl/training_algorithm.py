"""Training algorithms on rollouts: the interface, the minibatch updates, PPO, and online distillation."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor, nn

from rlxf.agents.common.accumulation import Losses, accumulate_gradients
from rlxf.agents.common.datastore import TEACHER_REASON, check_no_datastore
from rlxf.agents.common.gradient_programs import GradientSetter
from rlxf.agents.common.losses import Distillation, HiddenStateDistance, masked_mean
from rlxf.agents.common.numerics import check_parameters, clip_grad_norm_checked, naming_output_faults
from rlxf.agents.gtrxl.compiled_losses import CompiledPPOLosses
from rlxf.agents.gtrxl.heads import divergence
from rlxf.agents.gtrxl.losses import PPOLoss, segment_outputs, total_loss
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout_buffer import SegmentBatch, SegmentBuffer
from rlxf.attention import TokenIndex
from rlxf.training.distributed import process_group
from rlxf.training.process_group import ProcessGroup


@dataclass
class PolicyUpdate:
    """Optimizer steps of an update, with their metrics.

    Args:
        policy: the policy to train.
        objective: returns "loss" and its terms for a minibatch.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        target_kl: stop if the KL divergence of a minibatch exceeds 1.5 times this; None for never.
        coefficients: coefficients of the objective, to be reported with the metrics.
        accumulation_steps: number of micro-batches into which each minibatch is divided.
        ranks: the process group; each process has a part of a minibatch, and all stop together.
        compiled: computes losses and gradients as one program; None to run their operations one by one,
            as for micro-batches and for several processes.
    """

    policy: GTrXLPolicy
    objective: Callable[[GTrXLPolicy, Any], Losses]
    max_grad_norm: float
    target_kl: float | None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    accumulation_steps: int = 1
    ranks: ProcessGroup = field(default_factory=process_group)
    compiled: CompiledPPOLosses | None = None
    _set_gradients: GradientSetter | None = field(default=None, init=False)
    _parameters: Sequence[nn.Parameter] = field(init=False)
    _metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._parameters = list(self.policy.parameters())

    def epoch(self, minibatches: Iterable[Any]) -> bool:
        """Take an optimizer step for each minibatch; return False if ``target_kl`` stopped the update.

        Raises:
            NumericalError: before the optimizer step, if the loss or a gradient is not finite.
        """
        for batch in minibatches:
            losses = self.ranks.fail_together(partial(self._losses, batch))
            parts = self.ranks.reduce_means(losses, batch.weight.sum())
            self._record(parts)
            if self.target_kl is not None and parts["approx_kl"] > 1.5 * self.target_kl:
                self.policy.transformer.skip_update()
                self._discard_accumulated()
                return False
            with naming_output_faults(partial(self.objective, self.policy, batch)):
                self._step(parts)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the minibatches so far, and the coefficients."""
        means = {name: torch.stack(values).mean().item() for name, values in self._metrics.items()}
        return means | dict(self.coefficients)

    def _losses(self, batch: Any) -> Losses:
        """Return the losses of a minibatch, with the gradients of all its micro-batches but the last."""
        objective = partial(self.objective, self.policy)
        if self.accumulation_steps == 1:
            losses, self._set_gradients = self._compiled_losses(batch) or (objective(batch), None)
            return losses
        self._clear_gradients()
        micro_batches = batch.split(self.accumulation_steps)
        return accumulate_gradients(objective, micro_batches, lambda part: part.weight.sum(), self.ranks)

    def _compiled_losses(self, batch: Any) -> tuple[Losses, GradientSetter] | None:
        if self.compiled is None or self.ranks.world_size > 1:
            return None
        return self.compiled(self.policy, self.objective, batch)  # type: ignore[arg-type]  # PPO's loss

    def _clear_gradients(self) -> None:
        self.policy.optimizer.zero_grad()

    def _discard_accumulated(self) -> None:
        """Clear the gradients of a minibatch without a step; those of the last step stay, for the log."""
        if self.accumulation_steps > 1:
            self._clear_gradients()

    def _step(self, parts: Losses) -> None:
        if self._set_gradients is None:
            self._backward(parts["loss"])
        else:
            self._clear_gradients()  # also those of parameters that are no longer trained
            self._set_gradients()
            if self.target_kl is not None:
                self._copy_gradients()
        self.ranks.all_reduce_gradients(self._parameters)
        norm = clip_grad_norm_checked(parts, self.policy, self._parameters, self.max_grad_norm)
        self._record({"grad_norm": norm})
        self.policy.optimizer.step()
        self.policy.transformer.after_update()

    def _copy_gradients(self) -> None:
        """Copy the gradients, whose memory a captured program overwrites in the minibatch that stops."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _backward(self, loss: Tensor) -> None:
        if self.accumulation_steps == 1:
            self._clear_gradients()
        loss.backward()

    def _record(self, parts: Losses) -> None:
        for name, value in parts.items():
            self._metrics[name].append(value.detach())


class TrainingAlgorithm(ABC):
    """Training algorithm: chooses the actions of a rollout, and provides the update after it.

    Args:
        policy: the policy to train.
        order: generator of the order of minibatches.
    """

    resumable: ClassVar[bool]
    """True if the algorithm has no state between two rollouts, so that a training run can be resumed."""

    def __init__(self, policy: GTrXLPolicy, order: torch.Generator):
        self.policy, self.order = policy, order

    @abstractmethod
    def start_rollout(self) -> None:
        """Start a rollout, and discard data of a previous one that had no update."""

    @abstractmethod
    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample the actions of one step of E environments.

        Args:
            obs: E observations.
            index: (E, 1), position and episode of the step.
            own: action distribution of the agent.
        """

    @abstractmethod
    def start_update(
        self, loss: PPOLoss, max_grad_norm: float, target_kl: float | None, accumulation_steps: int = 1
    ) -> PolicyUpdate:
        """Return the update of the policy after a rollout.

        Args:
            loss: PPO's loss with the current coefficients.
            max_grad_norm: maximum gradient norm; larger gradients are clipped.
            target_kl: bound on the KL divergence, see `PolicyUpdate`.
            accumulation_steps: number of micro-batches, see `PolicyUpdate`.
        """

    @abstractmethod
    def minibatches(self, buffer: SegmentBuffer, segments: int, advantages: Tensor) -> Iterable[Any]:
        """Yield minibatches that together contain all segments of the rollout once, in random order.

        Arguments as in `SegmentBuffer`.
        """


class PPOTraining(TrainingAlgorithm):
    """PPO: actions are sampled from the policy, which is trained with advantages.

    Args:
        policy: the policy to train.
        order: generator of the order of minibatches.
        compiles: True to compile updates, or to capture them on a GPU, see `CompiledPPOLosses`.
    """

    resumable = True

    def __init__(self, policy: GTrXLPolicy, order: torch.Generator, compiles: bool = False):
        super().__init__(policy, order)
        self._compiled = CompiledPPOLosses(policy.device.type) if compiles else None

    def start_rollout(self) -> None:
        """Do nothing: PPO stores no data outside of the rollout buffer."""

    def choose(self, obs: PyTorchObs, index: TokenIndex, own: Distribution) -> Tensor:
        """Sample from the distribution of the policy."""
        return self.policy.explore(own)

    def start_update(
        self, loss: PPOLoss, max_grad_norm: float, target_kl: float | None, accumulation_steps: int = 1
    ) -> PolicyUpdate:
        """Return an update with PPO's loss."""
        coefficients = {"clip_range": loss.clip_range, "ent_coef": loss.ent_coef}
        return PolicyUpdate(
            self.policy,
            loss,
            max_grad_norm=max_grad_norm,
            target_kl=target_kl,
            coefficients=coefficients,
            accumulation_steps=accumulation_steps,
            compiled=self._compiled,
        )

    def minibatches(self, buffer: SegmentBuffer, segments: int, advantages: Tensor) -> Iterable[SegmentBatch]:
        """Yield the minibatches of the buffer."""
        return buffer.minibatches(segments, advantages, self.order, process_group())


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
        kl = masked_mean(divergence(student, teacher, self.distillation.temperature), batch.weight)
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
    if teacher is student:
        raise ValueError("teacher and student are the same agent: pass another agent as the teacher")
    check_parameters(teacher)
    check_no_datastore(None if teacher.retrieval is None else teacher.retrieval.datastore, TEACHER_REASON)
    for name in ("observation_space", "action_space", "persist_memory_across_episodes", "device"):
        expected, actual = getattr(student, name), getattr(teacher, name)
        if expected != actual:
            raise ValueError(
                f"the teacher's {name} is {actual}, the student's is {expected}: they must be equal"
            )
