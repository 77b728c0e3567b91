"""Tests of context="episode": acting equals training over whole episodes, at constant cost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, episode_context
from rlxf.agents.decision_transformer.episode_context import EpisodeContext
from rlxf.attention import (
    CALM,
    KNN,
    KNNLM,
    RATE,
    RMT,
    XL,
    Compressive,
    DepthAdaptive,
    Floater,
    GatedDeltaNet,
    LearnedAbsolute,
    MinGRU,
    RoPE,
    StreamingXL,
    TransformerSpec,
    Universal,
    Window,
    XLRelative,
)
from rlxf.data import EpisodeWindows
from rlxf.training import CheckpointWriter
from rlxf.training.checkpoints import CheckpointFolder
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    SIZES,
    K,
    replayed,
    shown,
    small_agent,
    some_trajectories,
)

RELATIVE = TransformerSpec(**SIZES, position=XLRelative())
CORES = {
    "XL": replace(RELATIVE, memory=XL(7), pattern=Window(8)),
    "learned positions of segments": replace(RELATIVE, position=LearnedAbsolute(10), memory=RMT(6, tokens=2)),
    "Compressive": replace(RELATIVE, memory=Compressive(4, 3, 2)),
    "KNN": replace(RELATIVE, memory=KNN(5, far=30, top=3), pattern=Window(6)),
    "StreamingXL": replace(RELATIVE, memory=StreamingXL(6, sinks=2)),
    "RMT": replace(RELATIVE, memory=RMT(6, tokens=2)),
    "RMT between the steps": replace(RELATIVE, memory=RMT(7, tokens=2)),
    "RATE": replace(RELATIVE, memory=RATE(6, tokens=2)),
    "GatedDeltaNet": TransformerSpec(**SIZES, recurrence=GatedDeltaNet()),
    "MinGRU": TransformerSpec(**SIZES, recurrence=MinGRU()),
    "mixed": TransformerSpec(
        **SIZES, recurrence=MinGRU(), attention_layers=(1,), position=RoPE(), memory=XL(5), pattern=Window(6)
    ),
    "Universal": replace(RELATIVE, memory=XL(7), pattern=Window(8), depth=Universal()),
}
LENGTHS = (9, 1, 4, 14, 12, 5)
ROWS = ((0, 1, 4), (3,), (2, 5, 1))
"""Episodes that each of three environments plays one after the other, not all of the same length."""


def episodic_agent(core="XL", **changes):
    data = some_trajectories(lengths=LENGTHS)
    settings = {"core": CORES[core] if isinstance(core, str) else core, "context": "episode"}
    return small_agent(changes.pop("trajectories", data), **(settings | changes))


@torch.no_grad()
def learned_outputs(agent):
    """Return the training outputs at the state token of each step, (N, C)."""
    model, outputs = agent.policy.eval(), []
    for batch in agent.windows(agent.trajectories).iterate_once(3):
        mask = batch.mask[:, model.window_start(batch) :]
        outputs.append(model.outputs(model.steps(batch))[mask])
    return torch.cat(outputs)


def play(agent, rows=ROWS):
    """Play episodes of the data in parallel environments, which end one after the other."""
    data, state = agent.trajectories, None
    queues = [np.concatenate([np.arange(*data.offsets[e : e + 2]) for e in row]) for row in rows]
    running = np.arange(len(rows))
    for t in range(max(map(len, queues))):
        still = np.array([t < len(queues[row]) for row in running])
        if not still.all():
            state, running = state.rows(torch.from_numpy(still)), running[still]
        steps = np.array([queues[row][t] for row in running])
        actions, state = agent.predict(shown(data, steps), state)
        yield steps, actions, state


@pytest.mark.parametrize("core", CORES)
def test_acting_equals_learning(core):
    agent = episodic_agent(core)
    learned = learned_outputs(agent)
    chosen = agent.policy.loss.head.choose(learned, deterministic=True).detach().numpy()
    for steps, actions, state in play(agent):
        torch.testing.assert_close(state.output, learned[steps], atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(
            actions, chosen[steps].clip(agent.action_space.low, agent.action_space.high), atol=1e-4
        )


@pytest.mark.parametrize("core", CORES)
def test_outputs_do_not_depend_on_where_windows_begin(core):
    agent, whole = episodic_agent(core), episodic_agent(core, context_length=max(LENGTHS) + 3)
    torch.testing.assert_close(learned_outputs(agent), learned_outputs(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("core", CORES)
def test_outputs_do_not_depend_on_the_parts_of_the_burn_in(core, monkeypatch):
    agent = episodic_agent(core)
    at_once = learned_outputs(agent)
    monkeypatch.setattr(episode_context, "BURN_IN_STEPS", 2)
    torch.testing.assert_close(learned_outputs(agent), at_once, atol=1e-4, rtol=1e-4)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("core", ["RATE", "MinGRU", "StreamingXL"])
def test_the_first_observation_affects_the_last_action(core):
    """With a window of 5 steps, and a memory of at most 3, it is forgotten."""
    for context, remembered in (("episode", True), ("window", False)):
        agent = small_agent(some_trajectories(lengths=(20,)), core=CORES[core], context=context)
        last = []
        for change in (0.0, 2.0):
            state = None
            for t in range(20):
                observation = shown(agent.trajectories, np.array([t]))
                observation["observation"] = observation["observation"] + change * (t == 0)
                action, state = agent.predict(observation, state)
            last.append(action)
        assert (np.abs(last[0] - last[1]).max() > 0) == remembered


def test_gradients_cross_the_window_but_not_its_start():
    agent = episodic_agent("RATE", context_length=8)
    batch = agent.windows(agent.trajectories).starting_at([14 + 8])
    context = agent.policy.steps(batch)
    context = replace(context, features=context.features.clone().requires_grad_())
    agent.policy.outputs(context)[:, -1].sum().backward()
    gradient = context.features.grad[0].abs().amax(dim=1)
    assert agent.policy.window_start(batch) == 8
    assert (gradient[:8] == 0).all()
    assert (gradient[8:] > 0).all()


def test_the_training_reaches_the_valve_of_rate():
    agent = episodic_agent("RATE", context_length=max(LENGTHS))
    agent.policy.losses(agent.windows(agent.trajectories).starting_at([0, 14]))["loss"].backward()
    assert all(part.grad.abs().sum() > 0 for part in agent.policy.transformer.memory_tokens.parameters())


def counted(step, counts):
    """Return a step that records its number of tokens; a call within another one does not count."""

    def run(x, *args, **options):
        before = len(counts)
        outputs = step(x, *args, **options)
        counts[before:] = [len(x)]
        return outputs

    return run


@pytest.mark.parametrize("core", ["XL", "RATE", "KNN", "GatedDeltaNet"])
def test_the_cost_of_a_step_is_constant(core, monkeypatch):
    agent = episodic_agent(core)
    counts, state, slots = [], None, set()
    transformer = agent.policy.transformer
    monkeypatch.setattr(transformer, "step", counted(transformer.step, counts))
    monkeypatch.setattr(transformer, "early_step", counted(transformer.early_step, counts))
    for t in range(60):
        observation = shown(agent.trajectories, np.array([min(t, 8), 14]))
        _, state = agent.predict(observation | {"time_step": np.array([[t], [0]])}, state)
        slots.add(str(state.cache.layout))
    assert counts == [2] * 3 * 60
    assert len(slots) == 1


def test_a_state_is_not_modified():
    agent = episodic_agent("mixed")
    states = [state for _, _, state in play(agent, ((0,), (3,)))]
    observation = shown(agent.trajectories, np.array([3, 16]))
    first = agent.predict(observation, states[2])[0]
    agent.predict(shown(agent.trajectories, np.array([0, 17])), states[2], np.array([True, False]))
    np.testing.assert_array_equal(agent.predict(observation, states[2])[0], first)


@pytest.mark.parametrize("core", ["XL", "RATE", "MinGRU"])
def test_episode_start_and_time_step_0_reset_a_row(core):
    agent = episodic_agent(core)
    state = [state for _, _, state in play(agent, ((3,), (4,)))][10]
    observation = shown(agent.trajectories, np.array([7, 16]))
    fresh, _ = agent.predict(observation, None, np.array([True, True]))
    reset, _ = agent.predict(observation, state, np.array([False, True]))
    np.testing.assert_allclose(reset[1], fresh[1], atol=1e-5)
    assert np.abs(reset[0] - fresh[0]).max() > 1e-3
    first = shown(agent.trajectories, np.array([0, 14]))
    np.testing.assert_allclose(agent.predict(first, state)[0], agent.predict(first)[0], atol=1e-5)


def test_states_that_do_not_fit_are_refused():
    agent = episodic_agent("XL")
    observation = shown(agent.trajectories, np.array([3, 16]))
    _, state = agent.predict(observation)
    with pytest.raises(ValueError, match="of 2 environments, the observation of 1; pass state=None"):
        agent.predict(shown(agent.trajectories, np.array([3])), state)
    _, other = small_agent(context="window").predict(observation)
    with pytest.raises(TypeError, match="one that predict returned, got ContextWindow; pass state=None"):
        agent.predict(observation, other)
    with pytest.raises(TypeError, match="one that predict returned, got EpisodeContext; pass state=None"):
        small_agent().predict(observation, state)
    for other in ("mixed", replace(CORES["XL"], activation="gelu")):  # the last one has equal caches
        with pytest.raises(ValueError, match=r"state is of another core: .* in this agent; pass state=None"):
            episodic_agent(other).predict(observation, state)
    dropping = episodic_agent(replace(CORES["XL"], dropout=0.1))  # without effect on states
    assert dropping.predict(observation, state)[0].shape == (2, 2)


def test_all_actions_and_objectives():
    for name in ("Discrete", "MultiDiscrete"):
        data = some_trajectories(action_space=ACTIONS[name], lengths=LENGTHS)
        agent = episodic_agent("RATE", trajectories=data, objective=MaximumEntropy())
        agent.learn(2)
        actions = np.concatenate([actions for _, actions, _ in play(agent)])
        assert all(agent.action_space.contains(action) for action in actions)


def test_one_time_embedding_serves_episodes_of_any_length():
    agent = episodic_agent("MinGRU", episode_length=1)
    assert agent.policy.tokens.time.weight.shape[0] == 1
    agent.learn(1)
    learned = learned_outputs(agent)
    for steps, _, state in play(agent):
        torch.testing.assert_close(state.output, learned[steps], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("core", ["XL", "RATE", "MinGRU"])
def test_keys_of_a_datastore_equal_the_inputs_of_the_head(core):
    agent = episodic_agent(core)
    keys = agent.attach_datastore(agent.trajectories, KNNLM(k=1)).datastore.store.keys
    torch.testing.assert_close(keys, learned_outputs(agent), atol=1e-5, rtol=1e-5)
    for steps, _, state in play(agent):
        torch.testing.assert_close(agent.policy.newest_output(state), keys[steps], atol=1e-4, rtol=1e-4)


def test_the_context_is_saved(tmp_path):
    agent = episodic_agent("RATE").learn(2)
    agent.save(tmp_path / "agent")
    loaded = DecisionTransformer.load(tmp_path / "agent", device="cpu")
    assert loaded.context == "episode"
    for before, after in zip(play(agent), play_with(loaded, agent.trajectories), strict=True):
        np.testing.assert_array_equal(before[1], after[1])
    assert isinstance(after[2], EpisodeContext)


def play_with(agent, trajectories):
    agent.trajectories = trajectories
    return play(agent)


def test_a_resumed_training_gives_equal_weights(tmp_path):
    whole = episodic_agent("RATE").learn(4)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=4)
    episodic_agent("RATE").learn(4, CheckpointWriter(folder, every_seconds=0))
    for file in folder.files()[1:]:  # simulates an earlier interruption
        file.unlink()
    resumed = episodic_agent("RATE").learn(4, resume_from=folder.path)
    assert all(map(torch.equal, whole.policy.parameters(), resumed.policy.parameters()))


@pytest.mark.parametrize(
    ("core", "message"),
    [
        (RELATIVE, "needs a core with memory, e.g. .*, or context='window'"),
        (replace(RELATIVE, memory=XL(7)), r"Full\(\) reaches farther back than XL.*, or context='window'"),
        (
            replace(CORES["XL"], position=Floater()),
            "counts positions from the start of the episode, but Floater.*use a relative position",
        ),
        (
            replace(CORES["XL"], position=LearnedAbsolute(1000)),
            r"LearnedAbsolute\(max_length=1000\) has a limit; use a relative position, .*context='window'",
        ),
        (
            replace(CORES["XL"], depth=DepthAdaptive(classifier="sequence")),
            "decides exits by the mean over a sequence.*, or context='window'",
        ),
    ],
    ids=["no memory", "pattern", "slow positions", "positions", "exits"],
)
def test_cores_that_do_not_fit_are_refused(core, message):
    with pytest.raises(ValueError, match=message):
        episodic_agent(core)
    small_agent(core=replace(core, position=XLRelative()))


def test_positions_within_segments_may_have_a_limit():
    """An episode that is longer than those of the data has more tokens than the core has positions."""
    agent = episodic_agent("learned positions of segments")
    longer = some_trajectories(lengths=(20,))
    assert longer.steps > agent.trajectories.lengths.max()
    assert np.isfinite(replayed(agent, longer)).all()


def test_unknown_contexts_are_refused():
    with pytest.raises(ValueError, match="context must be 'window' or 'episode', got 'all'"):
        small_agent(context="all")


def test_methods_that_need_a_window_are_refused():
    agent = episodic_agent("XL", objective=MaximumEntropy())
    calls = {
        "distill": lambda: small_agent().distill(agent, 1),
        "learn_online": lambda: agent.learn_online(10, 1.0),
        "calibrate": lambda: episodic_agent(replace(CORES["XL"], depth=CALM())).calibrate(),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} needs an agent that acts from a window of steps"):
            call()


@pytest.mark.parametrize("length", [1, 3, K, 14, 30])
def test_windows_divide_the_episodes(length):
    data = some_trajectories(lengths=LENGTHS)
    windows, seen = EpisodeWindows(data, length), []
    for start in range(data.steps):
        batch = windows.starting_at([start, 0])
        episode = np.searchsorted(data.offsets, start, side="right") - 1
        time = start - data.offsets[episode]
        end = min(time // length * length + length, LENGTHS[episode])
        assert batch.time_steps[0][batch.mask[0]].tolist() == list(range(end))
        rows = data.observations[data.offsets[episode] : data.offsets[episode] + end]
        np.testing.assert_array_equal(batch.observations[0][batch.mask[0]], rows)
        assert not batch.observations[~batch.mask].any()
    agent = episodic_agent(context_length=length)
    for batch in windows.iterate_once(4):
        first = agent.policy.window_start(batch)
        seen.append(batch.observations[:, first:][batch.mask[:, first:]])
        assert first or length >= max(LENGTHS) or not batch.time_steps.max() >= length
        assert batch.mask.any(0).all(), "no column is padding only"
    np.testing.assert_array_equal(torch.cat(seen), data.observations)
