"""Acting with a datastore of trajectories that the agent was not trained on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import GTrXLPPO, evaluate
from rlxf.agents.gtrxl import retrieval
from rlxf.agents.gtrxl.policies import default_policy_name
from rlxf.attention import CALM, KNNLM, SPALM, LearnedAbsolute, RoPE
from rlxf.data import DatasetError, observation_encoder
from rlxf.training import CheckpointError, read_archive, write_archive
from tests.agents.decision_transformer.worlds import NESTED, some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    IMAGE,
    VECTOR,
    Scripted,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.datasets import stacked

LENGTHS = (9, 1, 14, 26, 4)
HEADS = [KNNLM(k=4, temperature=3.0), SPALM(k=4, temperature=3.0)]
OBSERVATIONS = {
    "MlpGTrXLPolicy": VECTOR,
    "choices": spaces.MultiDiscrete([3, 4]),
    "CnnGTrXLPolicy": IMAGE,
    "MultiInputGTrXLPolicy": NESTED,
    "Dict with an image": spaces.Dict({"image": IMAGE, "vector": VECTOR}),
}


def agent_for(actions="Discrete", **changes):
    return small_agent(scripts(shifted(2), action_space=ACTIONS[actions]), **changes)


def logged(actions="Discrete", observation_space=VECTOR, **changes):
    """Return trajectories that the agent was not trained on."""
    chosen = {"action_space": ACTIONS[actions], "lengths": LENGTHS, "seed": 7}
    return some_trajectories(observation_space, **(chosen | changes))


def seen(data, steps):
    """Return the observations of these steps in the format of the environment."""
    return data.encoder.decode(data.observations[steps])


def test_agents_whose_memory_persists_are_rejected():
    agent = agent_for(persist_memory_across_episodes=True)
    with pytest.raises(ValueError, match="attach_datastore encodes each episode with an empty memory"):
        agent.attach_datastore(logged(), HEADS[0])


@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_size_of_a_datastore(actions):
    data = logged(actions)
    datastore = agent_for(actions).attach_datastore(data, KNNLM(k=4)).datastore
    size = sum(tensor.nbytes for tensor in datastore.tensors().values())
    steps, width, numbers = datastore.store.keys.shape[0], datastore.store.keys.shape[1], data.actions[0].size
    bytes_per_number = 4 if actions == "Box" else 8
    assert size == 4 * steps * width + bytes_per_number * steps * numbers + 8 * steps


def replay(agent, data, view=lambda observation: observation):
    """Replay all episodes of the data in a batch; return the chosen actions and their outputs."""
    chosen, outputs = [None] * data.steps, torch.zeros(data.steps, agent.core.width)
    near, state = agent.datastore.near, None
    for t in range(max(data.lengths)):
        # Finished episodes repeat their last step.
        steps = np.minimum(data.offsets[:-1] + t, data.offsets[1:] - 1)
        queries = []
        agent.datastore.near = lambda h, queries=queries: queries.append(h) or near(h)
        start = np.full(data.episodes, t == 0)
        actions, state = agent.predict(view(seen(data, steps)), state, start, deterministic=True)
        state = agent.policy.observe_action(state, torch.from_numpy(data.actions[steps]))
        for row in np.flatnonzero(t < data.lengths):
            chosen[steps[row]], outputs[steps[row]] = actions[row], queries[0][row]
    agent.datastore.near = near
    return np.array(chosen), outputs


def close(first, second):
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segment", [1, 5, 64])
@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_stored_outputs_equal_outputs_while_acting(monkeypatch, actions, segment):
    monkeypatch.setattr(retrieval, "SEGMENT_LENGTH", segment)
    monkeypatch.setattr(retrieval, "EPISODES_PER_BATCH", 3)
    agent, data = agent_for(actions), logged(actions)
    store = agent.attach_datastore(data, KNNLM(k=1)).datastore.store
    close(store.keys, replay(agent, data)[1])
    assert torch.equal(store.values, torch.from_numpy(data.actions))
    assert store.groups.tolist() == np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()


@pytest.mark.parametrize(
    "core",
    [
        replace(small_core(), position=RoPE(), norm="post"),
        replace(small_core(), position=LearnedAbsolute(max(LENGTHS))),
    ],
    ids=["RoPE", "learned"],
)
@pytest.mark.parametrize("previous_action", [True, False])
def test_stored_outputs_equal_outputs_while_acting_for_other_cores(monkeypatch, core, previous_action):
    monkeypatch.setattr(retrieval, "SEGMENT_LENGTH", 6)
    agent, data = agent_for(core=core, previous_action=previous_action), logged()
    keys = agent.attach_datastore(data, KNNLM(k=1)).datastore.store.keys
    close(keys, replay(agent, data)[1])


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_stored_outputs_equal_outputs_while_acting_for_all_observations(kind):
    space = OBSERVATIONS[kind]
    agent, data = small_agent(scripts(shifted(2), space), default_policy_name(space)), sampled(space)
    keys = agent.attach_datastore(data, KNNLM(k=1)).datastore.store.keys
    close(keys, replay(agent, data)[1])


def sampled(space):
    """Return data whose observations are in this space."""
    data = logged(observation_space=space, lengths=(5, 3))
    space.seed(0)
    shown = stacked(space, [space.sample() for _ in range(data.steps)])
    return replace(data, observations=observation_encoder(space)(shown))


def test_observations_are_normalized_as_in_training():
    env = VecNormalize(scripts(shifted(2)), norm_reward=False)
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, -2.0, 0.5]), np.array([4.0, 0.1, 1.0])
    agent, data = small_agent(env), logged()
    keys = agent.attach_datastore(data, KNNLM(k=1)).datastore.store.keys
    close(keys, replay(agent, data, env.normalize_obs)[1])
    assert (keys - replay(agent, data)[1]).abs().max() > 0.1


def test_missing_statistics_are_refused():
    agent = small_agent(scripts(shifted(2)))
    agent.normalized_observations = True
    with pytest.raises(ValueError, match="attach_datastore needs the statistics of VecNormalize"):
        agent.attach_datastore(logged(), KNNLM(k=1))


@pytest.mark.parametrize("actions", ACTIONS)
def test_full_weight_on_nearest_reproduces_logged_actions(actions):
    agent, data = agent_for(actions), logged(actions)
    acted, _ = replay(agent.attach_datastore(data, KNNLM(k=1, weight=1.0)), data)
    done = data.actions + getattr(data.action_space, "start", 0)
    np.testing.assert_array_equal(acted.reshape(data.actions.shape), done)


def drawn_starts(agent, data, deterministic, rows=None):
    """Return actions at the first step of an episode, with an environment per row."""
    rows = np.arange(data.steps) if rows is None else rows
    torch.manual_seed(0)
    return agent.predict(data.observations[rows], deterministic=deterministic)[0]


ALIKE = [*((name, True) for name in ACTIONS), *((name, False) for name in ACTIONS if name != "MultiBinary")]
"""Sampled bits use other distributions, and so other random numbers."""


@pytest.mark.parametrize(("actions", "deterministic"), ALIKE)
def test_zero_weight_keeps_actions(actions, deterministic):
    agent, data = agent_for(actions), logged(actions)
    alone = drawn_starts(agent, data, deterministic)
    agent.attach_datastore(data, KNNLM(k=4, weight=0.0))
    np.testing.assert_array_equal(drawn_starts(agent, data, deterministic), alone)


def test_zero_weight_keeps_bit_probabilities():
    agent, data = agent_for("MultiBinary"), logged("MultiBinary")
    y = torch.randn(5, agent.core.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        on = agent.policy.heads(y)[0].distribution.probs
    agent.attach_datastore(data, KNNLM(k=4, weight=0.0))
    actual = torch.stack([logits.softmax(dim=-1)[:, 1] for logits in agent.policy.retrieval.logits(y)], dim=1)
    close(actual, on)


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("actions", ACTIONS)
def test_remember_changes_actions_and_forget_restores_them(actions, head):
    agent, data = agent_for(actions), logged(actions)
    alone = drawn_starts(agent, data, True)
    changed = drawn_starts(agent.attach_datastore(data, head), data, True)
    assert (changed != alone).any()
    assert all(agent.action_space.contains(action) for action in changed)
    np.testing.assert_array_equal(drawn_starts(agent.detach_datastore(), data, True), alone)
    assert agent.datastore is None


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("actions", ["Discrete", "Box"])
def test_actions_do_not_depend_on_number_of_environments(actions, head):
    data = logged(actions)
    agent = agent_for(actions).attach_datastore(data, head)
    together = drawn_starts(agent, data, True, np.arange(9))
    singly = [drawn_starts(agent, data, True, np.array([row]))[0] for row in range(9)]
    np.testing.assert_allclose(together, singly, atol=1e-5)


def test_choices_are_a_mixture_of_categoricals():
    agent, data = agent_for(), logged()
    observations = data.observations[:12]
    own = agent.policy.action_logits(observations)[0].softmax(dim=1)
    agent.attach_datastore(data, KNNLM(k=5, weight=0.4, temperature=3.0))
    queries, near = [], agent.datastore.near
    agent.datastore.near = lambda h: queries.append(h) or near(h)
    mixed = agent.policy.action_logits(observations)[0].exp()
    store = agent.datastore.store
    for row in range(12):
        squared = (store.keys - queries[0][row]).square().sum(dim=1)
        nearest = squared.argsort()[:5]
        weights = (-squared[nearest] / 3.0).softmax(dim=0)
        retrieved = torch.stack([weights[store.values[nearest] == action].sum() for action in range(3)])
        close(mixed[row], 0.4 * retrieved + 0.6 * own[row])


def test_box_actions_are_clipped_before_mixing():
    """A mean far outside of the bounds is clipped first."""
    agent, data = agent_for("Box"), logged("Box")
    with torch.no_grad():
        agent.policy.action_net.bias += torch.tensor([50.0, 0.0])
    alone = drawn_starts(agent, data, True)
    agent.attach_datastore(replace(data, actions=np.zeros_like(data.actions)), KNNLM(k=2, weight=0.25))
    assert (alone[:, 0] == 2.0).all()
    np.testing.assert_allclose(drawn_starts(agent, data, True), 0.75 * alone, atol=1e-6)


def test_a_gaussian_samples_the_mixture():
    agent, data = agent_for("Box"), logged("Box")
    agent.attach_datastore(data, KNNLM(k=3, weight=0.25, temperature=9.0))
    drawn = drawn_starts(agent, data, False, np.full(4000, 4))
    stored = {tuple(action) for action in data.actions.tolist()}
    share = np.mean([tuple(action) in stored for action in drawn.tolist()])
    assert share == pytest.approx(0.25, abs=0.03)


def test_chosen_action_is_input_of_next_step():
    data = logged("Box")
    agent = agent_for("Box").attach_datastore(data, KNNLM(k=1, weight=1.0))
    actions, state = agent.predict(data.observations[:3])
    close(state.action, torch.from_numpy(actions))


def test_training_the_gate_changes_nothing_else():
    agent = agent_for()
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent.attach_datastore(logged(), SPALM(k=4))
    assert all(torch.equal(before[name], value) for name, value in agent.policy.state_dict().items())
    assert all(parameter.grad is None for parameter in agent.policy.parameters())
    assert agent.datastore.reader.gate.abs().sum() > 0


@pytest.mark.parametrize("actions", ["Box", "Discrete", "MultiDiscrete"])
def test_trained_gate_predicts_no_worse_than_equal_mixture(actions):
    agent = agent_for(actions).attach_datastore(logged(actions), SPALM(k=4))
    memory, every = agent.datastore, torch.arange(len(agent.datastore.store))
    near, h, values = memory._elsewhere(every), memory.store.keys, memory.store.values
    error = agent.policy.retrieval.error
    with torch.no_grad():
        learned = error(h, near, values).mean()
        memory.reader.gate.zero_()
        assert learned < error(h, near, values).mean()


class Paying(Scripted):
    """Environment that rewards the last of three actions."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(action == 2), *rest


