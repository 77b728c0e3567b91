"""Tests of benchmarks at small sizes."""

import subprocess
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from benchmarks import (
    ablation,
    ablation_runs,
    acting,
    cores,
    corridors,
    curriculum,
    depth,
    learning,
    memory,
    mixers,
    retrieval,
    reversible,
    risk_control,
    stitching,
)
from benchmarks.ablation import CHANGES, DETAILS, Ablation
from benchmarks.acting import Acting
from benchmarks.cores import Cores, Task
from benchmarks.corridors import Corridors, oracle_episodes
from benchmarks.curriculum import Curriculum
from benchmarks.depth import DepthBench
from benchmarks.learning import Corridor, Learning
from benchmarks.memory import MemoryBench, Run, cells
from benchmarks.mixers import Mixers
from benchmarks.offline_updates import AGENTS, OfflineUpdates
from benchmarks.result_cache import read_runs, run_missing
from benchmarks.reversible import AGREE, Point, difference
from benchmarks.stitching import Stitching
from benchmarks.tensors import ENVS, Tensors
from rich.console import Console

from rlxf.agents.gtrxl import network_step
from rlxf.attention import TokenIndex
from rlxf.attention.positions.xl_relative import XLRelativeBias
from rlxf.envs import TMaze
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.attention.passes import act, assert_close_for_dtype, learn
from tests.attention.worlds import random_segment


@pytest.fixture(autouse=True)
def _small(monkeypatch, benchmarks_in_process):
    for bench in (ablation, cores, depth, memory):
        monkeypatch.setattr(bench, "ENVS", 4)
    monkeypatch.setattr(memory, "CALLS", 3)


