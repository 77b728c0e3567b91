"""A student learns what a teacher would do, in episodes that either of them plays."""

from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import BernoulliDistribution, MultiCategoricalDistribution
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import kl_divergence

from rlxf import GTrXLPPO
from rlxf.agents.distillation import Distillation
from rlxf.agents.gtrxl.distillation import DistillationUpdate, Likeness, TaughtSegments, Teaching, divergence
from rlxf.attention import ACT, CALM, KNNLM, SPALM, DepthAdaptive
from rlxf.attention.index import EMPTY
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    VECTOR,
    make_loud,
    next_step_scripts,
    parameters,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.attention.oracle import close

ENVS = 3
LARGE = small_core(width=24, layers=2)
SMALL = small_core(width=8, layers=1)
WORLDS = {"same step": scripts, "next step": next_step_scripts}


def pair(env=None, actions="Discrete", **student):
    """A small student and a large teacher of the same environments."""
    env = scripts(shifted(ENVS), VECTOR, ACTIONS[actions]) if env is None else env
    settings = {"core": SMALL, "seed": 1} | student
    return small_agent(env, **settings), small_agent(env, core=LARGE, seed=2)


def taught(student, teacher, rollouts=1, actor="student"):
    """Play so many rollouts without learning; gives the lesson, and of each all that was noted."""
    student._lesson = lesson = Teaching(student, teacher, Distillation(), actor)
    _, callback = student._setup_learn(10**6)
    noted = []
    for _ in range(rollouts):
        buffer = student.rollout_buffer
        student.collect_rollouts(student.env, callback, buffer, student.n_steps)
        index = buffer.index.last(student.n_steps)
        outputs = torch.stack(lesson._outputs, dim=1)
        steps = (buffer.obs, buffer.previous, index.position, index.episode, outputs)
        noted.append([part.clone() for part in steps])
    return lesson, noted


