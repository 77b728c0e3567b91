"""Faults of recurrent layers and of foreign states in Decision Transformer, its training and pre-training."""

import dataclasses

import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import (
    LRU,
    RATE,
    RMT,
    SHM,
    XL,
    Compressive,
    GatedDeltaNet,
    Mamba2,
    StreamingXL,
    TransformerSpec,
)
from rlxf.training import CheckpointError, NumericalError, read_archive, write_archive
from tests.agents.decision_transformer.worlds import SIZES, K, shown, small_agent, some_trajectories

LONG = 60
"""Steps of a context in which a state that doubles with each token overflows."""
GROWING = TransformerSpec(**SIZES, recurrence=SHM(size=4, rows=2))
OVERFLOW = r"the recurrent state 'state' of layer 2, SHM\(.*contains .* after the step"


def long_data():
    return some_trajectories(lengths=(80, 80))


def grow(transformer):
    """Make the Hadamard memory of the second layer double with each token."""
    with torch.no_grad():
        block = transformer.blocks[1]
        block.mixer.theta.fill_(50.0)
        block.mixer.calibration.weight.fill_(50.0)
        block.mixer.calibration.weight[:, 0] = 1e4
        block.mixer_norm.norm.bias[0] = 10.0


def growing_agent(**changes):
    agent = small_agent(long_data(), core=GROWING, context_length=LONG, batch_size=2, **changes)
    grow(agent.policy.transformer)
    return agent


def weights(agent):
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def unchanged(before, agent):
    return all(map(torch.equal, before, agent.policy.parameters()))


def test_overflow_in_predict_names_the_layer():
    agent = growing_agent()
    with pytest.raises(NumericalError, match=OVERFLOW):
        first_actions(agent)


def first_actions(agent):
    state = None
    for step in range(LONG):
        actions, state = agent.predict(shown(agent.trajectories, np.array([step, 80 + step])), state)
        assert np.isfinite(actions).all()


def test_overflow_in_training_names_the_layer_and_changes_no_weight():
    agent = growing_agent()
    before = weights(agent)
    with pytest.raises(NumericalError, match="update 1: " + OVERFLOW):
        agent.learn(1)
    assert unchanged(before, agent)


def test_overflow_in_pre_training_names_the_layer_and_changes_no_weight():
    agent = MaskedPretraining(
        long_data(), core=GROWING, context_length=LONG, batch_size=2, seed=3, device="cpu"
    )
    grow(agent.policy.transformer)
    before = weights(agent)
    with pytest.raises(NumericalError, match="update 1: " + OVERFLOW):
        agent.learn(1)
    assert unchanged(before, agent)


@pytest.mark.parametrize("grown", ["student", "teacher"])
def test_overflow_in_distillation_names_the_layer_and_changes_no_weight(grown):
    agents = {
        name: small_agent(long_data(), core=GROWING, context_length=LONG, batch_size=2)
        for name in ("student", "teacher")
    }
    grow(agents[grown].policy.transformer)
    student, teacher = agents["student"], agents["teacher"]
    before = weights(student)
    with pytest.raises(NumericalError, match="update 1: " + OVERFLOW):
        student.distill(teacher, 1)
    assert unchanged(before, student)


FAULTS = {
    "NaN": (GatedDeltaNet(), "beta.weight", np.nan, "it must be finite"),
    "rate": (GatedDeltaNet(), "log_rate", 90.0, "more than 28.24 can make the state exceed float32"),
    "gain": (LRU(), "gamma_log", 100.0, "more than 28.24 can make"),
    "time step": (Mamba2(state=4), "time_step_bias", 1e30, "more than 1.845e[+]12 can make"),
}
each_fault = pytest.mark.parametrize(("recurrence", "name", "value", "allowed"), FAULTS.values(), ids=FAULTS)


def faulty_agent(recurrence, name, value):
    agent = small_agent(core=TransformerSpec(**SIZES, recurrence=recurrence))
    with torch.no_grad():
        agent.policy.transformer.blocks[1].mixer.get_parameter(name).view(-1)[0] = value
    return agent


