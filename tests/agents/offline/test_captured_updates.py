"""Captured updates of offline agents equal others, with a capture on the CPU that runs a function again."""

import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.common import gradient_programs, module_programs
from rlxf.agents.decision_transformer import HighestValueReturn
from rlxf.agents.offline import algorithm
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import RMT, Full, Reversible
from rlxf.training import NumericalError
from tests.agents.captures import capture_on_cpu
from tests.agents.decision_transformer.test_resume import SaveAt
from tests.agents.decision_transformer.worlds import TINY, small_agent, small_pretraining, some_trajectories
from tests.agents.mlp.worlds import small_mlp
from tests.agents.trainings import assert_equal_weights

AGENTS = {
    "DecisionTransformer": small_agent,
    "dropout": lambda **own: small_agent(core=replace(TINY, dropout=0.3), **own),
    "averaged weights": lambda **own: small_agent(weight_averaging=0.9, **own),
    "critic": lambda **own: small_agent(
        objective=QRegularized(hidden_sizes=(8,), warmup_updates=3), conditioning=HighestValueReturn(), **own
    ),
    "bfloat16": lambda **own: small_agent(precision="bf16-mixed", **own),
    "pretraining": small_pretraining,
    "BehaviorCloning": small_mlp,
}


@pytest.fixture
def captures(monkeypatch):
    """Capture on the CPU; return a list with an entry for each capture."""
    made = []
    for module in (algorithm, module_programs):
        monkeypatch.setattr(module, "supports_graphs", lambda device: True)
    monkeypatch.setattr(
        gradient_programs, "capture", lambda *given: made.append(given) or capture_on_cpu(*given)
    )
    return made


def learn(agent, updates=5, **options):
    torch.manual_seed(7)
    return agent.learn(updates, **options)


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)
def test_captured_updates_equal_others(make, captures):
    own = learn(make())
    assert len(captures) == 1
    assert_equal_weights(own, learn(make(cuda_graphs=False)))
    assert len(captures) == 1


def test_a_continued_training_is_not_captured_again(captures):
    own, other = small_agent(), small_agent(cuda_graphs=False)
    for agent in (own, other):
        learn(agent, 3)
        learn(agent, 3, reset_num_timesteps=False)
    assert_equal_weights(own, other)
    assert len(captures) == 1


def test_a_resumed_training_equals_an_uninterrupted_one(captures, tmp_path):
    make = AGENTS["dropout"]
    whole = learn(make(), 6)
    learn(make(), 6, callback=SaveAt(3, tmp_path / "run.zip", stop=True))
    resumed = make().learn(6, resume_from=tmp_path / "run.zip")
    for x, y in zip(whole.policy.state_dict().values(), resumed.policy.state_dict().values(), strict=True):
        assert torch.equal(x, y)


def test_weights_that_are_loaded_between_updates_are_used(captures):
    own, other = small_agent(), small_agent(cuda_graphs=False)
    source = small_agent(seed=9).policy.state_dict()
    for agent in (own, other):
        learn(agent, 4, callback=lambda variables, _: load_once(variables["self"], source))
    assert_equal_weights(own, other)
    assert len(captures) == 1


def load_once(agent, weights):
    if agent.num_timesteps == 2:
        agent.policy.load_state_dict(weights)
    return True


def test_a_diverging_critic_is_reported(captures):
    agent = small_agent(objective=QRegularized(hidden_sizes=(8,)))
    with torch.no_grad():
        for net in agent.policy.loss.critic.nets:
            net[-1].bias.fill_(1e7)
    with pytest.warns(UserWarning, match="the critic diverges"):
        learn(agent, 2)
    assert captures


def test_losses_that_are_not_finite_are_named(captures):
    agent = learn(small_agent(), 1)
    data = some_trajectories()
    agent.trajectories = replace(data, observations=data.observations * float("nan"))
    with pytest.raises(NumericalError, match="observations"):
        learn(agent, 1)


def test_micro_batches_and_distillation_are_not_captured(captures):
    learn(small_agent(gradient_accumulation_steps=2))
    small_agent().distill(small_agent(seed=4), 2)
    assert not captures


def test_a_memory_whose_branches_depend_on_values_is_named(captures):
    core = replace(TINY, memory=RMT(6, 2), pattern=Full())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = learn(small_agent(core=core))
    messages = [str(each.message) for each in caught if "not captured" in str(each.message)]
    assert len(messages) == 1
    assert "the memory RMT" in messages[0]
    assert "cuda_graphs=False" in messages[0]
    assert_equal_weights(own, learn(small_agent(core=core, cuda_graphs=False)))
    assert not captures


def test_a_copied_agent_captures_again(captures):
    agent = learn(small_agent(), 2)
    copied = deepcopy(agent)
    assert len(captures) == 1
    assert_equal_weights(learn(agent, 2), learn(copied, 2))
    assert len(captures) == 2


def test_a_run_is_resumed_without_graphs(captures, tmp_path):
    learn(small_agent(cuda_graphs=False), 4, callback=SaveAt(2, tmp_path / "run.zip", stop=True))
    assert small_agent().learn(4, resume_from=tmp_path / "run.zip").num_timesteps == 4
    loaded = DecisionTransformer.load(tmp_path / "run.zip")
    assert loaded.cuda_graphs
    assert not DecisionTransformer.load(tmp_path / "run.zip", cuda_graphs=False).cuda_graphs


def test_a_backward_pass_that_restores_the_random_state_is_named(captures):
    core = replace(TINY, residual=Reversible(), dropout=0.1)
    with pytest.warns(UserWarning, match="because the backward pass restores the random state"):
        learn(small_agent(core=core))
    assert not captures


@pytest.mark.parametrize("make", [small_agent, small_mlp, small_pretraining])
def test_cuda_graphs_must_be_a_bool(make):
    with pytest.raises(TypeError, match="cuda_graphs must be"):
        make(cuda_graphs="no")
