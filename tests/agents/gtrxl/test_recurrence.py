"""Recurrent cores in GTrXLPPO: states in `predict` and in files, faults, and diagnostics."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, MemoryCallback
from rlxf.attention import (
    CALM,
    KNN,
    LRU,
    RATE,
    RMT,
    SHM,
    Add,
    ALiBi,
    Compressive,
    Full,
    GatedDeltaNet,
    InfiniAttention,
    Mamba2,
    Performer,
    StreamingXL,
)
from rlxf.attention.attention import LayerCache
from rlxf.attention.segments import SegmentedCache
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.training import CheckpointError, CheckpointFolder, NumericalError, read_archive, write_archive
from tests.agents.gtrxl.test_persistent_memory import persistent_agent
from tests.agents.gtrxl.test_predict import never, observations, play, where
from tests.agents.gtrxl.test_resume import TOTAL, begin, cut_off, lively
from tests.agents.gtrxl.test_truncation import Recorder
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    RECURRENT_CORES,
    last_outputs,
    next_step_scripts,
    parameters,
    recurrent_core,
    rollouts,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

each_core = pytest.mark.parametrize("core", RECURRENT_CORES.values(), ids=RECURRENT_CORES)
ENVS = 3


def box_agent(core, **changes):
    return small_agent(scripts(shifted(ENVS), action_space=ACTIONS["Box"]), core=core, **changes)


@each_core
def test_recomputed_memory_is_refused(core):
    message = (
        rf"recompute_memory=True needs a memory .*{type(core.recurrence).__name__}.*recompute_memory=False"
    )
    with pytest.raises(ValueError, match=message):
        small_agent(scripts(shifted(2)), core=core, recompute_memory=True)


@pytest.mark.first_cases(1)
@each_core
def test_saved_agent_acts_alike(core, tmp_path):
    agent = box_agent(core).learn(96)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    assert loaded.core == core
    expected, state = play(agent, observations(), never())
    actual, other = play(loaded, observations(), never())
    assert np.array_equal(expected, actual)
    one, two = (each.cache.recurrent.named_tensors() for each in (state, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@each_core
def test_predict_does_not_modify_state(core):
    agent, seen = box_agent(core), observations()
    _, state = play(agent, seen[:5], never(5))
    kept = {name: x.clone() for name, x in state.cache.recurrent.named_tensors().items()}
    first, _ = play(agent, seen[5:9], never(4), state)
    again, _ = play(agent, seen[5:9], never(4), state)
    assert np.array_equal(first, again)
    assert all(torch.equal(kept[name], x) for name, x in state.cache.recurrent.named_tensors().items())


@each_core
def test_new_episode_does_not_depend_on_the_one_before(core):
    agent, starts = box_agent(core), never()
    starts[0] = True
    pasts = [play(agent, observations(past)[:5], never(5))[1] for past in (1, 2)]
    first, second = (play(agent, observations(), starts, state)[0] for state in pasts)
    assert np.array_equal(first, second)
    carried = [play(agent, observations(), never(), state)[0] for state in pasts]
    assert not np.array_equal(*carried)


OTHERS = {
    "another recurrence": recurrent_core(recurrence=Mamba2(state=4)),
    "another width": recurrent_core(width=24),
    "more layers": recurrent_core(layers=3),
    "attention": small_core(),
    "a longer memory": dataclasses.replace(small_core(), recurrence=GatedDeltaNet(), attention_layers=(1,)),
}


@pytest.mark.parametrize("core", OTHERS.values(), ids=OTHERS)
def test_state_of_another_core_is_refused(core):
    agent, other = box_agent(recurrent_core()), box_agent(core)
    for one, two in ((agent, other), (other, agent)):
        _, state = one.predict(observations()[0])
        with pytest.raises(ValueError, match=r"state is of another core: .* in this agent; pass state=None"):
            two.predict(observations()[0], state=state)


def test_state_of_other_environments_is_refused():
    agent = box_agent(recurrent_core())
    _, state = agent.predict(observations()[0])
    with pytest.raises(ValueError, match="state is of 3 environments, the observation of 2"):
        agent.predict(observations()[0, :2], state=state)


def test_state_on_another_device_is_refused():
    agent = box_agent(recurrent_core())
    _, state = agent.predict(observations()[0])
    state = dataclasses.replace(state, position=state.position.to("meta"))
    with pytest.raises(ValueError, match="state is on meta, the agent on cpu; pass state=None"):
        agent.predict(observations()[0], state=state)


def test_state_of_another_kind_is_refused():
    agent = box_agent(recurrent_core())
    with pytest.raises(TypeError, match="state must be one that predict returned, got tuple"):
        agent.predict(observations()[0], state=(np.zeros(3),))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", RECURRENT_CORES)
def test_state_with_one_value_that_is_not_finite_is_refused(name, value):
    agent = box_agent(RECURRENT_CORES[name])
    _, state = agent.predict(observations()[0])
    for key in {key: None for each in state.cache.recurrent.passes for key in each}:
        faulty = state.copy()
        passes = [each for each in faulty.cache.recurrent.passes if key in each]
        passes[0][key][1].view(-1)[0] = value
        message = rf"state '{key}' of layer \d, .*, contains {value} in row 1 of the batch before the step"
        with pytest.raises(NumericalError, match=message):
            agent.predict(observations()[1], state=faulty)
    agent.predict(observations()[1], state=state)


@pytest.mark.parametrize(
    ("core", "segment"),
    [
        (dataclasses.replace(small_core(), pattern=Full(), memory=RMT(9, 3)), 9),
        (recurrent_core(recurrence=InfiniAttention(9)), 9),
    ],
    ids=["memory tokens", "matrix memory"],
)
def test_segments_that_hide_the_memory_from_gradients_are_reported(core, segment):
    with pytest.warns(
        UserWarning, match=f"segment_length=8 is not longer than a segment of .*={2 * segment}"
    ):
        box_agent(core, n_steps=8, segment_length=8, batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        box_agent(core, n_steps=10, segment_length=10, batch_size=20)


MEMORIES = {
    "recurrent": recurrent_core(),
    "XL": small_core(),
    "distances": dataclasses.replace(small_core(), position=ALiBi()),
    "sinks": dataclasses.replace(small_core(), pattern=Full(), memory=StreamingXL(8, 4)),
    "compressed": dataclasses.replace(small_core(), pattern=Full(), memory=Compressive(4, 4, 4)),
    "nearest neighbors": dataclasses.replace(small_core(), memory=KNN(8, 8, 2)),
    "memory tokens": dataclasses.replace(small_core(), pattern=Full(), memory=RMT(9, 3)),
    "valve": dataclasses.replace(small_core(), pattern=Full(), memory=RATE(9, 3)),
    "linear attention": dataclasses.replace(small_core(), position=None, kernel=Performer(6)),
    "more features": dataclasses.replace(small_core(), position=None, kernel=Performer(8)),
    "mixed": RECURRENT_CORES["Mamba-2 below attention"],
}


@pytest.mark.parametrize("name", MEMORIES)
def test_state_of_any_other_core_is_refused(name):
    agent = box_agent(MEMORIES[name])
    message = r"state is of another core: [\w.]+ is .* in the state, .* in this agent; pass state=None"
    for other, core in MEMORIES.items():
        _, state = box_agent(core).predict(observations()[0])
        if other == name:
            assert np.isfinite(agent.predict(observations()[1], state=state)[0]).all()
            continue
        with pytest.raises(ValueError, match=message):
            agent.predict(observations()[1], state=state)


def spoil(state):
    """Set a value of the memory of row 1 to NaN."""
    recurrent, cache = state.cache.recurrent, state.cache
    if isinstance(cache, SegmentedCache):
        cache.memories.tokens[1, 0] = np.nan
        cache.memories.written[:] = True
    elif recurrent is not None and recurrent.passes[0]:
        recurrent.passes[0]["state"][1] = np.nan
    else:
        assert isinstance(cache.layers[0], LayerCache)
        cache.layers[0].values[1] = np.nan


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_that_is_not_finite_gives_an_error_and_no_action(name):
    """Memory tokens are read when the next segment begins, other memories in the next step."""
    agent = box_agent(MEMORIES[name])
    _, state = play(agent, observations()[:4], never(4))
    spoil(state)
    message = r"contains nan in row 1 of the batch|memory before the step contains NaN"
    with pytest.raises(NumericalError, match=message):
        play(agent, [observations()[4]] * 12, never(12), state)


PARAMETERS = {
    "NaN": (GatedDeltaNet(), "beta.weight", np.nan, "it must be finite"),
    "rate": (GatedDeltaNet(), "log_rate", 90.0, "more than 28.24 can make the state exceed float32"),
    "gain": (LRU(), "gamma_log", 100.0, "more than 28.24 can make"),
    "time step": (Mamba2(state=4), "time_step_bias", 1e30, "more than 1.845e[+]12 can make"),
}
each_parameter = pytest.mark.parametrize(
    ("recurrence", "name", "value", "allowed"), PARAMETERS.values(), ids=PARAMETERS
)


def spoiled_agent(recurrence, name, value, **changes):
    agent = small_agent(scripts(shifted(2)), core=recurrent_core(recurrence=recurrence), **changes)
    with torch.no_grad():
        agent.policy.transformer.blocks[1].mixer.get_parameter(name).view(-1)[0] = value
    return agent


@each_parameter
def test_parameter_that_lets_states_overflow_is_named_before_a_rollout(
    tmp_path, recurrence, name, value, allowed
):
    agent = spoiled_agent(recurrence, name, value, tensorboard_log=str(tmp_path))
    message = rf"the parameter 'mixer.{name}' of layer 2, .*contains .*{allowed}"
    with pytest.raises(NumericalError, match=message):
        agent.learn(96)
    assert agent.num_timesteps == 0
    assert not list(tmp_path.iterdir())
    student = small_agent(scripts(shifted(2)), core=agent.core)
    before = parameters(student)
    with pytest.raises(NumericalError, match=message):
        student.distill(agent, 96)
    with pytest.raises(ValueError, match=message):
        student.load_pretrained(agent)
    assert same(before, parameters(student))


@each_parameter
def test_parameter_that_lets_states_overflow_is_named_before_an_update(recurrence, name, value, allowed):
    agent = small_agent(scripts(shifted(2)), core=recurrent_core(recurrence=recurrence))
    next(iter(rollouts(agent, 1)))
    with torch.no_grad():
        agent.policy.transformer.blocks[1].mixer.get_parameter(name).view(-1)[0] = value
    kept = [x.nan_to_num() for x in core_weights(agent)]
    with pytest.raises(
        NumericalError, match=rf"update after step 32: .*'mixer.{name}' of layer 2.*{allowed}"
    ):
        agent.train()
    assert same(kept, [x.nan_to_num() for x in core_weights(agent)])


@each_parameter
def test_file_with_a_parameter_that_lets_states_overflow_is_refused(
    tmp_path, recurrence, name, value, allowed
):
    agent = small_agent(scripts(shifted(2)), core=recurrent_core(recurrence=recurrence))
    agent.save(tmp_path / "agent.zip")
    archive, before = read_archive(tmp_path / "agent.zip"), parameters(agent)
    archive.tensors["policy"][f"transformer.blocks.1.mixer.{name}"].view(-1)[0] = value
    write_archive(tmp_path / "agent.zip", archive.documents, archive.tensors)
    message = rf"mixer.{name}.*contains .*{'' if np.isnan(value) else allowed}"
    with pytest.raises(CheckpointError, match=message):
        GTrXLPPO.load(tmp_path / "agent.zip", device="cpu")
    with pytest.raises(CheckpointError, match=message):
        agent.set_parameters(tmp_path / "agent.zip")
    assert same(before, parameters(agent))


def growing_agent(env, **changes):
    """Return an agent whose Hadamard memory doubles in every step: it overflows after about 130 steps."""
    agent = small_agent(env, core=recurrent_core(recurrence=SHM(size=4, rows=2)), loud=False, **changes)
    with torch.no_grad():
        agent.policy.transformer.blocks[0].mixer.theta.zero_()
        mixer = agent.policy.transformer.blocks[1].mixer
        mixer.theta.fill_(50.0)
        mixer.calibration.weight.fill_(50.0)
        mixer.calibration.weight[:, 0] = 1e4
        agent.policy.transformer.blocks[1].mixer_norm.norm.bias[0] = 10.0
    return agent


def test_overflow_of_a_state_in_a_rollout_names_its_layer():
    agent = growing_agent(scripts([[0]] * 2), n_steps=512, batch_size=64, segment_length=64)
    before = parameters(agent)
    with pytest.raises(NumericalError, match=r"state 'state' of layer 2, SHM\(.*contains .* after the step"):
        agent.learn(2048)
    assert same(before, parameters(agent))


def test_overflow_of_a_state_in_predict_names_its_layer():
    agent = growing_agent(scripts([[0]] * 2))
    with pytest.raises(NumericalError, match=r"of layer 2, SHM\(.*contains .* after the step"):
        play(agent, [observations()[0]] * 1000, never(1000))


def core_weights(agent):
    """Return a copy of the transformer's weights; the value head is rescaled before an update."""
    return [parameter.detach().clone() for parameter in agent.policy.transformer.parameters()]