@each_fault
def test_parameter_that_lets_states_overflow_is_named_before_training(
    tmp_path, recurrence, name, value, allowed
):
    agent = faulty_agent(recurrence, name, value)
    agent.tensorboard_log = str(tmp_path)
    agent.save(tmp_path / "agent.zip")
    files, before = sorted(tmp_path.rglob("*")), [x.nan_to_num() for x in weights(agent)]
    message = rf"the parameter 'mixer.{name}' of layer 2, .*contains .*{allowed}"
    other = small_agent(core=agent.core)
    kept = weights(other)
    with pytest.raises(NumericalError, match=message):
        agent.learn(1)
    with pytest.raises(NumericalError, match=message):
        other.distill(agent, 1)
    with pytest.raises(ValueError, match=message):
        other.load_pretrained(agent)
    assert agent.num_timesteps == 0
    assert unchanged(kept, other)
    assert sorted(tmp_path.rglob("*")) == files
    assert all(map(torch.equal, before, (x.nan_to_num() for x in agent.policy.parameters())))


@each_fault
def test_file_with_a_parameter_that_lets_states_overflow_is_refused(
    tmp_path, recurrence, name, value, allowed
):
    agent = small_agent(core=TransformerSpec(**SIZES, recurrence=recurrence))
    agent.save(tmp_path / "agent.zip")
    archive = read_archive(tmp_path / "agent.zip")
    archive.tensors["policy"][f"transformer.blocks.1.mixer.{name}"].view(-1)[0] = value
    write_archive(tmp_path / "agent.zip", archive.documents, archive.tensors)
    allowed = "" if np.isnan(value) else allowed
    with pytest.raises(CheckpointError, match=rf"mixer.{name}.*contains .*{allowed}"):
        DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")


def test_parameter_that_is_not_finite_is_named_in_predict():
    agent = faulty_agent(GatedDeltaNet(), "beta.weight", np.nan)
    with pytest.raises(
        NumericalError, match=r"'mixer.beta.weight' of layer 2, GatedDeltaNet\(.*contains nan"
    ):
        agent.predict(shown(agent.trajectories, np.array([0])))


CORES = {
    "recurrent": {"recurrence": GatedDeltaNet()},
    "XL": {"memory": XL(6)},
    "Compressive": {"memory": Compressive(3, 3, 3)},
    "sinks": {"memory": StreamingXL(6, 3)},
    "memory tokens": {"memory": RMT(9, 2)},
    "valve": {"memory": RATE(12, 2)},
    "mixed": {"recurrence": Mamba2(state=4), "attention_layers": (1,), "memory": XL(3)},
}
each_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)


def agent_and_state(core, **changes):
    agent = small_agent(core=TransformerSpec(**SIZES, **core), **changes)
    return agent, agent.predict(shown(agent.trajectories, np.array([3, 12])))[1]


@each_core
def test_foreign_state_is_refused(core):
    agent, state = agent_and_state(core)
    observation = shown(agent.trajectories, np.array([4, 13]))
    advice = "pass state=None to start with an empty context"
    with pytest.raises(ValueError, match=f"state is of 2 environments, the observation of 1; {advice}"):
        agent.predict(shown(agent.trajectories, np.array([4])), state)
    elsewhere = dataclasses.replace(state, mask=state.mask.to("meta"))
    with pytest.raises(ValueError, match=f"state is on meta, the agent on cpu; {advice}"):
        agent.predict(observation, elsewhere)
    with pytest.raises(TypeError, match=f"state must be one that predict returned, got tuple; {advice}"):
        agent.predict(observation, (state,))
    _, longer = agent_and_state(core, context_length=K + 1)
    with pytest.raises(ValueError, match=rf"of another agent: features has shape .* in this agent; {advice}"):
        agent.predict(observation, longer)
    assert np.isfinite(agent.predict(observation, state)[0]).all()


@each_core
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_state_that_is_not_finite_is_refused(core, value):
    agent, state = agent_and_state(core)
    features = state.features.clone()
    features[1, -1] = value
    with pytest.raises(
        NumericalError, match="tokens of the transformer are not finite in row 1 of the batch"
    ):
        agent.predict(
            shown(agent.trajectories, np.array([4, 13])), dataclasses.replace(state, features=features)
        )
