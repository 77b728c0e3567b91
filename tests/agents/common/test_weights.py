"""Tests of the transfer of pre-trained weights between agents."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd

from rlxf.agents.common.weights import SyncedRunningMeanStd
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import (
    KNN,
    XL,
    Compressive,
    Full,
    GRUGate,
    Longformer,
    RoPE,
    TransformerSpec,
    Window,
    XLRelative,
)
from rlxf.training.process_group import ProcessGroup
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    IMAGE,
    SIZES,
    TINY,
    VECTOR,
    shown,
    small_agent,
    small_pretraining,
    some_trajectories,
)
from tests.agents.gtrxl import worlds

GATED = gtrxl(8, width=16, heads=2, feed_forward=32)


def tensors(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_acts(agent):
    observation = shown(agent.trajectories, np.array([3, 12]))
    assert np.isfinite(agent.predict(observation)[0]).all()


def gtrxl_agent(**changes):
    return worlds.small_agent(worlds.scripts([worlds.MIXED] * 3), **changes)


def test_a_decision_transformer_loads_all_weights_except_the_head():
    data = some_trajectories(seed=1)
    source = small_pretraining(data, return_scale=7.0).learn(2)
    agent = small_agent(some_trajectories(), core=TINY)
    head = tensors(agent.policy.loss)
    assert agent.load_pretrained(source) is agent
    for part in ("transformer", "tokens", "features"):
        assert equal(tensors(getattr(agent.policy, part)), tensors(getattr(source.policy, part))), part
    assert equal(head, tensors(agent.policy.loss))
    assert_acts(agent)


def test_tokens_are_equal_after_the_transfer(tmp_path):
    source = small_pretraining(some_trajectories(seed=1), return_scale=7.0)
    agent = small_agent(core=TINY).load_pretrained(source)
    agent.save(tmp_path / "agent")
    for each in (agent, type(agent).load(tmp_path / "agent", device="cpu")):
        batch = source.windows(source.trajectories).starting_at([0, 9])
        own, original = (model.tokens(model.steps(batch)) for model in (each.policy, source.policy))
        assert torch.equal(own, original)


def test_the_image_extractor_is_transferred():
    data = some_trajectories(IMAGE)
    source, agent = small_pretraining(data), small_agent(data, core=TINY)
    assert tensors(source.policy.features.extractor)
    agent.load_pretrained(source)
    assert equal(tensors(source.policy.features), tensors(agent.policy.features))
    assert_acts(agent)


def windowed(memory):
    return replace(GATED, memory=XL(memory), pattern=Window(memory + 1))


def of_longformer(memory):
    pattern = Longformer(memory, global_tokens=2, farthest=memory)
    return replace(GATED, memory=XL(memory), pattern=pattern, position=RoPE())


@pytest.mark.parametrize("core", [windowed, of_longformer])
def test_a_stage_with_a_larger_window_continues_from_all_weights_of_the_stage_before(core):
    """Until a token leaves the smaller window, both stages act alike; then the larger window sees more."""
    before = gtrxl_agent(core=core(4)).learn(48)
    after = gtrxl_agent(core=core(8), seed=9, learning_rate=1e-4)
    after.set_parameters(before.get_parameters())
    assert equal(tensors(before.policy), tensors(after.policy))
    observations = np.random.default_rng(0).normal(size=(9, 3, *worlds.VECTOR.shape)).astype(np.float32)
    states, start = [None, None], np.ones(3, dtype=bool)
    for step, observation in enumerate(observations):
        logits = []
        for n, agent in enumerate((before, after)):
            y, state = agent.action_logits(observation, states[n], start)
            states[n] = agent.observe_action(state, torch.zeros(3, dtype=torch.long))
            logits.append(y)
        if step <= 4:
            torch.testing.assert_close(*logits)
        start = np.zeros(3, dtype=bool)
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    after.learn(48)
    assert after.policy.optimizer.param_groups[0]["lr"] == 1e-4


def test_weights_transfer_between_decision_transformers():
    source = small_agent(core=replace(TINY, dropout=0.1)).learn(2)
    agent = small_agent(core=replace(TINY, memory=XL(6), pattern=Window(7)), seed=4).load_pretrained(source)
    assert equal(tensors(agent.policy.transformer), tensors(source.policy.transformer))
    agent.learn(2)
    assert_acts(agent)


@pytest.mark.parametrize("source", [small_pretraining, small_agent], ids=["masked", "next token"])
def test_gtrxl_loads_the_transformer_only(source):
    source = source(core=replace(GATED, dropout=0.2)).learn(2)
    agent = gtrxl_agent(core=GATED)
    others = {name: t for name, t in tensors(agent.policy).items() if not name.startswith("transformer.")}
    agent.load_pretrained(source)
    assert equal(tensors(agent.policy.transformer), tensors(source.policy.transformer))
    after = tensors(agent.policy)
    assert all(torch.equal(tensor, after[name]) for name, tensor in others.items())
    agent.learn(48)


def test_gtrxl_provides_the_transformer_only():
    source, agent = gtrxl_agent(core=GATED), small_agent(core=GATED)
    tokens = tensors(agent.policy.tokens)
    agent.load_pretrained(source)
    assert equal(tensors(agent.policy.transformer), tensors(source.policy.transformer))
    assert equal(tokens, tensors(agent.policy.tokens))
    assert_acts(agent)


MEMORIES = {
    "neighbors": replace(GATED, memory=KNN(2, 12, 4), pattern=Window(3)),
    "compression": replace(GATED, memory=Compressive(4, 4, 2), pattern=Full()),
}


@pytest.mark.parametrize("core", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("make", [gtrxl_agent, small_agent], ids=["GTrXL", "Decision Transformer"])
def test_memory_weights_missing_in_the_source_keep_their_initial_values(make, core):
    source, agent = small_pretraining(core=core), make(core=core)
    before = tensors(agent.policy.transformer)
    agent.load_pretrained(source)
    after, given = tensors(agent.policy.transformer), tensors(source.policy.transformer)
    assert given.keys() < after.keys()
    assert equal({name: after[name] for name in given}, given)
    own = after.keys() - given.keys()
    assert all(torch.equal(after[name], before[name]) for name in own)
    assert all("compression" in name or ".attention." in name for name in own)


@pytest.mark.parametrize("core", MEMORIES.values(), ids=MEMORIES)
def test_memory_weights_of_equal_memories_are_transferred(core):
    source, agent = gtrxl_agent(core=core), small_agent(core=core)
    agent.load_pretrained(source)
    assert equal(tensors(agent.policy.transformer), tensors(source.policy.transformer))


@pytest.mark.parametrize("memory", [Compressive(4, 4, 3), Compressive(4, 4, 2, "mean"), XL(6)], ids=str)
def test_memory_weights_of_different_memories_are_not_transferred(memory):
    core = MEMORIES["compression"]
    source, agent = gtrxl_agent(core=core), small_agent(core=replace(core, memory=memory))
    others = {name for name in tensors(source.policy.transformer) if "compression" not in name}
    before = tensors(agent.policy.transformer)
    after = tensors(agent.load_pretrained(source).policy.transformer)
    for name, tensor in after.items():
        expected = source.policy.transformer.state_dict() if name in others else before
        assert torch.equal(tensor, expected[name]), name


BASE = TransformerSpec(**SIZES, position=RoPE())
DIFFERENCES = {
    "width=16, the agent's has width=32": replace(BASE, width=32),
    "layers=2, the agent's has layers=3": replace(BASE, layers=3),
    "feed_forward=24, the agent's has feed_forward=64": replace(BASE, feed_forward=None),
    r"position=RoPE, the agent's has position=XLRelative": replace(BASE, position=XLRelative()),
    r"residual=Add, the agent's has residual=GRUGate": replace(BASE, residual=GRUGate()),
    "norm=pre, the agent's has norm=post": replace(BASE, norm="post"),
    "activation=relu, the agent's has activation=gelu": replace(BASE, activation="gelu"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_difference_of_cores_is_named(difference):
    source, agent = small_pretraining(core=BASE), small_agent(core=DIFFERENCES[difference])
    before = tensors(agent.policy)
    with pytest.raises(ValueError, match=difference):
        agent.load_pretrained(source)
    assert equal(before, tensors(agent.policy))


def test_weights_missing_due_to_causality_are_named():
    from rlxf.attention import ETC

    core = replace(TINY, pattern=ETC())  # adds global tokens if attention is bidirectional
    source, agent = small_pretraining(core=core), small_agent(core=core)
    before = tensors(agent.policy)
    with pytest.raises(ValueError, match="of transformer is"):
        agent.load_pretrained(source)
    assert equal(before, tensors(agent.policy))


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (some_trajectories(IMAGE), {}, "their observations differ"),
        (some_trajectories(VECTOR, ACTIONS["Discrete"]), {}, "their actions differ"),
        (
            some_trajectories(),
            {"episode_length": 99},
            "99 time-step embeddings, the agent 14; build it with episode_len",
        ),
    ],
    ids=["observations", "actions", "time steps"],
)
def test_weights_for_other_spaces_or_episode_lengths_are_refused(data, settings, message):
    agent = small_agent(core=TINY)
    before = tensors(agent.policy)
    with pytest.raises(ValueError, match=message):
        agent.load_pretrained(small_pretraining(data, **settings))
    assert equal(before, tensors(agent.policy))


@pytest.mark.parametrize(
    "source", ["pretraining.zip", None, torch.nn.Linear(2, 2)], ids=["path", "none", "module"]
)
def test_sources_of_other_types_are_refused(source):
    with pytest.raises(TypeError, match="source of weights must be"):
        small_agent(core=TINY).load_pretrained(source)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_copies_of_synchronized_statistics_belong_to_no_process_group(copied):
    """An evaluation in one process with statistics that communicate would wait for the other processes."""
    known = RunningMeanStd(shape=(3,))
    known.update(np.arange(6.0).reshape(2, 3))
    plain = copied(SyncedRunningMeanStd(known, ProcessGroup()))
    assert type(plain) is RunningMeanStd
    for name, value in vars(known).items():
        np.testing.assert_array_equal(getattr(plain, name), value)