@pytest.mark.thorough
def test_overflow_of_a_state_in_an_update_names_its_layer():
    """The weights of an epoch can overflow although those of the rollout did not."""
    agent = growing_agent(scripts([[0]] * 2), n_steps=512, batch_size=512, segment_length=512)
    theta = agent.policy.transformer.blocks[1].mixer.theta
    with torch.no_grad():
        theta.zero_()
    _, callback = agent._setup_learn(10**6)
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    with torch.no_grad():
        theta.fill_(50.0)
    before = core_weights(agent)
    with pytest.raises(NumericalError, match=r"update after step .* of layer 2, SHM\(.* after the step"):
        agent.train()
    assert same(before, core_weights(agent))


def test_state_that_is_not_finite_is_named_in_the_error_of_an_update():
    agent = small_agent(scripts(shifted(2)), core=recurrent_core())
    next(iter(rollouts(agent, 1)))
    agent.rollout_buffer.recurrent._states.passes[0]["state"][:] = np.nan
    before = core_weights(agent)
    with pytest.raises(NumericalError, match=r"update after step 32: .* of layer 1, .* before the step"):
        agent.train()
    assert same(before, core_weights(agent))


FAULTS = {
    "NaN": (lambda x: x * np.nan, "of layer 1, GatedDeltaNet.*contains nan"),
    "shape": (lambda x: x[..., :1].contiguous(), r"recurrent state 0.state has shape"),
    "rows": (lambda x: x[:2].contiguous(), r"."),
    "dtype": (lambda x: x.double(), r"recurrent state 0.state has .* dtype torch.float64"),
}
"""Changes of the stored recurrent state, with the message of each."""


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_state_in_a_file_is_refused(tmp_path, name):
    change, message = FAULTS[name]
    settings = {"core": recurrent_core()}
    cut_off(tmp_path, lively, 2, **settings)
    file = CheckpointFolder(tmp_path).newest()
    archive = read_archive(file)
    states = archive.tensors["rollout_state"]
    states["recurrent.0.state"] = change(states["recurrent.0.state"])
    write_archive(file, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match=message):
        begin(lively, **settings).learn(TOTAL, resume_from=file)