def test_evaluation_uses_datastore():
    agent, env = agent_for(), DummyVecEnv([lambda: Paying([0, 0, 1])])
    assert evaluate(agent, env, 4, seed=3).mean < 3
    always = replace(logged(), actions=np.full(sum(LENGTHS), 2))
    assert evaluate(agent.attach_datastore(always, KNNLM(k=3, weight=1.0)), env, 4, seed=3).mean == 3


def test_agent_with_datastore_cannot_be_changed():
    agent, other = agent_for(), agent_for()
    agent.attach_datastore(logged(), KNNLM(k=4))
    for change in (
        lambda: agent.learn(1),
        lambda: agent.load_pretrained(other),
        lambda: agent.distill(other, 1),
        lambda: agent.set_parameters(other.get_parameters()),
    ):
        with pytest.raises(ValueError, match=r"with a datastore cannot be trained.*detach_datastore\(\)"):
            change()
    agent.detach_datastore().learn(1)


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("actions", ["Box", "Discrete"])
def test_datastore_is_saved(tmp_path, actions, head):
    agent, data = agent_for(actions).attach_datastore(logged(actions), head), logged(actions)
    for name in ("a.zip", "b.zip"):
        agent.save(tmp_path / name)
    loaded = GTrXLPPO.load(tmp_path / "a.zip", device="cpu")
    np.testing.assert_array_equal(replay(loaded, data)[0], replay(agent, data)[0])
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    loaded.detach_datastore().save(tmp_path / "c.zip")
    assert GTrXLPPO.load(tmp_path / "c.zip", device="cpu").datastore is None