def minibatch(student, lesson) -> TaughtSegments:
    """The whole last rollout."""
    buffer = student.rollout_buffer
    wanted = torch.stack(lesson._outputs, dim=1)
    every = torch.arange(student.n_envs * student.n_steps // student.segment_length)
    return TaughtSegments(buffer.segments(every, buffer.advantages), buffer.rows(wanted, every))


def loss_of(student, teacher, lesson, batch=None, **options):
    likeness = Likeness(Distillation(**options), teacher.policy, lesson.hidden, vf_coef=0.5)
    return likeness(student.policy, minibatch(student, lesson) if batch is None else batch)


def assert_goes_along(student, teacher, actor="student"):
    """What the teacher noted step by step is what it reads in one pass over all steps of all episodes.

    Gives the episodes of all steps.
    """
    _, noted = taught(student, teacher, rollouts=2, actor=actor)
    obs, previous, position, episode, told = (torch.cat(parts, dim=1) for parts in zip(*noted, strict=True))
    index = type(student.rollout_buffer.index)(position, episode)
    state = teacher.policy.transformer.initial_state(ENVS)
    read = teacher.policy.read(obs.flatten(0, 1), previous.flatten(0, 1), index, state)
    real = episode.flatten() >= 0
    close(told.flatten(0, 1)[real], read[real], 1e-5)
    return episode


@pytest.mark.parametrize("actor", ["student", "teacher"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_teacher_goes_along_with_a_memory_of_its_own(world, actor):
    episode = assert_goes_along(*pair(WORLDS[world](shifted(ENVS))), actor)
    assert (episode == EMPTY).any() == (world == "next step")
    assert (episode.amax(1) > episode.amin(1)).all(), "episodes should have ended"


@pytest.mark.parametrize("world", WORLDS)
def test_the_teacher_goes_along_across_episodes(world):
    env = WORLDS[world](shifted(ENVS))
    student, teacher = (small_agent(env, core=core, across_episodes=True) for core in (SMALL, LARGE))
    assert (assert_goes_along(student, teacher) == EMPTY).any() == (world == "next step")


def test_a_student_that_is_the_teacher_has_nothing_to_learn():
    env = scripts(shifted(ENVS))
    teacher = small_agent(env, core=LARGE)
    twin = small_agent(env, core=LARGE)
    twin.policy.load_state_dict(teacher.policy.state_dict())
    lesson, _ = taught(twin, teacher, rollouts=2)
    parts = loss_of(twin, teacher, lesson)
    assert abs(parts["distillation_loss"].item()) < 1e-5
    assert abs(parts["hidden_loss"].item()) < 1e-5


@pytest.mark.parametrize(
    ("actions", "actor"), [*((name, "student") for name in ACTIONS), ("Discrete", "teacher")]
)
def test_distilling_brings_the_student_nearer(actions, actor):
    student, teacher = pair(actions=actions, learning_rate=3e-3, n_epochs=6, max_grad_norm=10.0)
    lesson, _ = taught(student, teacher)
    batch = minibatch(student, lesson)
    before, weights = (
        loss_of(student, teacher, lesson, batch)["distillation_loss"].item(),
        parameters(teacher),
    )
    student.learn_from(teacher, 2 * ENVS * student.n_steps, actor=actor)
    assert loss_of(student, teacher, lesson, batch)["distillation_loss"].item() < 0.9 * before
    assert same(weights, parameters(teacher))


def bent(agent, action):
    """An agent that always does the same."""
    with torch.no_grad():
        agent.policy.action_net.weight.zero_()
        agent.policy.action_net.bias.copy_(torch.tensor([100.0 * (a == action) for a in range(3)]))
    return agent


@pytest.mark.parametrize(("actor", "expected"), [("student", 0), ("teacher", 2)])
def test_who_acts_is_as_said(actor, expected):
    student, teacher = pair()
    bent(student, 0), bent(teacher, 2)
    taught(student, teacher, actor=actor)
    assert (student.rollout_buffer.actions == expected).all()


@pytest.mark.parametrize("actions", ACTIONS)
def test_divergence_is_torchs(actions):
    agents = [make_loud(agent, 0.5) for agent in pair(actions=actions)]
    told = [agent.policy.heads(torch.randn(5, agent.core.width))[0] for agent in agents]
    student, teacher = (each.distribution for each in told)
    if isinstance(told[0], MultiCategoricalDistribution):
        expected = sum(kl_divergence(t, s) for t, s in zip(teacher, student, strict=True))
    else:
        expected = kl_divergence(teacher, student)
        expected = expected.sum(-1) if expected.dim() == 2 else expected
    close(divergence(*told, temperature=1.0), expected, 1e-5)


def test_what_is_on_or_off_is_a_choice_of_two():
    logits = torch.tensor([[0.3, -2.0]]), torch.tensor([[-1.0, 0.5]])
    told = [BernoulliDistribution(2).proba_distribution(each) for each in logits]
    softened = [BernoulliDistribution(2).proba_distribution(each / 3).distribution for each in logits]
    expected = 9 * kl_divergence(softened[1], softened[0]).sum(-1)
    close(divergence(*told, temperature=3.0), expected, 1e-5)


def test_filler_rows_do_not_enter_the_loss():
    student, teacher = pair(next_step_scripts(shifted(ENVS)))
    lesson, _ = taught(student, teacher)
    batch = minibatch(student, lesson)
    filler = batch.segments.weight == 0
    assert filler.any()
    loud = TaughtSegments(batch.segments, batch.wanted.masked_fill(filler[:, None], 1e3))
    for name, part in loss_of(student, teacher, lesson, batch).items():
        close(loss_of(student, teacher, lesson, loud)[name], part, 1e-6)


def test_gradients_reach_the_student_and_the_projection_alone():
    student, teacher = pair()
    lesson, _ = taught(student, teacher, rollouts=2)
    loss_of(student, teacher, lesson)["loss"].backward()
    learning = [*student.policy.named_parameters(), *lesson.hidden.projection.named_parameters()]
    for name, parameter in learning:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in teacher.policy.parameters())


class LosesTheFirst(BaseCallback):
    """All steps of the first rollout are lost, as when environments break; notes how much was taught."""

    def __init__(self):
        super().__init__()
        self.held = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        if not self.held:
            self.model.rollout_buffer.index.episode.fill_(EMPTY)
        self.held.append(len(self.model._lesson._outputs))


def test_a_lost_rollout_leaves_nothing_behind():
    student, teacher = pair()
    watch, before = LosesTheFirst(), parameters(student)
    student.learn_from(teacher, 3 * ENVS * student.n_steps, callback=watch)
    assert watch.held == [student.n_steps] * 3
    assert not same(before, parameters(student))


LEAVING = {
    "CALM": CALM("classifier"),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
}


@pytest.mark.parametrize("depth", LEAVING.values(), ids=LEAVING)
def test_a_student_that_leaves_early_learns_to(depth):
    """What is read off outputs before the last comes nearer to it, and what says when to leave learns."""
    core = replace(SMALL, layers=3, depth=depth)
    student, teacher = pair(core=core, learning_rate=3e-3, n_epochs=6, max_grad_norm=10.0)
    lesson, _ = taught(student, teacher)
    batch = minibatch(student, lesson)
    before, rule = loss_of(student, teacher, lesson, batch), parameters_of(student.policy.transformer.depth)
    assert before["exit_loss"] > 0
    apart = sum(before[name] for name in ("exit_loss", "exit_lesson"))
    close(before["loss"] - apart, sum_of_teaching(before), 1e-5)
    student.learn_from(teacher, 2 * ENVS * student.n_steps)
    after = loss_of(student, teacher, lesson, batch)
    for name in ("exit_loss", "distillation_loss"):
        assert after[name] < 0.95 * before[name], name
    for old, new in zip(rule, student.policy.transformer.depth.parameters(), strict=True):
        assert (old != new).any()
    assert {"train/exit_loss", "train/exit_lesson"} <= student.logger.name_to_value.keys()


def parameters_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def sum_of_teaching(parts):
    """The loss without what the transformer adds, as `loss_of` weighs it."""
    return parts["distillation_loss"] + parts["hidden_loss"] + 0.5 * parts["value_loss"]


def test_a_student_that_ponders_tells_its_depth():
    student, teacher = pair(core=replace(SMALL, layers=3, depth=ACT()))
    lesson, _ = taught(student, teacher)
    parts = loss_of(student, teacher, lesson)
    assert 1 <= parts["mean_depth"] <= 3
    assert parts["penalty"] > 0
    close(parts["loss"] - parts["penalty"], sum_of_teaching(parts), 1e-5)


def test_the_projection_learns():
    student, teacher = pair()
    lesson, _ = taught(student, teacher)
    before = lesson.hidden.projection.weight.clone()
    likeness = Likeness(Distillation(), teacher.policy, lesson.hidden, 0.5)
    update = DistillationUpdate(student.policy, likeness, 0.5, None)
    update.epoch([minibatch(student, lesson)])
    assert not torch.equal(before, lesson.hidden.projection.weight)


def test_the_same_seed_gives_the_same_bits():
    def learned(seed):
        student, teacher = pair(seed=seed)
        return parameters(student.learn_from(teacher, 2 * ENVS * student.n_steps))

    first, again, other = learned(4), learned(4), learned(5)
    assert same(first, again)
    assert not same(first, other)


def test_a_student_goes_on_with_rewards_and_saves(tmp_path):
    student, teacher = pair(tensorboard_log=str(tmp_path))
    student.learn_from(teacher, 2 * ENVS * student.n_steps)
    student.learn(ENVS * student.n_steps, reset_num_timesteps=False)
    assert student.num_timesteps == 3 * ENVS * student.n_steps
    student.save(tmp_path / "student")
    assert same(parameters(student), parameters(GTrXLPPO.load(tmp_path / "student", device="cpu")))
    events = EventAccumulator(str(tmp_path / "GTrXLPPO_distilled_1")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"train/distillation_loss", "train/hidden_loss", "train/value_loss"}


def test_episodes_begin_anew_with_the_teacher():
    student, teacher = pair()
    student.learn(ENVS * student.n_steps)
    student.learn_from(teacher, ENVS * student.n_steps, reset_num_timesteps=False)
    first = student.rollout_buffer.index.last(student.n_steps).position[:, 0]
    assert (first == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": "Box"}, "the teacher's action_space is Box"),
        ({"observations": ACTIONS["Discrete"]}, "the teacher's observation_space is Discrete"),
    ],
)
def test_a_teacher_of_other_spaces_is_refused(options, message):
    student, _ = pair()
    env = scripts(
        shifted(ENVS), options.get("observations", VECTOR), ACTIONS[options.get("actions", "Discrete")]
    )
    with pytest.raises(ValueError, match=message):
        student.learn_from(small_agent(env), 48)


def test_an_actor_that_is_none_is_refused():
    student, teacher = pair()
    with pytest.raises(ValueError, match="actor must be one of student, teacher, got 'both'"):
        student.learn_from(teacher, 48, actor="both")


@pytest.mark.parametrize("head", [KNNLM(k=2), SPALM(k=2)], ids=["kNN-LM", "SPALM"])
@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_a_teacher_that_remembers_is_refused(actions, head):
    """It would teach what its heads say, and plays otherwise."""
    student, teacher = pair(actions=actions)
    teacher.remember(some_trajectories(VECTOR, ACTIONS[actions]), head)
    before = parameters(student)
    with pytest.raises(ValueError, match=r"call its forget\(\) first"):
        student.learn_from(teacher, 48)
    assert same(before, parameters(student))
    student.learn_from(teacher.forget(), 2 * ENVS * student.n_steps)
    assert not same(before, parameters(student))


def test_nobody_teaches_himself():
    student, _ = pair()
    with pytest.raises(ValueError, match="its own teacher"):
        student.learn_from(student, 48)
