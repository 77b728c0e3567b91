"""Tests of kNN datastores of logged trajectories."""

import sys

import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, acting
from rlxf.attention import KNNLM, SPALM
from rlxf.data import DatasetError
from rlxf.training import CheckpointError, read_archive, write_archive
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    LENGTHS,
    OBSERVATIONS,
    replay,
    replayed,
    shown,
    small_agent,
    some_trajectories,
)

HEADS = [KNNLM(k=4, temperature=3.0), SPALM(k=4, temperature=3.0)]


def others(space: str = "Box", seed: int = 7):
    """Return trajectories that are not in the agent's training data."""
    return some_trajectories(action_space=ACTIONS[space], lengths=(6, 11, 1, 8), seed=seed)


def agent_for(space: str, **changes):
    return small_agent(some_trajectories(action_space=ACTIONS[space]), **changes)


def observation_at(data, *steps):
    return shown(data, np.array(steps))


@pytest.mark.parametrize("core", CORES)
def test_keys_equal_the_inputs_of_the_head_while_acting(core):
    agent, data = small_agent(core=CORES[core]), others()
    store = agent.attach_datastore(data, KNNLM(k=1)).datastore.store
    for steps, _, state in replay(agent, data):
        with torch.no_grad():
            torch.testing.assert_close(
                store.keys[steps], agent.policy.newest_output(state), atol=1e-5, rtol=1e-5
            )
    assert torch.equal(store.values, torch.from_numpy(data.actions))
    assert store.groups.tolist() == np.repeat(np.arange(4), (6, 11, 1, 8)).tolist()


@pytest.mark.parametrize("length", [1, max(LENGTHS) + 5])
def test_keys_equal_the_inputs_of_the_head_for_any_context_length(length):
    agent, data = small_agent(context_length=length), others()
    keys = agent.attach_datastore(data, KNNLM(k=1)).datastore.store.keys
    for steps, _, state in replay(agent, data):
        with torch.no_grad():
            torch.testing.assert_close(keys[steps], agent.policy.newest_output(state), atol=1e-5, rtol=1e-5)


