"""State of the agent between steps, memory recomputed with new weights, and values for callbacks."""

from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.agents.gtrxl import rollout_collector
from rlxf.attention import KNN, Compressive, Full, RoPE, State, Universal, Window
from rlxf.attention.token_index import EMPTY
from rlxf.envs.tensor_vec_env import as_vec_env
from tests.agents.gtrxl.test_ratio import assert_acts_as_it_learns
from tests.agents.gtrxl.worlds import (
    OBSERVATIONS,
    next_step_scripts,
    recurrent_core,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ENVS = 3
CORES = {
    "XL": small_core(),
    "KNN": replace(small_core(), memory=KNN(3, 12, 4), pattern=Window(4)),
}


def most_likely(obs, index, distribution):
    return distribution.get_actions(deterministic=True)


@torch.no_grad()
def next_step(agent):
    agent.collector.start_rollout()
    return agent.collector.act(most_likely)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_restored_state_gives_same_next_step(core, recompute):
    def agent():
        return small_agent(next_step_scripts(shifted(ENVS)), core=core, recompute_memory=recompute, seed=3)

    one, other = agent(), agent()
    for _ in rollouts(one, 2):
        state = {name: tensor.clone() for name, tensor in one.collector.state_dict().items()}
    other.policy.load_state_dict(one.policy.state_dict())
    other.collector.load_state_dict(state)
    assert other.collector.state_dict().keys() == state.keys()
    ours, restored = next_step(one), next_step(other)
    assert (restored.index.position > 0).any(), "no memory would be needed"
    for name in ("obs", "previous", "hidden", "actions", "values", "log_probs"):
        assert torch.equal(getattr(ours, name), getattr(restored, name)), name


@pytest.mark.parametrize("core", [*CORES.values(), recurrent_core()], ids=[*CORES, "recurrent"])
def test_steps_do_not_depend_on_the_length_of_rollouts(core):
    def steps(n_steps):
        agent = small_agent(scripts(ENDLESS), core=core, n_steps=n_steps, batch_size=8, learning_rate=0.0)
        buffers = [(x.values.clone(), x.steps_index.position.clone()) for x in rollouts(agent, 16 // n_steps)]
        return [torch.cat(parts, dim=1) for parts in zip(*buffers, strict=True)]

    values, position = steps(4)
    whole, every_position = steps(16)
    assert torch.equal(position, every_position)
    torch.testing.assert_close(values, whole)


def test_incomplete_state_is_an_error():
    agent = small_agent(scripts(shifted(ENVS)))
    next(iter(rollouts(agent, 1)))
    state = agent.collector.state_dict()
    del state["memory.hidden"]
    with pytest.raises(KeyError, match=r"memory\.hidden"):
        agent.collector.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("filler", torch.Tensor.double),
        ("filler", torch.Tensor.long),
        ("episode_start", lambda tensor: tensor.repeat(2)),
        ("position", torch.Tensor.double),
        ("memory.hidden", torch.Tensor.double),
        ("memory.hidden", torch.Tensor.flatten),
        ("memory.hidden", lambda tensor: tensor[:1]),
        ("action", lambda tensor: tensor[:, :1]),
        ("past.previous", torch.Tensor.long),
        ("past.previous", lambda tensor: tensor[..., :1]),
    ],
)
def test_state_of_another_form_is_an_error(name, change):
    agent = small_agent(scripts(shifted(ENVS)))
    next(iter(rollouts(agent, 1)))
    state = agent.collector.state_dict()
    agent.collector.load_state_dict(state)
    with pytest.raises(ValueError, match=f"the state '{name}' is torch"):
        agent.collector.load_state_dict(state | {name: change(state[name])})


class Watch(BaseCallback):
    """Record the values that Stable-Baselines3's algorithms show to callbacks."""

    def _on_step(self):
        names = ("infos", "rewards", "dones", "new_obs", "actions", "values", "log_probs", "rollout_buffer")
        self.seen = {name: self.locals[name] for name in names}
        assert self.locals["self"] is self.model
        return True


def test_callbacks_see_step_as_in_sb3():
    agent, watch = small_agent(scripts(shifted(ENVS))), Watch()
    agent.learn(ENVS * agent.n_steps, callback=watch)
    assert watch.seen["rollout_buffer"] is agent.rollout_buffer
    assert torch.equal(watch.seen["actions"], agent.rollout_buffer.actions[:, -1])
    assert len(watch.seen["infos"]) == len(watch.seen["rewards"]) == ENVS


MEMORY, LAYERS = 8, 2
ENDLESS, ENDING = [[0]] * 2, [[0, 0, 0, 0, 1], [0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]


def recomputing_agent(env, policy="MlpGTrXLPolicy", **changes):
    settings = {"learning_rate": 1e-2, "recompute_memory": True}
    return small_agent(env, policy, **(settings | changes))


def inputs_of(buffer):
    """Return a copy of the inputs and the index of a rollout."""
    obs = buffer.obs if isinstance(buffer.obs, dict) else {"": buffer.obs}
    index = buffer.steps_index
    parts = {f"obs {key}": x for key, x in obs.items()} | {"previous": buffer.previous}
    parts |= {"position": index.position, "episode": index.episode}
    return {name: part.clone() for name, part in parts.items()}


@torch.no_grad()
def full_pass(agent, seen, length=None):
    """Return the state after a single pass over all steps so far."""
    all_of_it = {name: torch.cat([part[name] for part in seen], dim=1) for name in seen[0]}
    obs = {name[4:]: x.flatten(0, 1) for name, x in all_of_it.items() if name.startswith("obs")}
    shape = all_of_it["episode"].shape
    tokens = agent.policy.tokens(obs.get("", obs), all_of_it["previous"].flatten(0, 1))
    index = rollout_collector.TokenIndex(all_of_it["position"], all_of_it["episode"])
    _, hidden = agent.policy.transformer.encode(tokens.unflatten(0, tuple(shape)), index)
    return State(torch.stack(hidden), index).last(min(length or agent.core.memory.length, shape[1]))


def differences(agent, number):
    """Return the relative error of the memory in current episodes, at each rollout except the first."""
    seen, errors = [], []
    for buffer in rollouts(agent, number):
        if seen:
            again = full_pass(agent, seen)
            kept_slots = slice(buffer.memory_length - again.index.shape[1], buffer.memory_length)
            index, episode = buffer.index.at(kept_slots), again.index.episode
            current = (episode == episode.amax(1, True)) & (episode != EMPTY)
            assert torch.equal(index.episode[current], episode[current])
            assert torch.equal(index.position[current], again.index.position[current])
            difference = (buffer.hidden[:, :, kept_slots] - again.hidden)[:, current]
            error = (
                difference.abs().max() / again.hidden.abs().max() if difference.numel() else torch.zeros(())
            )
            errors.append(error.item())
        seen.append(inputs_of(buffer))
    return errors


WORLDS = {
    "endless": lambda: scripts(ENDLESS),
    "ending": lambda: scripts(ENDING),
    "reset steps": lambda: as_vec_env(next_step_scripts(ENDING)),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("n_steps", "number"), [(4, 8), (16, 3)])
@pytest.mark.parametrize("across", [True, False])
def test_recomputed_memory_equals_full_pass(world, n_steps, number, across):
    agent = recomputing_agent(
        WORLDS[world](), n_steps=n_steps, batch_size=8, persist_memory_across_episodes=across
    )
    assert max(differences(agent, number)) < 1e-5


def test_memory_is_stale_without_recomputation():
    agent = recomputing_agent(scripts(ENDLESS), n_steps=4, batch_size=8, recompute_memory=False)
    assert min(differences(agent, 4)) > 0.001


@pytest.mark.parametrize(
    "core",
    [
        replace(small_core(), position=RoPE()),
        replace(small_core(layers=3), depth=Universal()),
        replace(small_core(), memory=Compressive(3, 2, 2, "most-used"), pattern=Full()),
    ],
    ids=["RoPE", "three passes", "Compressive"],
)
def test_recomputed_memory_equals_full_pass_for_other_cores(core):
    agent = recomputing_agent(scripts(ENDLESS), n_steps=8, batch_size=8, core=core)
    assert max(differences(agent, 5)) < 1e-5


def test_long_range_memory_is_recomputed():
    core = replace(small_core(), memory=KNN(3, 12, 4, layer=2), pattern=Window(4))
    agent, seen = (
        recomputing_agent(scripts(ENDLESS), n_steps=6, batch_size=6, segment_length=3, core=core),
        [],
    )
    for buffer in rollouts(agent, 6):
        if len(seen) == 5:
            again = full_pass(agent, seen, length=30)
            remembered = buffer.older.hidden[0, :, :12]
            torch.testing.assert_close(remembered, again.hidden[1, :, -15:-3], atol=1e-4, rtol=1e-4)
        seen.append(inputs_of(buffer))


@pytest.mark.parametrize("policy", OBSERVATIONS)
def test_recomputed_memory_equals_full_pass_for_all_observations(policy):
    agent = recomputing_agent(scripts(shifted(2), OBSERVATIONS[policy]), policy, n_steps=8, batch_size=8)
    assert max(differences(agent, 3)) < 1e-5


@pytest.mark.parametrize("ends", [ENDLESS, ENDING], ids=["endless", "ending"])
def test_acting_equals_learning(ends):
    assert_acts_as_it_learns(recomputing_agent(scripts(ends), n_steps=8), number=3)


def test_stored_steps_are_limited_to_receptive_field():
    agent = recomputing_agent(scripts(ENDLESS), n_steps=12, batch_size=12)
    for _ in rollouts(agent, 3):
        assert agent.collector._past.index.shape[1] <= LAYERS * MEMORY
    assert agent.collector._past.index.shape == (2, LAYERS * MEMORY)


def test_only_steps_of_current_episodes_are_read(monkeypatch):
    """Episodes of every environment have 4 steps, so at most the last 4 of 16 steps are read."""
    lengths = []
    read = rollout_collector.RecentSteps.recompute_memory

    def counted(self, policy, segment_length):
        lengths.append(self.index.shape[1] - self._first)
        return read(self, policy, segment_length)

    monkeypatch.setattr(rollout_collector.RecentSteps, "recompute_memory", counted)
    agent = recomputing_agent(scripts([[0, 0, 0, 1]] * 2))
    for _ in rollouts(agent, 3):
        pass
    assert lengths == [0, 4, 4]


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_reset_clears_the_memory(core, recompute):
    agent = recomputing_agent(scripts(ENDLESS), n_steps=8, core=core, recompute_memory=recompute)
    agent.learn(2 * 16)
    agent.learn(2 * 8)
    memory = slice(core.memory.length)
    assert (agent.rollout_buffer.index.episode[:, memory] == EMPTY).all()
    older = agent.rollout_buffer.older
    assert (older is not None) == isinstance(core.memory, KNN)
    if older is not None:
        assert (older.index.episode[:, :12] == EMPTY).all()
