"""Online distillation of a teacher into a student, in episodes of either agent."""

import warnings
from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import BernoulliDistribution, MultiCategoricalDistribution
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import kl_divergence

from rlxf import GTrXLPPO
from rlxf.agents.common.losses import Distillation
from rlxf.agents.gtrxl.action_heads import BernoulliHead
from rlxf.agents.gtrxl.distillation import (
    DistillationBatch,
    DistillationLoss,
    DistillationTraining,
    DistillationUpdate,
)
from rlxf.attention import ACT, CALM, KNNLM, RATE, RMT, SPALM, DepthAdaptive, StreamingXL
from rlxf.attention.token_index import EMPTY
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    VECTOR,
    last_outputs,
    make_loud,
    memory_core,
    next_step_scripts,
    parameters,
    recurrent_core,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.attention.oracle import close
from tests.covering import covering

ENVS = 3
LARGE = small_core(width=24, layers=2)
SMALL = small_core(width=8, layers=1)
WORLDS = {"same step": scripts, "next step": next_step_scripts}


def pair(env=None, actions="Discrete", **student):
    """Return a small student and a large teacher with the same environments."""
    env = scripts(shifted(ENVS), VECTOR, ACTIONS[actions]) if env is None else env
    settings = {"core": SMALL, "seed": 1} | student
    return small_agent(env, **settings), small_agent(env, core=LARGE, seed=2)


def collect_lessons(student, teacher, rollouts=1, actor="student"):
    """Collect rollouts without updates; return the algorithm, and inputs and teacher outputs of each."""
    student._algorithm = lesson = DistillationTraining(
        student.policy, teacher.policy, student.n_envs, Distillation(), actor, student.order
    )
    _, callback = student._setup_learn(10**6)
    records = []
    for _ in range(rollouts):
        buffer = student.rollout_buffer
        student.collect_rollouts(student.env, callback, buffer, student.n_steps)
        index = buffer.index.last(student.n_steps)
        outputs = torch.stack(lesson._outputs, dim=1)
        steps = (buffer.obs, buffer.previous, index.position, index.episode, outputs)
        records.append([part.clone() for part in steps])
    return lesson, records


