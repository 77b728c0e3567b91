"""Tests of the distillation of Decision Transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.agents.common.losses import Distillation, masked_mean
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.decision_transformer.model import DECISION_TOKENS
from rlxf.agents.offline.objectives import QRegularized
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.attention import ACT, CALM, KNNLM, SPALM, XL, DepthAdaptive, Window
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    IMAGE,
    VECTOR,
    K,
    small_agent,
    small_pretraining,
    some_trajectories,
)
from tests.attention.oracle import close

LARGE = decision_transformer(width=24, layers=2, heads=2, dropout=0.0)
SMALL = decision_transformer(width=8, layers=1, heads=2, dropout=0.0)
HEADS = {
    "point": (ACTIONS["Box"], None),
    "gaussian": (ACTIONS["Box"], MaximumEntropy()),
    "choice": (ACTIONS["Discrete"], None),
    "choices": (ACTIONS["MultiDiscrete"], MaximumEntropy()),
}
each_head = pytest.mark.parametrize("head", HEADS)


def test_distillation_does_not_count_as_updates_of_a_critic():
    """A critic that is not trained must not guide the policy, so its warm-up does not begin."""
    data = some_trajectories(VECTOR, ACTIONS["Box"])
    student = small_agent(data, objective=QRegularized(hidden_sizes=(8,), warmup_updates=4))
    student.distill(small_agent(data), 6)
    assert student.policy.loss.updates == 0
    student.learn(2)
    assert student.policy.loss.updates == 2


def pair(head="choice", student=None, teacher=None):
    """Return a small student and a large teacher for the same data."""
    actions, objective = HEADS[head]
    data = some_trajectories(VECTOR, actions)
    common = {"trajectories": data, "objective": objective}
    return (
        small_agent(**common, **({"core": SMALL, "seed": 1} | (student or {}))),
        small_agent(**common, **({"core": LARGE, "seed": 2} | (teacher or {}))),
    )


def update_of(student, teacher, **options):
    own = OfflineUpdate(student.policy, student.optimizer, student.max_grad_norm)
    lengths = student.context_length, teacher.context_length
    return DistillationUpdate(own, teacher.policy, lengths, Distillation(**options), student.generator)


def losses(student, teacher, starts=(0, 2, 10, 15), **options):
    update = update_of(student, teacher, **options)
    batch = update.windows(student.trajectories).starting_at(list(starts))
    assert not batch.mask.all()
    student.policy.eval()
    return update.losses(batch)


def weights(agent):
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


@each_head
def test_losses_are_zero_for_equal_weights(head):
    _, teacher = pair(head)
    twin, _ = pair(head, student={"core": LARGE})
    twin.policy.load_state_dict(teacher.policy.state_dict())
    for name, part in losses(twin, teacher).items():
        assert abs(part.item()) < 1e-6, name


@each_head
def test_losses_are_positive_for_other_weights(head):
    for name, part in losses(*pair(head)).items():
        assert part.item() > 1e-3, name


FAST = {"learning_rate": 1e-2, "batch_size": 32, "max_grad_norm": 10.0}


@each_head
def test_distillation_reduces_the_loss_and_keeps_the_teacher(head):
    assert_distils(*pair(head, student=FAST))


@pytest.mark.parametrize("learns", [True, False], ids=["XL teaches a recurrence", "a recurrence teaches XL"])
def test_distillation_between_recurrence_and_memory(learns):
    cores = CORES["Gated DeltaNet"], CORES["memory"]
    student, teacher = cores if learns else cores[::-1]
    assert_distils(*pair(student=FAST | {"core": student}, teacher={"core": teacher}))


@pytest.mark.parametrize(
    ("learns", "teaches"),
    [
        *[("memory tokens", "memory"), ("memory", "retention valve")],
        *[("attention sinks", "memory tokens"), ("retention valve", "attention sinks")],
    ],
)
def test_distillation_between_memories(learns, teaches):
    assert_distils(*pair(student=FAST | {"core": CORES[learns]}, teacher={"core": CORES[teaches]}))


def assert_distils(student, teacher):
    before, teacher_weights = losses(student, teacher)["distillation_loss"].item(), weights(teacher)
    student.distill(teacher, 30)
    assert losses(student, teacher)["distillation_loss"].item() < 0.7 * before
    assert same(teacher_weights, weights(teacher))


def test_padding_does_not_enter_the_loss():
    student, teacher = pair()
    update = update_of(student, teacher)
    batch = update.windows(student.trajectories).starting_at([0, 2, 10])
    student.policy.eval()
    padding = ~batch.mask
    changed = replace(
        batch,
        observations=batch.observations.masked_fill(padding[..., None], 1e3),
        return_to_go=batch.return_to_go.masked_fill(padding, 1e3),
    )
    close(update.losses(changed)["loss"], update.losses(batch)["loss"], 1e-6)


def test_gradients_reach_only_student_and_projection():
    student, teacher = pair()
    update = update_of(student, teacher)
    batch = update.windows(student.trajectories).starting_at([0, 2, 10])
    update.losses(batch)["loss"].backward()
    for name, parameter in [
        *student.policy.named_parameters(),
        *update.hidden.projection.named_parameters(),
    ]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in teacher.policy.parameters())


def test_hidden_coef_0_removes_the_hidden_loss():
    student, teacher = pair()
    parts = losses(student, teacher, hidden_coef=0.0)
    assert parts["loss"].item() == parts["distillation_loss"].item()
    assert parts["hidden_loss"].item() > 0


EARLY_EXITS = {
    "CALM": CALM("classifier"),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
}
each_depth = pytest.mark.parametrize("depth", EARLY_EXITS.values(), ids=EARLY_EXITS)


@each_depth
@each_head
def test_all_exits_of_a_student_are_distilled(depth, head):
    core = replace(SMALL, layers=3, depth=depth)
    student, teacher = pair(head, student={"core": core, "context_length": K + 2})
    update = update_of(student, teacher)
    student.policy.eval()
    batch = update.windows(student.trajectories).starting_at([0, 2, 10, 15])
    parts = update.losses(batch)
    close(
        parts["loss"] - parts["exit_prediction_loss"], parts["distillation_loss"] + parts["hidden_loss"], 1e-5
    )
    model, both = student.policy, update.shared_steps
    steps = model.steps(batch).between(-update.steps_read[0])
    outputs = model.exits(steps, DECISION_TOKENS).outputs[:, :, -both:]
    targets = teacher.policy.outputs(teacher.policy.steps(batch).between(-update.steps_read[1]))
    distances = [
        model.loss.head.distillation_loss(y, teacher.policy.loss.head, targets, 2.0) for y in outputs
    ]
    weights_of_layers, mask = core.depth.loss_weights(3).float(), batch.mask[:, -both:].float()
    pairs = zip(weights_of_layers, distances, strict=True)
    close(sum(weight * masked_mean(x, mask) for weight, x in pairs), parts["distillation_loss"], 1e-5)
    parts["exit_prediction_loss"].backward()
    trained = {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}
    assert trained
    assert all(name.startswith("transformer.depth") for name in trained)


@pytest.mark.first_cases(1)
@each_depth
def test_exit_prediction_is_trained(depth):
    core = replace(SMALL, layers=3, depth=depth)
    settings = {"core": core, "learning_rate": 1e-2, "batch_size": 32, "max_grad_norm": 10.0}
    student, teacher = pair(student=settings)
    before = losses(student, teacher)
    student.distill(teacher, 40)
    after = losses(student, teacher)
    assert after["exit_prediction_loss"] < 0.95 * before["exit_prediction_loss"]
    assert after["distillation_loss"] < 0.7 * before["distillation_loss"]


def test_an_act_student_reports_its_depth():
    parts = losses(*pair(student={"core": replace(SMALL, layers=3, depth=ACT())}))
    assert 1 <= parts["mean_depth"] <= 3
    assert parts["penalty"] > 0


@pytest.mark.parametrize("lengths", [(K, K + 4), (K + 4, K)], ids=["longer teacher", "longer student"])
@pytest.mark.parametrize("memory", [None, XL(7)], ids=["none", "XL"])
def test_training_context_equals_acting_context(lengths, memory):
    """The outputs at the newest step of a window equal those of acting with the full context."""
    own, other = lengths
    core = replace(LARGE, memory=memory, pattern=Window(8) if memory else LARGE.pattern)
    student, teacher = pair(student={"context_length": own}, teacher={"context_length": other, "core": core})
    update = update_of(student, teacher)
    start = 14  # the last episode begins at step 14 and has 14 steps
    newest = start + 5 + K - 1
    batch = update.windows(student.trajectories).starting_at([start + 5])
    student.policy.eval()
    teacher.policy.eval()
    for agent, steps in ((student, update.steps_read[0]), (teacher, update.steps_read[1])):
        window = agent.windows(student.trajectories)
        first = max(newest - agent.context_length + 1, start)
        alone = agent.policy.steps(replace_length(window, first, newest))
        close(
            agent.policy.outputs(agent.policy.steps(batch).between(-steps))[:, -1],
            agent.policy.outputs(alone)[:, -1],
            1e-5,
        )


@pytest.mark.parametrize("lengths", [(K, K + 4), (K + 4, K)], ids=["longer teacher", "longer student"])
def test_the_first_steps_of_episodes_are_trained(lengths):
    own, other = lengths
    student, teacher = pair(student={"context_length": own}, teacher={"context_length": other})
    data = student.trajectories
    batch = update_of(student, teacher).windows(data).starting_at(data.offsets[:-1])
    in_loss = batch.time_steps[:, -K:][batch.mask[:, -K:]]
    assert {*range(K)} <= {*in_loss.tolist()}, "windows that begin with an episode"


def replace_length(windows, first, newest):
    """Return the window of an agent that ends with the step ``newest``."""
    windows.length, columns = newest - first + 1, windows._columns
    windows._columns = columns[-(windows.burn_in + windows.length) :]
    return windows.starting_at([first])


def test_equal_seeds_give_bitwise_equal_weights():
    def learned(seed):
        student, teacher = pair(student={"seed": seed})
        return weights(student.distill(teacher, 3))

    first, again, other = learned(0), learned(0), learned(1)
    assert same(first, again)
    assert not same(first, other)


def test_a_distilled_student_can_be_saved_and_trained_further(tmp_path):
    student, teacher = pair()
    student.distill(teacher, 3)
    student.save(tmp_path / "student")
    loaded = type(student).load(tmp_path / "student", student.trajectories, device="cpu")
    assert same(weights(student), weights(loaded))
    loaded.distill(teacher, 2, reset_num_timesteps=False)
    loaded.learn(2, reset_num_timesteps=False)
    assert loaded.num_timesteps == 7


def test_tensorboard_tags(tmp_path):
    student, teacher = pair(student={"tensorboard_log": str(tmp_path)})
    student.distill(teacher, 4, log_interval=2)
    events = EventAccumulator(str(tmp_path / "DecisionTransformer_distilled_1")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"train/loss", "train/distillation_loss", "train/hidden_loss", "train/grad_norm"}
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]


@pytest.mark.parametrize(
    ("data", "objective", "message"),
    [
        (
            some_trajectories(IMAGE, ACTIONS["Box"]),
            None,
            "the observations of teacher and student must match",
        ),
        (
            some_trajectories(VECTOR, spaces.Discrete(4)),
            None,
            "the actions of teacher and student must match",
        ),
        (
            some_trajectories(VECTOR, ACTIONS["Box"]),
            MaximumEntropy(),
            "got SquashedGaussianHead and DeterministicHead: give both the same objective",
        ),
    ],
    ids=["observations", "actions", "head"],
)
def test_an_incompatible_teacher_is_refused(data, objective, message):
    student = small_agent(some_trajectories(VECTOR, ACTIONS["Box"]))
    before = weights(student)
    with pytest.raises(ValueError, match=message):
        student.distill(small_agent(data, objective=objective), 1)
    assert same(before, weights(student))


@pytest.mark.parametrize(
    ("teacher", "options", "error", "message"),
    [
        (
            "agent.zip",
            {},
            TypeError,
            "teacher must be a DecisionTransformer, got 'agent.zip'; open a file with",
        ),
        (
            small_pretraining(),
            {},
            TypeError,
            "teacher must be a DecisionTransformer, got <.*MaskedPretraining",
        ),
        (None, {}, ValueError, "teacher and student are the same agent"),
        (small_agent(), {"distillation": 0.5}, TypeError, "distillation must be a Distillation, .* got 0.5"),
    ],
    ids=["path", "class", "self", "distillation"],
)
def test_wrong_arguments_of_distill_are_refused(teacher, options, error, message):
    student = small_agent()
    with pytest.raises(error, match=message):
        student.distill(student if teacher is None else teacher, 1, **options)


@pytest.mark.parametrize("memory", [KNNLM(k=2), SPALM(k=2)], ids=["kNN-LM", "SPALM"])
@each_head
def test_a_teacher_with_a_datastore_is_refused(head, memory):
    """Its head's predictions differ from its actions, which also depend on the datastore."""
    student, teacher = pair(head)
    teacher.attach_datastore(teacher.trajectories, memory)
    before = weights(student)
    with pytest.raises(ValueError, match=r"call the teacher's detach_datastore\(\) first"):
        student.distill(teacher, 1)
    assert same(before, weights(student))
    student.distill(teacher.detach_datastore(), 1)
    assert not same(before, weights(student))


def test_a_student_without_a_dataset_is_refused(tmp_path):
    student, teacher = pair()
    student.save(tmp_path / "student")
    loaded = type(student).load(tmp_path / "student", device="cpu")
    with pytest.raises(ValueError, match="loaded without data"):
        loaded.distill(teacher, 1)
    assert np.isfinite(loaded.return_scale)