def test_trajectories_of_other_spaces_are_refused():
    agent = agent_for()
    with pytest.raises(DatasetError, match="test/small-v0 cannot be a datastore of this agent: action space"):
        agent.attach_datastore(logged("Box"))
    with pytest.raises(
        DatasetError, match="test/small-v0 cannot be a datastore of this agent: observation space"
    ):
        agent.attach_datastore(logged(observation_space=NESTED))
    assert agent.datastore is None


def test_more_neighbors_than_steps_are_refused():
    with pytest.raises(ValueError, match="KNNLM needs k=55 neighbors, but the data have only 54 steps"):
        agent_for().attach_datastore(logged(), KNNLM(k=55))


def test_early_exits_are_rejected():
    agent = agent_for(core=replace(small_core(), depth=CALM()))
    with pytest.raises(
        ValueError, match=r"attach_datastore needs outputs of one depth, but CALM.* exits early"
    ):
        agent.attach_datastore(logged())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda memory, _: memory.pop("groups"), "groups"),
        (lambda memory, _: memory.update(keys=memory["keys"][:, :5], gate=memory["gate"][:5]), "width 5"),
        (lambda memory, _: memory.update(values=memory["values"] + 3), "not valid actions of the agent"),
        (lambda _, head: head.update(name="Magic"), "no head named 'Magic'"),
    ],
)
def test_invalid_datastore_in_file_is_rejected(tmp_path, change, message):
    path = tmp_path / "agent.zip"
    agent_for().attach_datastore(logged(), SPALM(k=4)).save(path)
    archive = read_archive(path)
    change(archive.tensors["datastore"], archive.documents["datastore"])
    write_archive(path, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match=message):
        GTrXLPPO.load(path, device="cpu")