def minibatch(student, lesson) -> DistillationBatch:
    """Return the whole last rollout as a minibatch."""
    buffer = student.rollout_buffer
    outputs = torch.stack(lesson._outputs, dim=1)
    every = torch.arange(student.n_envs * student.n_steps // student.segment_length)
    segments = buffer.segments(every, buffer.advantages)
    return DistillationBatch(**vars(segments), target=buffer.rows(outputs, every))


def loss_of(student, teacher, lesson, batch=None, **options):
    ppo = replace(student.objective(), vf_coef=0.5)
    likeness = DistillationLoss(Distillation(**options), teacher.policy, lesson.hidden, ppo)
    return likeness(student.policy, minibatch(student, lesson) if batch is None else batch)


def assert_teacher_equals_single_pass(student, teacher, actor="student"):
    """Check that the teacher's stepwise outputs equal those of a single pass; return the steps' episodes."""
    _, records = collect_lessons(student, teacher, rollouts=2, actor=actor)
    obs, previous, position, episode, outputs = (
        torch.cat(parts, dim=1) for parts in zip(*records, strict=True)
    )
    index = type(student.rollout_buffer.index)(position, episode)
    state = teacher.policy.transformer.initial_state(ENVS)
    read = last_outputs(teacher.policy, obs.flatten(0, 1), previous.flatten(0, 1), index, state)
    real = episode.flatten() >= 0
    # GatedDeltaNet divides small outputs by their root mean square, which enlarges the rounding of float32.
    close(outputs.flatten(0, 1)[real], read[real], 1e-5 if teacher.core.recurrence is None else 1e-4)
    return episode


@pytest.mark.parametrize("actor", ["student", "teacher"])
@pytest.mark.parametrize("world", WORLDS)
def test_teacher_has_its_own_memory(world, actor):
    episode = assert_teacher_equals_single_pass(*pair(WORLDS[world](shifted(ENVS))), actor)
    assert (episode == EMPTY).any() == (world == "next step")
    assert (episode.amax(1) > episode.amin(1)).all(), "episodes should have ended"


@pytest.mark.parametrize("world", WORLDS)
def test_teacher_memory_persists_across_episodes(world):
    env = WORLDS[world](shifted(ENVS))
    student, teacher = (
        small_agent(env, core=core, persist_memory_across_episodes=True) for core in (SMALL, LARGE)
    )
    assert (assert_teacher_equals_single_pass(student, teacher) == EMPTY).any() == (world == "next step")


def test_equal_student_has_zero_loss():
    env = scripts(shifted(ENVS))
    teacher = small_agent(env, core=LARGE)
    twin = small_agent(env, core=LARGE)
    twin.policy.load_state_dict(teacher.policy.state_dict())
    lesson, _ = collect_lessons(twin, teacher, rollouts=2)
    parts = loss_of(twin, teacher, lesson)
    assert abs(parts["distillation_loss"].item()) < 1e-5
    assert abs(parts["hidden_loss"].item()) < 1e-5


@pytest.mark.parametrize(
    ("actions", "actor"), [*((name, "student") for name in ACTIONS), ("Discrete", "teacher")]
)
def test_distillation_reduces_divergence(actions, actor):
    student, teacher = pair(actions=actions, learning_rate=3e-3, n_epochs=6, max_grad_norm=10.0)
    lesson, _ = collect_lessons(student, teacher)
    batch = minibatch(student, lesson)
    before, weights = (
        loss_of(student, teacher, lesson, batch)["distillation_loss"].item(),
        parameters(teacher),
    )
    student.distill(teacher, 2 * ENVS * student.n_steps, actor=actor)
    assert loss_of(student, teacher, lesson, batch)["distillation_loss"].item() < 0.9 * before
    assert same(weights, parameters(teacher))


@covering(
    2,
    cores={
        "XL teaches a recurrence": (recurrent_core(width=8, layers=1), LARGE),
        "a recurrence teaches XL": (SMALL, recurrent_core(width=24)),
    },
    world={name: name for name in WORLDS},
    actor={"student": "student", "teacher": "teacher"},
)
def test_distillation_between_recurrence_and_memory(cores, world, actor):
    assert_distils(*cores, world, actor)


@covering(
    1,
    cores={
        "XL teaches RMT": (memory_core(RMT(2, 2), width=8, layers=1), LARGE),
        "RATE teaches XL": (SMALL, memory_core(RATE(2, 2), width=24)),
        "RMT teaches StreamingXL": (
            memory_core(StreamingXL(6, 2), width=8, layers=1),
            memory_core(RMT(2, 3), width=24),
        ),
        "StreamingXL teaches RATE": (
            memory_core(RATE(2, 2), width=8, layers=1),
            memory_core(StreamingXL(6, 2), width=24),
        ),
    },
    world={name: name for name in WORLDS},
)
def test_distillation_between_memories(cores, world):
    assert_distils(*cores, world, "student")


def assert_distils(student, teacher, world, actor):
    """Check the teacher's memory, and that a student with another core approaches it."""
    env = WORLDS[world](shifted(ENVS))
    pupil = small_agent(env, core=student, seed=1, learning_rate=3e-3, n_epochs=6, max_grad_norm=10.0)
    master = small_agent(env, core=teacher, seed=2)
    assert_teacher_equals_single_pass(pupil, master, actor)
    lesson, _ = collect_lessons(pupil, master, actor=actor)
    batch = minibatch(pupil, lesson)
    before = loss_of(pupil, master, lesson, batch)["distillation_loss"].item()
    pupil.distill(master, 2 * ENVS * pupil.n_steps, actor=actor)
    assert loss_of(pupil, master, lesson, batch)["distillation_loss"].item() < 0.9 * before


def bent(agent, action):
    """Return an agent that always takes the same action."""
    with torch.no_grad():
        agent.policy.action_net.weight.zero_()
        agent.policy.action_net.bias.copy_(torch.tensor([100.0 * (a == action) for a in range(3)]))
    return agent


@pytest.mark.parametrize(("actor", "expected"), [("student", 0), ("teacher", 2)])
def test_actor_chooses_actions(actor, expected):
    student, teacher = pair()
    bent(student, 0), bent(teacher, 2)
    collect_lessons(student, teacher, actor=actor)
    assert (student.rollout_buffer.actions == expected).all()


@pytest.mark.parametrize("actions", ACTIONS)
def test_divergence_equals_torch(actions):
    agents = [make_loud(agent, 0.5) for agent in pair(actions=actions)]
    distributions = [agent.policy.heads(torch.randn(5, agent.core.width))[0] for agent in agents]
    student, teacher = (each.distribution for each in distributions)
    if isinstance(distributions[0], MultiCategoricalDistribution):
        expected = sum(kl_divergence(t, s) for t, s in zip(teacher, student, strict=True))
    else:
        expected = kl_divergence(teacher, student)
        expected = expected.sum(-1) if expected.dim() == 2 else expected
    head = agents[0].policy.action_head
    close(head.divergence(*distributions, temperature=1.0), expected, 1e-5)


def test_bits_are_binary_choices():
    logits = torch.tensor([[0.3, -2.0]]), torch.tensor([[-1.0, 0.5]])
    distributions = [BernoulliDistribution(2).proba_distribution(each) for each in logits]
    softened = [BernoulliDistribution(2).proba_distribution(each / 3).distribution for each in logits]
    expected = 9 * kl_divergence(softened[1], softened[0]).sum(-1)
    head = BernoulliHead(BernoulliDistribution(2))
    close(head.divergence(*distributions, temperature=3.0), expected, 1e-5)


def test_filler_rows_do_not_enter_the_loss():
    student, teacher = pair(next_step_scripts(shifted(ENVS)))
    lesson, _ = collect_lessons(student, teacher)
    batch = minibatch(student, lesson)
    filler = batch.weight == 0
    assert filler.any()
    loud = replace(batch, target=batch.target.masked_fill(filler[:, None], 1e3))
    for name, part in loss_of(student, teacher, lesson, batch).items():
        close(loss_of(student, teacher, lesson, loud)[name], part, 1e-6)


def test_gradients_reach_the_student_and_the_projection_alone():
    student, teacher = pair()
    lesson, _ = collect_lessons(student, teacher, rollouts=2)
    loss_of(student, teacher, lesson)["loss"].backward()
    learning = [*student.policy.named_parameters(), *lesson.hidden.projection.named_parameters()]
    for name, parameter in learning:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in teacher.policy.parameters())