def test_keys_equal_the_inputs_of_the_head_for_images():
    agent = small_agent(some_trajectories(OBSERVATIONS["image"]))
    keys = agent.attach_datastore(agent.trajectories, KNNLM(k=1)).datastore.store.keys
    for steps, _, state in replay(agent, agent.trajectories):
        with torch.no_grad():
            torch.testing.assert_close(keys[steps], agent.policy.newest_output(state), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("space", ACTIONS)
def test_weight_1_reproduces_the_logged_actions(space):
    agent, data = agent_for(space), others(space)
    acted = replayed(agent.attach_datastore(data, KNNLM(k=1, weight=1.0)), data)
    done = data.actions + getattr(data.action_space, "start", 0)
    np.testing.assert_array_equal(acted.reshape(data.actions.shape), done)


@pytest.mark.parametrize("space", ACTIONS)
def test_weight_0_does_not_change_actions(space):
    agent, data = agent_for(space), others(space)
    alone = replayed(agent, data)
    np.testing.assert_array_equal(replayed(agent.attach_datastore(data, KNNLM(k=4, weight=0.0)), data), alone)


@pytest.mark.parametrize("space", ["Box", "Discrete", "MultiDiscrete"])
def test_weight_0_does_not_change_samples(space):
    agent, data = agent_for(space, objective=MaximumEntropy()), others(space)
    observation = observation_at(data, *range(20))
    torch.manual_seed(0)
    alone, _ = agent.predict(observation, deterministic=False)
    torch.manual_seed(0)
    agent.attach_datastore(data, KNNLM(k=4, weight=0.0))
    np.testing.assert_array_equal(agent.predict(observation, deterministic=False)[0], alone)


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("space", ACTIONS)
def test_remember_changes_actions_and_forget_restores_them(space, head):
    agent, data = agent_for(space), others(space)
    observation = observation_at(data, *range(data.steps))
    alone, _ = agent.predict(observation)
    changed, _ = agent.attach_datastore(data, head).predict(observation)
    assert (changed != alone).any()
    assert all(agent.action_space.contains(action) for action in changed)
    np.testing.assert_array_equal(agent.detach_datastore().predict(observation)[0], alone)


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_retrieval_does_not_depend_on_the_batch_size(head):
    agent, data = small_agent().attach_datastore(others(), head), others()
    together, _ = agent.predict(observation_at(data, *range(9)))
    singly = [agent.predict(observation_at(data, step))[0][0] for step in range(9)]
    np.testing.assert_allclose(together, singly, atol=1e-5)


def test_discrete_predictions_are_a_mixture_of_categoricals():
    agent, data = agent_for("Discrete"), others("Discrete")
    observation = observation_at(data, *range(12))
    own = agent.action_logits(observation)[0].softmax(dim=1)
    head = KNNLM(k=5, weight=0.4, temperature=3.0)
    mixed = agent.attach_datastore(data, head).action_logits(observation)[0].exp()
    store = agent.datastore.store
    with torch.no_grad():
        y = agent.policy.newest_output(agent.action_logits(observation)[1])
    for row in range(12):
        squared = (store.keys - y[row]).square().sum(dim=1)
        nearest = squared.argsort()[:5]
        weights = (-squared[nearest] / 3.0).softmax(dim=0)
        near = torch.stack([weights[store.values[nearest] == action].sum() for action in range(3)])
        torch.testing.assert_close(mixed[row], 0.4 * near + 0.6 * own[row], atol=1e-5, rtol=1e-4)


def test_a_gaussian_head_samples_from_the_mixture():
    agent, data = agent_for("Box", objective=MaximumEntropy()), others()
    agent.attach_datastore(data, KNNLM(k=3, weight=0.25, temperature=9.0))
    torch.manual_seed(0)
    drawn, _ = agent.predict(observation_at(data, *[4] * 4000), deterministic=False)
    stored = {tuple(action) for action in data.actions.tolist()}
    retrieved = np.mean([tuple(action) in stored for action in drawn.tolist()])
    assert retrieved == pytest.approx(0.25, abs=0.03)
    assert len(np.unique(drawn, axis=0)) > 2500


def test_steps_with_a_return_near_the_target_are_nearer():
    data = others()
    agent = small_agent().attach_datastore(data, KNNLM(k=1))
    observation = observation_at(data, 6)
    right, wrong = (
        agent.datastore.near(
            _newest_output(agent, observation | {"return_to_go": observation["return_to_go"] + more})
        )
        for more in (0.0, 3.0)
    )
    assert right.squared.item() < 1e-6 < wrong.squared.item()


@torch.no_grad()
def _newest_output(agent, observation):
    return agent.policy.newest_output(agent.predict(observation)[1])


def test_training_the_gate_does_not_change_the_policy():
    agent = agent_for("Discrete")
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent.attach_datastore(others("Discrete"), SPALM(k=4))
    assert all(torch.equal(before[name], value) for name, value in agent.policy.state_dict().items())
    assert all(parameter.grad is None for parameter in agent.policy.parameters())
    assert agent.datastore.reader.gate.abs().sum() > 0


@pytest.mark.parametrize("space", ["Box", "Discrete", "MultiDiscrete"])
def test_a_trained_gate_predicts_better_than_equal_weights(space):
    agent = agent_for(space).attach_datastore(others(space), SPALM(k=4))
    memory, every = agent.datastore, torch.arange(len(agent.datastore.store))
    near, h, actions = memory._elsewhere(every), memory.store.keys, memory.store.values
    with torch.no_grad():
        learned = agent.head.error(h, near, actions).mean()
        memory.reader.gate.zero_()
        assert learned < agent.head.error(h, near, actions).mean()


def test_an_agent_with_a_datastore_cannot_be_trained():
    agent = small_agent().attach_datastore(others(), KNNLM(k=4))
    with pytest.raises(ValueError, match=r"with a datastore cannot be trained.*detach_datastore\(\)"):
        agent.learn(1)
    agent.detach_datastore().learn(1)


def test_the_default_head_is_knn_lm():
    assert small_agent().attach_datastore(some_trajectories(lengths=(40,))).datastore.head == KNNLM()


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("space", ["Box", "Discrete"])
def test_datastores_are_saved(tmp_path, space, head):
    agent, data = agent_for(space).attach_datastore(others(space), head), others(space)
    for name in ("a.zip", "b.zip"):
        agent.save(tmp_path / name)
    loaded = DecisionTransformer.load(tmp_path / "a.zip", device="cpu")
    np.testing.assert_array_equal(replayed(loaded, data), replayed(agent, data))
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    loaded.detach_datastore().save(tmp_path / "c.zip")
    assert DecisionTransformer.load(tmp_path / "c.zip", device="cpu").datastore is None


def test_faiss_gives_the_same_actions():
    pytest.importorskip("faiss")
    agent, data = small_agent(), others()
    exact, faiss = (
        replayed(agent.attach_datastore(data, KNNLM(k=4, index=index)), data) for index in ("torch", "faiss")
    )
    np.testing.assert_allclose(exact, faiss, atol=1e-5)


def test_trajectories_of_other_spaces_are_refused():
    agent = small_agent()
    with pytest.raises(DatasetError, match="test/small-v0 cannot be a datastore of this agent: action space"):
        agent.attach_datastore(others("Discrete"))
    with pytest.raises(
        DatasetError, match="test/small-v0 cannot be a datastore of this agent: observation space"
    ):
        agent.attach_datastore(some_trajectories(OBSERVATIONS["image"]))
    assert agent.datastore is None


def test_more_neighbors_than_steps_are_refused():
    with pytest.raises(ValueError, match="KNNLM needs k=27 neighbors, but the data have only 26 steps"):
        small_agent().attach_datastore(others(), KNNLM(k=27))


def test_a_missing_faiss_is_reported_before_encoding(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(acting, "encode_dataset", None)
    with pytest.raises(ImportError, match=r"pip install .*\[knn\]'"):
        small_agent().attach_datastore(others(), KNNLM(k=4, index="faiss"))


def test_a_gate_is_not_learned_from_one_episode():
    with pytest.raises(ValueError, match="without its largest group of 9 pairs the datastore has 0"):
        small_agent().attach_datastore(some_trajectories(lengths=(9,)), SPALM(k=2))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda memory, _: memory.pop("groups"), "groups"),
        (lambda memory, _: memory.pop("gate"), "lacks the tensor 'gate'"),
        (lambda memory, _: memory.update(gate=torch.zeros(3)), "'gate' has shape"),
        (lambda memory, _: memory.update(keys=memory["keys"][:, :5], gate=memory["gate"][:5]), "width 5"),
        (lambda memory, _: memory.update(keys=memory["keys"][:5]), "needs keys"),
        (lambda memory, _: memory.update(values=memory["values"] + 3), "not valid actions of the agent"),
        (lambda memory, _: memory.update(values=memory["values"].float()), "not valid actions of the agent"),
        (lambda _, head: head.update(name="Magic"), "no head named 'Magic'"),
        (lambda _, head: head.update(k=1000), "k=1000"),
    ],
)
def test_a_file_with_an_invalid_datastore_is_refused(tmp_path, change, message):
    path = tmp_path / "agent.zip"
    agent_for("Discrete").attach_datastore(others("Discrete"), SPALM(k=4)).save(path)
    archive = read_archive(path)
    change(archive.tensors["datastore"], archive.documents["datastore"])
    write_archive(path, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match=message):
        DecisionTransformer.load(path, device="cpu")