def printed(table):
    """Render a table as text."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@dataclass(frozen=True)
class Number:
    value: int


def test_completed_runs_are_not_repeated(tmp_path):
    output, calls = tmp_path / "deep" / "runs.jsonl", []

    def make(value):
        calls.append(value)
        return Number(value)

    run_missing({"one": partial(make, 1)}, 1, output)
    results = run_missing({"two": partial(make, 2), "one": partial(make, 3)}, 1, output)
    assert results == {"two": {"value": 2}, "one": {"value": 1}}
    assert calls == [1, 2]
    assert list(read_runs(output)) == ["one", "two"]


@pytest.mark.parametrize("segment", [64, 7])
@pytest.mark.parametrize(("name", "reaches"), [("XL", False), ("Compressive", True), ("KNN", True)])
def test_all_memories_but_xl_reach_the_hint(name, reaches, segment):
    """The output at the junction depends on the hint except with XL, for any segment length."""
    bench = MemoryBench()
    torch.manual_seed(0)
    model = bench.core(name).build().double()
    steps = bench.corridor + 1
    x = torch.randn(1, steps, model.spec.width, dtype=torch.float64)

    @torch.no_grad()
    def last(hint):
        state, inputs = model.initial_state(1), torch.cat([hint, x[:, 1:]], dim=1)
        for part in torch.arange(steps).split(segment):
            index = TokenIndex(part[None], torch.zeros_like(part)[None])
            y, state = model(inputs[:, part], index, state)
        return y[:, -1]

    assert torch.equal(last(x[:, :1]), last(-x[:, :1])) != reaches


def test_sizes_for_which_xl_reaches_the_hint_are_rejected():
    with pytest.raises(ValueError, match="2 layers of 16 steps reach 32"):
        MemoryBench(corridor=32)


@pytest.mark.thorough
def test_memories_report_their_costs(tmp_path, capsys):
    bench = MemoryBench(
        memories=("XL", "KNN"), length=1, corridor=4, steps=256, seeds=1, evaluations=1, episodes=4,
        output=tmp_path / "runs.jsonl",
    )  # fmt: skip
    bench.run()
    assert "KNN" in capsys.readouterr().out
    runs = {run["memory"]: Run(**run) for run in read_runs(bench.output).values()}
    state = 2 * 64 * 4 + 16  # two layers of 64 numbers, a position and an episode
    assert runs["XL"].remembered == state
    assert runs["KNN"].remembered == state + 3 * (64 * 4 + 16)
    assert runs["KNN"].carried > runs["XL"].carried > 0
    assert len(runs["XL"].curve) == 1
    assert cells(list(runs.values()), "XL")[0] == f"{int(runs['XL'].solved_at is not None)} of 1"


def test_reversible_gradients_agree_and_errors_are_detected(monkeypatch):
    assert difference(3) <= AGREE
    original = reversible.with_stored_activations
    monkeypatch.setattr(reversible, "with_stored_activations", lambda *args: original(*args) * (1 + 1e-6))
    assert difference(3) > AGREE


def test_reversible_table_contains_the_memory_ratio():
    points = [Point(name, n, 1_000_000, n * 10**6) for name in reversible.STACKS for n in (2, 16)]
    assert printed(reversible.table(points)).count("8.00") == len(reversible.STACKS)


@pytest.mark.thorough
def test_depth_counts_passes(tmp_path, capsys):
    bench = DepthBench(
        kinds=("online",), layers=2, corridor=2, steps=256, seeds=1, episodes=4, timed=6, simulations=5,
        output=tmp_path / "runs.jsonl",
    )  # fmt: skip
    bench.run()
    out = capsys.readouterr().out
    assert "CALM, calibrated" in out
    assert "guarantee violated" in out
    passes = {
        name + way: measured["passes"]
        for name, run in zip(bench.depths("online"), read_runs(bench.output).values(), strict=True)
        for way, measured in run["ways"].items()
    }
    assert passes["Fixed"] == passes["Universal"] == passes["CALM, all passes"] == 2
    assert 1 <= passes["ACT"] <= 2
    assert 1 <= passes["CALM, calibrated"] <= 2


def test_guarantee_holds_and_violations_are_detected(monkeypatch):
    def violations():
        return (risk_control.chosen_risks(200, 200, 0.1) > risk_control.ALPHA).mean()

    assert violations() <= 0.1
    monkeypatch.setattr(
        risk_control, "select_risk_controlled", lambda losses, alpha, delta: losses.mean(axis=0) <= alpha
    )
    assert violations() > 0.1


def test_gain_is_relative_to_the_same_agents():
    def head(name, gains):
        returns = [[gain + number for number in (1.0, 2.0, 3.0)] for gain in gains]
        return [retrieval.Run(name, seed, own, [1] * 3, {}, 0.0) for seed, own in enumerate(returns)]

    runs = head(retrieval.NO_DATASTORE, [0, 100, -100]) + head("better", [10, 140, -90])
    results = printed(retrieval.gains(runs))
    assert "10, 40, 10" in results
    low, high = results.split("│")[-3].split(" to ")  # also over agents, whose gains are 10 to 40
    assert 5 < int(low) < 20 < int(high) < 45


@pytest.mark.thorough
def test_cores_are_compared_on_a_task(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cores, "EPISODES", 2)
    monkeypatch.setitem(cores.TASKS, "TMaze 50", Task("rlxf/TMaze-v0", 512, 0.95))
    bench = Cores(("TMaze 50",), ("MinGRU", "RMT"), output=tmp_path / "cores.jsonl")
    bench.run()
    printed_before = capsys.readouterr().out
    runs = read_runs(bench.output)
    assert list(runs) == ["TMaze 50, MinGRU, seed 0", "TMaze 50, RMT, seed 0"]
    assert runs["TMaze 50, MinGRU, seed 0"]["state"] == 2 * 64 * 4 + 8  # two states, and the episode's number
    assert all(run["curve"][-1][0] == 512 for run in runs.values())
    assert "MinGRU" in printed_before


def test_agents_without_details_are_compared(monkeypatch, tmp_path, capsys):
    tasks = {name: replace(task, steps=64) for name, task in ablation.TASKS.items()}
    monkeypatch.setattr(ablation, "TASKS", tasks)
    small = replace(CHANGES["nothing"], options={"n_steps": 64, "n_epochs": 1})
    monkeypatch.setitem(CHANGES, "nothing", small)
    bench = Ablation(changes=("nothing",), seeds=1, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    runs = [ablation_runs.Run(**run) for run in read_runs(bench.output).values()]
    assert [(run.task, run.change, run.seed) for run in runs] == [(task, "nothing", 0) for task in tasks]
    assert all(0 <= run.mean <= 1 for run in runs)
    assert ablation_runs.rows(runs, DETAILS)[0][:2] == ["", "nothing"]
    assert "CartPole: mean score" in capsys.readouterr().out


def test_scores_of_a_change_are_its_mean_and_those_of_its_seeds():
    curves = {0: [(10, 0.0), (20, 1.0)], 1: [(10, 0.5), (20, 0.5)]}
    runs = [ablation_runs.Run("n_steps=128", "T-Maze", seed, curve, 1.0) for seed, curve in curves.items()]
    assert ablation_runs.rows(runs, DETAILS) == [["21", "n_steps=128", "0.50 (0.50, 0.50)", "1.00, 0.50"]]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_gives_another_agent(name):
    """Each change differs from the default settings, in options, modules, wrappers or weights."""
    agents = [CHANGES[each].agent(ablation.TASKS["CartPole"], 0) for each in (name, "nothing")]
    own, default = map(features_of, agents)
    assert (own == default) == (name == "nothing")


def features_of(agent):
    """Return what a change can affect: settings, modules, wrappers of environments, and weights."""
    settings = {key: str(value) for key, value in agent.constructor_settings().items()}
    modules = [type(module) for module in agent.policy.modules()]
    env, wrappers = agent.get_env().envs[0], []
    while isinstance(env, gymnasium.Wrapper):
        wrappers.append(type(env))
        env = env.env
    return settings, modules, wrappers, [weight.tolist() for weight in agent.policy.parameters()]


def test_biases_of_positions_stay_zero():
    """They are matrices, like the weights that are initialized otherwise."""
    agent = CHANGES["weights with torch's initialization"].agent(ablation.TASKS["CartPole"], 0)
    biases = [module for module in agent.policy.modules() if isinstance(module, XLRelativeBias)]
    assert len(biases) == 2
    assert not any(module.u.any() or module.v.any() for module in biases)


def test_the_statistics_of_a_head_without_normalization_do_not_change():
    agent = CHANGES["value head in units of the rewards"].agent(ablation.TASKS["CartPole"], 0)
    agent.policy.value_net.update(torch.full((8,), 100.0))
    assert (agent.policy.value_net.mean, agent.policy.value_net.deviation) == (0, 1)


def test_truncation_is_reported_as_termination():
    env = ablation.NoTruncation(gymnasium.make("Pendulum-v1", max_episode_steps=1))
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[2:4] == (True, False)


def test_agents_without_the_relu_act_as_in_training():
    """The acting step must not apply the ReLU that the segment pass lacks."""
    model = CHANGES["no ReLU before the gate"].agent(ablation.TASKS["CartPole"], 0).policy.transformer
    run = random_segment(model.spec, TokenIndex.range(2, 6), torch.float32)
    state = model.initial_state(2)
    with torch.no_grad():
        acted, _ = act(model, run, model.cache(state, state.index.shape[1] + run.length))
        assert_close_for_dtype(acted, learn(model, run, [run.length])[0])


def test_acting_is_measured_with_and_without_compilation(monkeypatch, capsys):
    monkeypatch.setattr(network_step, "CompiledFunction", lambda function, _: lambda *x: function(*x))
    Acting((2,), rounds=1, calls=2).run()
    printed = capsys.readouterr().out
    assert "predict" in printed
    assert "rollout" in printed


@pytest.mark.thorough
def test_predict_is_measured_in_the_given_version(tmp_path):
    bench = Acting((2,), rounds=1, calls=2)
    assert bench._predict(acting.ROOT, False, envs=2) > 0
    (tmp_path / "rlxf.py").write_text("raise ImportError('another version')")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        bench._predict(tmp_path, False, envs=2)
    assert "another version" in failure.value.stderr


def test_cost_of_mixers_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mixers, "LENGTHS", (16, 32))
    monkeypatch.setattr(mixers, "STEPS", (3, 9))
    monkeypatch.setattr(mixers, "CALLS", 2)
    Mixers(("XL", "LRU"), repeats=1, output=tmp_path / "mixers.jsonl").run()
    cost = mixers.read(read_runs(tmp_path / "mixers.jsonl")["LRU, the fastest of 1"])
    assert (set(cost.acting), set(cost.learning)) == ({3, 9}, {16, 32})
    assert cost.state == 2 * 64 * 8 + 8  # two complex states, and the episode's number


@pytest.mark.parametrize("recurrence", [None, "DeltaNet"])
def test_a_curriculum_ends_with_the_corridor_that_is_not_solved(recurrence, monkeypatch, tmp_path):
    returns = iter([1.0, 0.5])
    monkeypatch.setattr(curriculum, "evaluate", lambda *args, **kwargs: SimpleNamespace(mean=next(returns)))
    sizes = {"stage_steps": 2048, "every_steps": 2048, "seeds": 1, "recurrence": recurrence}
    bench = Curriculum((1, 40, 50), output=tmp_path / "x.jsonl", **sizes)
    run = bench.learn(0)
    assert run.stages == [
        {"corridor": 1, "steps": 2048, "mean_return": 1.0},
        {"corridor": 40, "steps": 4096, "mean_return": 0.5},
    ]
    assert list(bench.table([run]).columns[1].cells) == ["1.00", "0.50", ""]
    assert [curriculum.cell([run], each) for each in (1, 40, 50)] == ["1 of 1: 2,048, 2,048", *["0 of 1"] * 2]


def test_unknown_recurrences_of_a_curriculum_are_refused():
    with pytest.raises(ValueError, match=r"recurrence must be None or among .*DeltaNet.*, got 'XL'"):
        Curriculum(recurrence="XL")


def test_a_stage_continues_in_other_corridors_with_weights_and_optimizer(monkeypatch, tmp_path):
    agents, before = [], []

    def learn(agent, steps, callback):
        before.append((agent.policy.value_net.bias.item(), len(agent.policy.optimizer.state)))
        loss = sum(parameter.sum() for parameter in agent.policy.parameters())
        loss.backward()
        agent.policy.optimizer.step()
        agent.policy.value_net.bias.data.fill_(len(before))
        agents.append(agent)
        return agent

    monkeypatch.setattr(curriculum.GTrXLPPO, "learn", learn)
    monkeypatch.setattr(curriculum, "evaluate", lambda *args, **kwargs: SimpleNamespace(mean=1.0))
    run = Curriculum((1, 2, 3), seeds=1, output=tmp_path / "x.jsonl").learn(0)
    assert [bias for bias, _ in before[1:]] == [1, 2]
    assert before[0][1] == 0
    assert before[1][1] == before[2][1] == len(list(agents[0].policy.parameters()))
    assert [agent.env.get_attr("rules")[0].corridor_length for agent in agents] == [1, 2, 3]
    assert len(run.stages) == 3


@pytest.mark.thorough
def test_recurrences_learn_in_corridors_in_place_of_the_default_agents(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(learning, "ENVS", 4)
    monkeypatch.setitem(learning.CORRIDORS, 50, Corridor(256, recurrent_options=learning.segments_of(64)))
    bench = Learning(
        (50,), seeds=1, recurrences=("LRU",), evaluations=1, episodes=2, output=tmp_path / "x.jsonl"
    )
    bench.run()
    (run,) = read_runs(bench.output).values()
    assert run["learning_rate"] is None
    assert (run["program"], run["corridor"], run["curve"][0][0]) == ("LRU", 50, 256)
    assert "segment_length=64" in capsys.readouterr().out.replace("\n", "")


def test_learning_rate_of_corridors_replaces_that_of_all_cores_and_is_part_of_the_key():
    bench = Learning((250,), seeds=1, recurrences=("LRU",), learning_rate=1e-3)
    (key,) = bench.jobs()
    assert key.endswith("learning rate 0.001")
    assert key not in Learning((250,), seeds=1, recurrences=("LRU",)).jobs()
    setting = learning.CORRIDORS[250].with_learning_rate(1e-3)
    assert setting.options["learning_rate"] == setting.recurrent_options["learning_rate"] == 1e-3
    assert setting.recurrent_options["n_steps"] == learning.CORRIDORS[250].recurrent_options["n_steps"]


def test_unknown_recurrences_are_refused():
    with pytest.raises(ValueError, match="recurrences must be among"):
        Learning(recurrences=("Mamba",))


def test_oracle_episodes_are_those_of_the_task():
    data = oracle_episodes(20, 9, 12, 0)
    assert data.lengths.min() == 10
    assert data.lengths.max() == 13
    for first, end in pairwise(data.offsets.tolist()):
        env = TMaze(end - first - 1, penalty=0.0)
        env.reset(seed=0)
        env._goal, env._hint_shown = int(data.observations[first, 1]), False
        observation = env._observe()
        for step in range(first, end):
            assert observation.tolist() == data.observations[step].tolist()
            observation, reward, terminated, _, _ = env.step(data.actions[step])
            assert (reward, terminated) == (data.rewards[step], step == end - 1)


def test_corridors_report_success(tmp_path, capsys):
    bench = Corridors(
        cores=("MinGRU", "window"), longest=10, lengths=(9, 80), updates=2, batch_size=2, seeds=1, episodes=2,
        output=tmp_path / "runs.jsonl",
    )  # fmt: skip
    bench.run()
    assert "MinGRU" in capsys.readouterr().out
    runs = [corridors.Run(**run) for run in read_runs(bench.output).values()]
    assert [list(run.success) for run in runs] == [["9", "80"], ["9"]]
    assert all(0 <= rate <= 1 for run in runs for rate in run.success.values())
    bench.run()
    assert len(bench.output.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match=r"cores must be among RATE, .*, got LSTM"):
        Corridors(cores=("LSTM",))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("discrete", [False, True])
def test_stitching_reports_success_of_each_kind(tmp_path, capsys, discrete):
    kinds = ("BehaviorCloning, best 10%", "QRegularized, target 1", "QRegularized, MaxReturn")
    bench = Stitching(
        kinds=kinds, seeds=1, updates=2, episodes=3, discrete=discrete, output=tmp_path / "runs.jsonl"
    )
    bench.run()
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in kinds)
    runs = [stitching.Run(**run) for run in read_runs(bench.output).values()]
    assert [(run.kind, run.episodes) for run in runs] == [(kind, 3) for kind in kinds]
    assert all(0 <= run.successes <= 3 for run in runs)
    bench.run()
    assert len(bench.output.read_text().splitlines()) == len(kinds)


@pytest.mark.thorough
def test_the_kinds_of_stitching_are_built_as_named():
    bench = Stitching(seeds=1)
    for kind in stitching.KINDS:
        agent = bench.agent(kind, 0)
        assert agent.return_conditioned == ("target 1" in kind)
        assert type(agent).__name__ == kind.split(",")[0] or "QRegularized" in kind
        assert (type(agent.objective).__name__ == "QRegularized") == ("QRegularized" in kind)
    with pytest.raises(ValueError, match=r"kinds must be among BehaviorCloning; .*, got Random"):
        Stitching(kinds=("Random",))


@pytest.mark.parametrize(("successes", "episodes"), [(0, 50), (50, 50), (7, 20)])
def test_intervals_of_success_rates_are_wilsons(successes, episodes):
    """The bounds are the rates p with ``|k / n - p| = z sqrt(p (1 - p) / n)``."""
    low, high = stitching.wilson_interval(successes, episodes)
    rate = successes / episodes
    assert 0 <= low <= rate <= high <= 1
    for bound in (low, high):
        deviation = 1.959964 * np.sqrt(bound * (1 - bound) / episodes)
        assert abs(rate - bound) == pytest.approx(deviation, abs=1e-6)


@pytest.mark.parametrize("agent", AGENTS)
def test_updates_of_all_offline_agents_are_measured(agent):
    first, later = OfflineUpdates(updates=3).measure(agent, some_trajectories(), graphs=True)
    assert first > 0
    assert later > 0


def test_tensors_and_arrays_are_measured_in_all_phases():
    bench = Tensors(copies=(4,), corridor=2, n_steps=4, rollouts=1, memory=4, width=16, device="cpu")
    rates = bench.measure(4)
    for phase in ("environments", "rollouts", "iterations"):
        assert rates[phase].keys() == set(ENVS)
        assert all(rate > 0 for rate in rates[phase].values())
    assert "rollout and update" in printed(bench.table([rates]))