def normalized(training):
    env = VecNormalize(scripts(shifted(ENVS)), norm_reward=False)
    env.training = training
    return env


@pytest.mark.parametrize(
    ("env", "warning"),
    [
        (scripts(shifted(ENVS)), "the teacher was trained on observations normalized .* return raw ones"),
        (normalized(training=True), "but those of the student's environments change in training"),
        (normalized(training=False), None),
    ],
    ids=["raw", "changing", "fixed"],
)
def test_teacher_of_normalized_observations_needs_its_statistics(env, warning):
    student, teacher = pair(env)
    teacher.normalized_observations = True
    with warnings.catch_warnings() if warning is None else pytest.warns(UserWarning, match=warning):
        warnings.simplefilter("error" if warning is None else "always")
        student.distill(teacher, 0)


class LosesTheFirst(BaseCallback):
    """Mark all steps of the first rollout as lost, and record the number of teacher outputs."""

    def __init__(self):
        super().__init__()
        self.held = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        if not self.held:
            self.model.rollout_buffer.index.episode.fill_(EMPTY)
        self.held.append(len(self.model._algorithm._outputs))


def test_lost_rollout_is_discarded():
    student, teacher = pair()
    watch, before = LosesTheFirst(), parameters(student)
    student.distill(teacher, 3 * ENVS * student.n_steps, callback=watch)
    assert watch.held == [student.n_steps] * 3
    assert not same(before, parameters(student))


