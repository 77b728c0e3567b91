"""A student learns what a teacher would do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.decision_transformer.model import STATE_TOKENS
from rlxf.agents.distillation import Distillation
from rlxf.agents.losses import average
from rlxf.attention import ACT, CALM, KNNLM, SPALM, XL, DepthAdaptive, Window
from tests.agents.decision_transformer.worlds import ACTIONS, IMAGE, VECTOR, K, small_agent, some_trajectories
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


def pair(head="choice", student=None, teacher=None):
    """A small student and a large teacher of the same data."""
    actions, objective = HEADS[head]
    data = some_trajectories(VECTOR, actions)
    shared = {"trajectories": data, "objective": objective}
    return (
        small_agent(**shared, **({"core": SMALL, "seed": 1} | (student or {}))),
        small_agent(**shared, **({"core": LARGE, "seed": 2} | (teacher or {}))),
    )


def update_of(student, teacher, **options):
    return DistillationUpdate(student, teacher, Distillation(**options))


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
def test_a_student_that_is_the_teacher_has_nothing_to_learn(head):
    _, teacher = pair(head)
    twin, _ = pair(head, student={"core": LARGE})
    twin.policy.load_state_dict(teacher.policy.state_dict())
    for name, part in losses(twin, teacher).items():
        assert abs(part.item()) < 1e-6, name


@each_head
def test_another_one_has(head):
    for name, part in losses(*pair(head)).items():
        assert part.item() > 1e-3, name


@each_head
def test_distilling_brings_the_student_nearer(head):
    student, teacher = pair(head, student={"learning_rate": 1e-2, "batch_size": 32, "max_grad_norm": 10.0})
    before, taught = losses(student, teacher)["distillation_loss"].item(), weights(teacher)
    student.learn_from(teacher, 30)
    assert losses(student, teacher)["distillation_loss"].item() < 0.7 * before
    assert same(taught, weights(teacher))


def test_padding_does_not_enter_the_loss():
    student, teacher = pair()
    update = update_of(student, teacher)
    batch = update.windows(student.trajectories).starting_at([0, 2, 10])
    student.policy.eval()
    gone = ~batch.mask
    loud = replace(
        batch,
        observations=batch.observations.masked_fill(gone[..., None], 1e3),
        return_to_go=batch.return_to_go.masked_fill(gone, 1e3),
    )
    close(update.losses(loud)["loss"], update.losses(batch)["loss"], 1e-6)


def test_gradients_reach_the_student_and_the_projection_alone():
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


def test_without_hidden_states_their_loss_does_not_count():
    student, teacher = pair()
    parts = losses(student, teacher, hidden_coef=0.0)
    assert parts["loss"].item() == parts["distillation_loss"].item()
    assert parts["hidden_loss"].item() > 0


LEAVING = {
    "CALM": CALM("classifier"),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
}
each_depth = pytest.mark.parametrize("depth", LEAVING.values(), ids=LEAVING)


@each_depth
@each_head
def test_all_outputs_of_a_student_that_leaves_early_learn(depth, head):
    core = replace(SMALL, layers=3, depth=depth)
    student, teacher = pair(head, student={"core": core, "context_length": K + 2})
    update = update_of(student, teacher)
    student.policy.eval()
    batch = update.windows(student.trajectories).starting_at([0, 2, 10, 15])
    parts = update.losses(batch)
    close(parts["loss"] - parts["exit_lesson"], parts["distillation_loss"] + parts["hidden_loss"], 1e-5)
    model, both = student.policy, update.both
    steps = update._steps(model, batch, update.steps_read[0])
    outputs = model.exits(steps, STATE_TOKENS).outputs[:, :, -both:]
    wanted = update._read(teacher.policy, batch, update.steps_read[1])
    apart = [model.loss.head.distance(y, teacher.policy.loss.head, wanted, 2.0) for y in outputs]
    shares, weight = core.depth.shares(3).float(), batch.mask[:, -both:].float()
    told = sum(share * average(x, weight) for share, x in zip(shares, apart, strict=True))
    close(told, parts["distillation_loss"], 1e-5)
    parts["exit_lesson"].backward()
    learns = {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}
    assert learns
    assert all(name.startswith("transformer.depth") for name in learns)


@each_depth
def test_it_learns_when_to_leave(depth):
    core = replace(SMALL, layers=3, depth=depth)
    settings = {"core": core, "learning_rate": 1e-2, "batch_size": 32, "max_grad_norm": 10.0}
    student, teacher = pair(student=settings)
    before = losses(student, teacher)
    student.learn_from(teacher, 40)
    after = losses(student, teacher)
    assert after["exit_lesson"] < 0.95 * before["exit_lesson"]
    assert after["distillation_loss"] < 0.7 * before["distillation_loss"]


def test_a_student_that_ponders_tells_its_depth():
    parts = losses(*pair(student={"core": replace(SMALL, layers=3, depth=ACT())}))
    assert 1 <= parts["mean_depth"] <= 3
    assert parts["penalty"] > 0


@pytest.mark.parametrize("lengths", [(K, K + 4), (K + 4, K)], ids=["longer teacher", "longer student"])
@pytest.mark.parametrize("memory", [None, XL(7)], ids=["none", "XL"])
def test_each_reads_what_it_acts_from(lengths, memory):
    """At the newest step of a window the loss compares what both would do there."""
    own, theirs = lengths
    core = replace(LARGE, memory=memory, pattern=Window(8) if memory else LARGE.pattern)
    student, teacher = pair(student={"context_length": own}, teacher={"context_length": theirs, "core": core})
    update = update_of(student, teacher)
    start = 14  # the last episode has 14 steps, from step 14 on
    batch = update.windows(student.trajectories).starting_at([start])
    newest = start + own - 1
    student.policy.eval()
    teacher.policy.eval()
    for agent, steps in ((student, update.steps_read[0]), (teacher, update.steps_read[1])):
        window = agent.windows(student.trajectories)
        first = max(newest - agent.context_length + 1, start)
        alone = agent.policy.steps(replace_length(window, first, newest))
        close(
            update._read(agent.policy, batch, steps)[:, -1],
            agent.policy.read(alone)[:, -1],
            1e-5,
        )


def replace_length(windows, first, newest):
    """The window of an agent that ends with the step ``newest``."""
    windows.length, columns = newest - first + 1, windows._columns
    windows._columns = columns[-(windows.burn_in + windows.length) :]
    return windows.starting_at([first])


def test_the_same_seed_gives_the_same_bits():
    def learned(seed):
        student, teacher = pair(student={"seed": seed})
        return weights(student.learn_from(teacher, 3))

    first, again, other = learned(0), learned(0), learned(1)
    assert same(first, again)
    assert not same(first, other)


def test_a_student_saves_goes_on_and_learns_from_data(tmp_path):
    student, teacher = pair()
    student.learn_from(teacher, 3)
    student.save(tmp_path / "student")
    loaded = type(student).load(tmp_path / "student", student.trajectories, device="cpu")
    assert same(weights(student), weights(loaded))
    loaded.learn_from(teacher, 2, reset_num_timesteps=False)
    loaded.learn(2, reset_num_timesteps=False)
    assert loaded.num_timesteps == 7


def test_what_tensorboard_shows(tmp_path):
    student, teacher = pair(student={"tensorboard_log": str(tmp_path)})
    student.learn_from(teacher, 4, log_interval=2)
    events = EventAccumulator(str(tmp_path / "DecisionTransformer_distilled_1")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"train/loss", "train/distillation_loss", "train/hidden_loss", "train/grad_norm"}
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]


@pytest.mark.parametrize(
    ("data", "objective", "message"),
    [
        (some_trajectories(IMAGE, ACTIONS["Box"]), None, "teacher has other observations"),
        (some_trajectories(VECTOR, spaces.Discrete(4)), None, "teacher has other actions"),
        (
            some_trajectories(VECTOR, ACTIONS["Box"]),
            MaximumEntropy(),
            "by a Gaussian, the student by a Point",
        ),
    ],
    ids=["observations", "actions", "head"],
)
def test_a_teacher_that_does_not_fit_is_refused(data, objective, message):
    student = small_agent(some_trajectories(VECTOR, ACTIONS["Box"]))
    before = weights(student)
    with pytest.raises(ValueError, match=message):
        student.learn_from(small_agent(data, objective=objective), 1)
    assert same(before, weights(student))


@pytest.mark.parametrize("memory", [KNNLM(k=2), SPALM(k=2)], ids=["kNN-LM", "SPALM"])
@each_head
def test_a_teacher_that_remembers_is_refused(head, memory):
    """It would teach what its head says, and acts otherwise."""
    student, teacher = pair(head)
    teacher.remember(teacher.trajectories, memory)
    before = weights(student)
    with pytest.raises(ValueError, match=r"call its forget\(\) first"):
        student.learn_from(teacher, 1)
    assert same(before, weights(student))
    student.learn_from(teacher.forget(), 1)
    assert not same(before, weights(student))


def test_a_student_without_data_is_refused(tmp_path):
    student, teacher = pair()
    student.save(tmp_path / "student")
    loaded = type(student).load(tmp_path / "student", device="cpu")
    with pytest.raises(ValueError, match="loaded without data"):
        loaded.learn_from(teacher, 1)
    assert np.isfinite(loaded.return_scale)