def steps_so_far(buffer, records, env, t):
    """Return observations, previous actions and index of an environment up to step t, from all rollouts."""
    return [
        torch.cat([*(record[k][env] for record in records), part[env, : t + 1]])
        for k, part in enumerate(buffer)
    ]


TRUNCATED = {
    "GatedDeltaNet": (scripts, False),
    "Mamba-2 below attention": (lambda ends: as_vec_env(next_step_scripts(ends)), False),
    "attention below GRU": (lambda ends: as_vec_env(next_step_scripts(ends)), True),
    "LSTM": (scripts, True),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_step_is_bootstrapped_with_the_value_after_all_steps(name):
    """The expected value is that of one pass over all steps since the first rollout."""
    world, across = TRUNCATED[name]
    env, core = Recorder(world(shifted(ENVS))), RECURRENT_CORES[name]
    agent = small_agent(env, core=core, gamma=0.9, persist_memory_across_episodes=across, learning_rate=0.0)
    policy, records, cuts = agent.policy, [], 0
    for buffer in rollouts(agent, 2):
        index = buffer.steps_index
        current = buffer.obs, buffer.previous, index.position, index.episode
        for t, (rewards, infos) in enumerate(env.steps):
            for e, info in enumerate(infos):
                value = 0.0
                if info.get("TimeLimit.truncated"):
                    obs, previous, position, episode = steps_so_far(current, records, e, t)
                    last = torch.as_tensor(info["terminal_observation"])[None]
                    taken = policy.encode_actions(buffer.actions[[e], t])
                    value = one_pass(
                        policy,
                        torch.cat([obs, last]),
                        torch.cat([previous, taken]),
                        torch.cat([position, position[-1:] + 1]),
                        torch.cat([episode, episode[-1:]]),
                    )
                    cuts += 1
                assert buffer.rewards[e, t].item() == pytest.approx(rewards[e] + 0.9 * value, abs=1e-4)
        env.steps.clear()
        records.append([part.clone() for part in current])
    assert cuts > 3


def one_pass(policy, obs, previous, position, episode):
    index = type(policy.transformer.initial_state(1).index)(position[None], episode[None])
    with torch.no_grad():
        outputs = last_outputs(policy, obs, previous, index, policy.transformer.initial_state(1))
        return policy.heads(outputs[-1:])[1].item()


def tags(folder, kind):
    (run,) = folder.iterdir()
    return EventAccumulator(str(run)).Reload().Tags()[kind]


MAPS = {
    "pure": (recurrent_core(residual=Add()), set(), []),
    "pure with gates": (recurrent_core(), {"mixer_gate", "feed_forward_gate"}, []),
    "mixed": (
        dataclasses.replace(small_core(residual=Add()), recurrence=Mamba2(state=4), attention_layers=(1,)),
        {"attention_on_memory", "attended_distance", "filled"},
        [2],
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_callbacks_show_the_layers_with_attention(tmp_path, name):
    core, metrics, layers = MAPS[name]
    agent = small_agent(scripts(shifted(ENVS)), core=core, tensorboard_log=str(tmp_path))
    agent.learn(3 * 16 * 2, [MemoryCallback(1), AttentionMapCallback(1)])
    written = {tag for tag in tags(tmp_path, "scalars") if tag.startswith("memory/")}
    assert {tag.split("/")[-1] for tag in written} == metrics
    attended = {tag.split("/")[1] for tag in written if "attend" in tag.split("/")[-1]}
    assert attended == {f"layer_{layer}" for layer in layers}
    assert tags(tmp_path, "images") == ["attention/maps"] * bool(layers)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_exits_with_recurrent_layers(threshold):
    """At threshold 1 no token exits; at 0 all exit after the second pass, the first with a confidence."""
    core = recurrent_core(layers=3, depth=CALM("state", threshold))
    agent, seen = box_agent(core), observations()
    _, state = play(agent, seen, never())
    depth = agent.policy.transformer.pop_mean_acting_depth()
    assert depth == (3 if threshold else 2)
    assert all(x.any() for states in state.cache.recurrent.passes for x in states.values() if x.numel())


@pytest.mark.parametrize("attention_layers", [(), (1,)], ids=["pure", "mixed"])
def test_predict_with_early_exits_equals_a_segment_with_early_exits(attention_layers):
    recurrence = {"recurrence": Mamba2(state=4), "attention_layers": attention_layers}
    base = small_core() if attention_layers else recurrent_core()
    core = dataclasses.replace(base, layers=3, depth=CALM("state", 0.9), **recurrence)
    agent, seen, starts = box_agent(core, previous_action=False), observations(), never()
    starts[0], starts[8, 1] = True, True
    acted, _ = play(agent, seen, starts)
    depth = float(agent.policy.transformer.pop_mean_acting_depth())
    obs = torch.as_tensor(seen).transpose(0, 1)
    with torch.no_grad():
        tokens = agent.policy.tokens(obs.flatten(0, 1), torch.zeros(obs.shape[0] * obs.shape[1], 0))
        state = agent.policy.transformer.initial_state(ENVS)
        outputs = agent.policy.transformer.early_outputs(
            tokens.unflatten(0, obs.shape[:2]), where(starts), state
        )
        mode = agent.policy.heads(outputs.flatten(0, 1))[0].mode().unflatten(0, obs.shape[:2])
    expected = mode.transpose(0, 1).numpy().clip(-1, 2)
    np.testing.assert_allclose(acted, expected, atol=1e-5)
    assert 2 < depth < 3, "some tokens should exit early"


def test_memory_persists_across_episodes():
    agent = persistent_agent(scripts(shifted(1), action_space=ACTIONS["Box"]), core=recurrent_core())
    seen, starts = observations(envs=1), never(envs=1)
    starts[0], starts[5] = True, True
    other = seen.copy()
    other[2] *= -1
    first, second = (play(agent, shown, starts)[0] for shown in (seen, other))
    assert (first[6:] != second[6:]).any()