LEAVING = {
    "CALM": CALM("classifier"),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("depth", LEAVING.values(), ids=LEAVING)
def test_student_with_early_exits_trains_them(depth):
    """Predictions of earlier outputs approach those of the last one, and the exit rule is trained."""
    core = replace(SMALL, layers=3, depth=depth)
    student, teacher = pair(core=core, learning_rate=3e-3, n_epochs=6, max_grad_norm=10.0)
    lesson, _ = collect_lessons(student, teacher)
    batch = minibatch(student, lesson)
    before, rule = loss_of(student, teacher, lesson, batch), parameters_of(student.policy.transformer.depth)
    assert before["exit_loss"] > 0
    exit_losses = sum(before[name] for name in ("exit_loss", "exit_prediction_loss"))
    close(before["loss"] - exit_losses, sum_of_teaching(before), 1e-5)
    student.distill(teacher, 2 * ENVS * student.n_steps)
    after = loss_of(student, teacher, lesson, batch)
    for name in ("exit_loss", "distillation_loss"):
        assert after[name] < 0.95 * before[name], name
    for old, new in zip(rule, student.policy.transformer.depth.parameters(), strict=True):
        assert (old != new).any()
    assert {"train/exit_loss", "train/exit_prediction_loss"} <= student.logger.name_to_value.keys()


def parameters_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def sum_of_teaching(parts):
    """Return the loss without auxiliary losses of the transformer, weighted as in `loss_of`."""
    return parts["distillation_loss"] + parts["hidden_loss"] + 0.5 * parts["value_loss"]


def test_student_with_adaptive_depth_logs_depth():
    student, teacher = pair(core=replace(SMALL, layers=3, depth=ACT()))
    lesson, _ = collect_lessons(student, teacher)
    parts = loss_of(student, teacher, lesson)
    assert 1 <= parts["mean_depth"] <= 3
    assert parts["penalty"] > 0
    close(parts["loss"] - parts["penalty"], sum_of_teaching(parts), 1e-5)


def test_observations_are_reconstructed():
    student, teacher = pair(reconstruction_coef=2.0)
    lesson, _ = collect_lessons(student, teacher)
    parts = loss_of(student, teacher, lesson)
    close(parts["loss"] - 2 * parts["reconstruction_loss"], sum_of_teaching(parts), 1e-5)
    before = parameters_of(student.policy.reconstruction_net)
    student.distill(teacher, 2 * ENVS * student.n_steps)
    assert not same(before, parameters_of(student.policy.reconstruction_net))


def test_values_are_clipped():
    """Values have no gradient if all of them have changed by more than the bound."""
    student, teacher = pair(clip_range_vf=1e-6)
    lesson, _ = collect_lessons(student, teacher)
    with torch.no_grad():
        student.policy.value_net.bias += 1
    loss_of(student, teacher, lesson)["value_loss"].backward()
    assert not student.policy.value_net.bias.grad


def test_target_kl_has_no_effect():
    student, teacher = pair(target_kl=1e-9)
    with pytest.warns(UserWarning, match="distill has no KL limit, target_kl=1e-09 has no effect"):
        student.distill(teacher, ENVS * student.n_steps)


def test_projection_is_trained():
    student, teacher = pair()
    lesson, _ = collect_lessons(student, teacher)
    before = lesson.hidden.projection.weight.clone()
    likeness = DistillationLoss(Distillation(), teacher.policy, lesson.hidden, student.objective())
    update = DistillationUpdate(student.policy, likeness, 0.5, None)
    update.epoch([minibatch(student, lesson)])
    assert not torch.equal(before, lesson.hidden.projection.weight)


def test_same_seed_gives_same_bits():
    def learned(seed):
        student, teacher = pair(seed=seed)
        return parameters(student.distill(teacher, 2 * ENVS * student.n_steps))

    first, again, other = learned(4), learned(4), learned(5)
    assert same(first, again)
    assert not same(first, other)


def test_student_continues_with_ppo_and_saves(tmp_path):
    student, teacher = pair(tensorboard_log=str(tmp_path))
    student.distill(teacher, 2 * ENVS * student.n_steps)
    student.learn(ENVS * student.n_steps, reset_num_timesteps=False)
    assert student.num_timesteps == 3 * ENVS * student.n_steps
    student.save(tmp_path / "student")
    assert same(parameters(student), parameters(GTrXLPPO.load(tmp_path / "student", device="cpu")))
    events = EventAccumulator(str(tmp_path / "GTrXLPPO_distilled_1")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"train/distillation_loss", "train/hidden_loss", "train/value_loss"}


def test_environments_are_reset_for_distillation():
    student, teacher = pair()
    student.learn(ENVS * student.n_steps)
    student.distill(teacher, ENVS * student.n_steps, reset_num_timesteps=False)
    first = student.rollout_buffer.index.last(student.n_steps).position[:, 0]
    assert (first == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": "Box"}, "the teacher's action_space is Box"),
        ({"observations": ACTIONS["Discrete"]}, "the teacher's observation_space is Discrete"),
    ],
)
def test_teacher_that_does_not_fit_is_rejected(options, message):
    student, _ = pair()
    env = scripts(
        shifted(ENVS), options.get("observations", VECTOR), ACTIONS[options.get("actions", "Discrete")]
    )
    with pytest.raises(ValueError, match=message):
        student.distill(small_agent(env), 48)


def test_unknown_actor_is_rejected():
    student, teacher = pair()
    with pytest.raises(ValueError, match="actor must be one of student, teacher, got 'both'"):
        student.distill(teacher, 48, actor="both")


@pytest.mark.parametrize("head", [KNNLM(k=2), SPALM(k=2)], ids=["kNN-LM", "SPALM"])
@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_teacher_with_datastore_is_rejected(actions, head):
    """Its heads alone would be distilled, but it acts with its datastore."""
    student, teacher = pair(actions=actions)
    teacher.attach_datastore(some_trajectories(VECTOR, ACTIONS[actions]), head)
    before = parameters(student)
    with pytest.raises(ValueError, match=r"call the teacher's detach_datastore\(\) first"):
        student.distill(teacher, 48)
    assert same(before, parameters(student))
    student.distill(teacher.detach_datastore(), 2 * ENVS * student.n_steps)
    assert not same(before, parameters(student))


def test_other_teachers_and_losses_are_rejected():
    student, teacher = pair()
    with pytest.raises(TypeError, match=r"teacher must be a GTrXLPPO, got 'agent\.zip'; open a file with"):
        student.distill("agent.zip", 48)
    with pytest.raises(TypeError, match=r"distillation must be a Distillation, .* got 0\.0"):
        student.distill(teacher, 48, distillation=0.0)


def test_agent_cannot_be_its_own_teacher():
    student, _ = pair()
    with pytest.raises(ValueError, match="teacher and student are the same agent"):
        student.distill(student, 48)
