"""Tests of the benchmarks that compare offline methods, at small sizes."""

import ast
from dataclasses import replace

import numpy as np
import pytest
from benchmarks import hugging_face, offline_methods, ranking, result_cache
from benchmarks.offline_methods import METHODS, PRESETS, Job, measure
from benchmarks.ranking import Ranking, regret
from benchmarks.result_cache import read_runs
from benchmarks.returns import Returns, rows

from rlxf import collect
from rlxf.data import load_trajectories
from rlxf.evaluation.intervals import interquartile_mean
from tests.datasets import ID, record_cartpole
from tests.in_process import InProcessPool
from tests.sources import ROOT

OURS = tuple(name for name in METHODS if name != "hf")
TINY = {"preset": "reduced", "updates": 2, "width": 8, "layers": 1, "context": 3, "batch_size": 4}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch):
    monkeypatch.setattr(result_cache, "fresh_processes", lambda number: InProcessPool())


@pytest.fixture
def cartpole(minari_root):
    """Id of twelve random episodes of CartPole-v1."""
    collect(None, "CartPole-v1", "cartpole/random-v0", episodes=12, n_envs=4)
    return "cartpole/random-v0"


def run_of(method="dt", dataset="a", seed=0, values=(1.0, 2.0), milliseconds=1.0, megabytes=2.0):
    """Return a run without target and reference scores."""
    return offline_methods.Run(dataset, method, seed, None, list(values), milliseconds, megabytes, 3.0, None)


def test_all_methods_are_compared_and_completed_runs_are_not_repeated(cartpole, tmp_path, capsys):
    bench = Returns((cartpole,), **TINY, seeds=2, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    shown = capsys.readouterr().out
    assert "hf is left out: HF's model needs vectors as observations and Box actions" in " ".join(
        shown.split()
    )
    assert all(METHODS[name].title in shown for name in OURS)
    of_data, *runs = [offline_methods.Run(**run) for run in read_runs(bench.output).values()]
    assert of_data.returns == load_trajectories(cartpole).returns.tolist()
    assert [run.method for run in runs] == [*OURS, *OURS]
    assert all(len(run.returns) == 2 and run.milliseconds > 0 and run.seconds > 0 for run in runs)
    highest = float(load_trajectories(cartpole).returns.max())
    targets = {run.method: run.target for run in runs}
    assert {name for name, target in targets.items() if target == highest} == {
        "rvs",
        "dt",
        "dt-weighted",
        "dt-q",
    }
    assert {
        targets[name] for name in ("bc", "bc-best", "bc-weighted", "dt-max", "dt-elastic", "dt-sampled")
    } == {None}
    bench.run()
    replace(bench, methods=("bc",), width=16).run()  # the width does not concern behavior cloning
    assert len(bench.output.read_text().splitlines()) == 1 + 2 * len(OURS)


def test_equal_seeds_give_equal_returns(cartpole, tmp_path):
    job = Job(cartpole, "dt-q-max", Returns(**TINY).sizes, 3, 2)
    one, other = (measure(job, tmp_path) for _ in range(2))
    assert (one.returns, one.target) == (other.returns, None)


@pytest.mark.parametrize("method", ["bc", "rvs", "dt"])
def test_weights_are_averaged_on_request(cartpole, method):
    sizes = Returns(**TINY, weight_averaging=0.9).sizes
    agent = METHODS[method].train(load_trajectories(cartpole), sizes, 0)
    assert agent.weight_averaging == 0.9
    assert "weight averaging 0.9" in Job(cartpole, method, sizes, 0, 2).key
    assert "averaging" not in Job(cartpole, method, Returns(**TINY).sizes, 0, 2).key
    assert "averaging" not in Job(cartpole, "hf", sizes, 0, 2).key


def test_methods_that_the_data_do_not_allow_are_left_out_with_the_reason(minari_root, tmp_path, capsys):
    record_cartpole((3, 4, 5))
    bench = Returns((ID,), ("bc", "bc-best"), **TINY, seeds=1, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{ID}: bc-best is left out: best=0.1 chooses the episodes" in shown
    assert [run["method"] for run in read_runs(bench.output).values()] == ["data", "bc"]


def test_the_other_model_gets_the_same_sizes_scale_and_target(cartpole, tmp_path, monkeypatch):
    asked = {}

    def run_task(venv, task, setting, **options):
        asked.update(options, task=task, setting=setting)
        return {"targets": [{"returns": [1.0, 3.0]}], "update_seconds": [0.1] * 20, "bytes": 5_000_000}

    monkeypatch.setattr(hugging_face, "run_task", run_task)
    run = measure(Job(cartpole, "hf", PRESETS["reduced"], 4, 2), tmp_path)
    data = load_trajectories(cartpole)
    assert (run.returns, run.milliseconds, run.megabytes) == ([1.0, 3.0], pytest.approx(100), 5)
    assert run.target == asked["targets"][0] == data.returns.max()
    assert asked["setting"].return_scale == pytest.approx(np.std(data.return_to_go))
    assert (asked["task"], asked["seed"], asked["updates"]) == ("train_and_evaluate", 4, 7_500)


def test_tasks_of_the_other_model_exist():
    """Its module cannot be imported here, because it needs transformers."""
    folder = ROOT / "scripts" / "benchmarks"
    trees = {path.name: ast.parse(path.read_text()) for path in folder.glob("*.py")}
    tasks = {node.name for node in trees["hugging_face_tasks.py"].body if isinstance(node, ast.FunctionDef)}
    calls = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    requested = {ast.literal_eval(call.args[1]) for call in calls if "run_task" in ast.unparse(call.func)}
    assert {"train_and_evaluate", "time_original"} <= requested <= tasks


def test_rows_contain_means_worst_seeds_and_costs():
    runs = [
        run_of("data", values=(0.0, 10.0)),
        run_of("data", "b", values=(4.0,)),
        run_of(seed=0, values=(1.0, 3.0), milliseconds=1.0),
        run_of(seed=1, values=(5.0, 7.0), milliseconds=3.0, megabytes=9.0),
        run_of("bc", seed=0, values=(2.0, 2.0)),
        run_of("dt", "b", seed=0, values=(20.0, 20.0), milliseconds=8.0),
    ]
    of_data, cloning, transformer = rows(runs, ["a"])
    assert (of_data[:2], of_data[3:]) == (["the data", ""], ["5.0", "", "", ""])
    assert cloning[:4] == ["BC", "1", "2.0 (2.0 to 2.0)", "2.0"]
    assert transformer[1] == "2"
    assert transformer[2].startswith(f"{interquartile_mean(np.array([1.0, 3, 5, 7])):.1f} (")
    assert transformer[3:] == ["4.0", "2.0", "2.0", "9"]
    over_all = rows(runs, ["a", "b"])
    assert [row[0] for row in over_all] == ["the data", "DT, highest target"]  # BC has no runs on b
    assert over_all[0][3] == "4.5"
    assert over_all[1][1:2] + over_all[1][3:] == ["1", "12.0", "2.0", "3.0", "9"]


def test_scores_are_normalized_if_the_data_have_reference_scores():
    run = replace(run_of(values=(10.0, 15.0)), references=(5.0, 15.0))
    assert run.scores.tolist() == [50, 100]
    assert rows([run], ["a"])[0][3] == "75.0"
    assert run_of(values=(10.0, 15.0)).scores.tolist() == [10, 15]


def test_given_sizes_replace_those_of_the_preset():
    sizes = Returns(preset="reduced", width=16, context=7).sizes
    assert (sizes.updates, sizes.transformer.width, sizes.transformer.context_length) == (7_500, 16, 7)
    assert sizes.transformer.layers == PRESETS["reduced"].transformer.layers
    assert Returns().sizes == PRESETS["default"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("bc", "cql")}, "methods must be among bc, .*, hf, got cql"),
        ({"preset": "tiny"}, "preset must be one of default, reduced, got 'tiny'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
    ],
)
def test_invalid_options_of_the_comparison_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        Returns(**change)


# Ranking of agents without the environment


def test_ranking_compares_estimates_with_real_returns(cartpole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranking, "estimate_behavior", lambda data, seed: np.full(data.steps, 0.5))
    effort = ranking.Effort(fitted_updates=2, members=2, episodes=2)
    monkeypatch.setattr(ranking, "EFFORTS", {"reduced": effort})
    bench = Ranking((cartpole,), preset="reduced", updates=20, output=tmp_path / "runs.jsonl")
    bench.run()
    assert "Spearman" in capsys.readouterr().out
    runs = [ranking.Run(**run) for run in read_runs(bench.output).values()]
    names = [name for run in runs for name in run.names]
    assert len(names) == len(set(names)) == 16
    assert [name for name in names if name.startswith("BC")] == [
        *("BC, 2 updates", "BC, 20 updates"),
        *("BC of the best 10%, 2 updates", "BC of the best 10%, 20 updates"),
    ]
    assert all(len(run.estimates[name]) == len(run.names) for run in runs for name in ("fqe", "wdr"))
    assert [row[:3] for row in ranking.rows(runs)] == [[cartpole, "fqe", "16"], [cartpole, "wdr", "16"]]
    bench.run()
    assert len(bench.output.read_text().splitlines()) == 8


def test_rank_correlation_and_regret_of_estimates():
    parts = [("a", [10.0, 20.0], [1.0, 2.0]), ("b", [30.0], [3.0]), ("c", [5.0], [9.0])]
    runs = [
        ranking.Run("id", 0, [name] * len(real), real, {"fqe": [[x, x - 1, x + 1] for x in guessed]})
        for name, real, guessed in parts
    ]
    (row,) = ranking.rows(runs[:2])
    assert row[:3] == ["id", "fqe", "3"]
    assert row[3].startswith("1.00 (")
    assert row[4] == "0%"
    (misled,) = ranking.rows(runs)
    assert misled[3].startswith("-0.20 (")
    assert misled[4] == "100%"
    assert regret([1.0, 2.0, 0.0], [10.0, 20.0, 30.0]) == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agents": ("bc",)}, "at least 3 agents, got 2"),
        ({"agents": ("rvs",), "quantiles": (1.0,)}, "at least 3 agents, got 1"),
        ({"agents": ("hf",)}, "agents must be among bc, bc-best, rvs, dt, got hf"),
        ({"estimators": ("fqe", "ipw")}, "estimators must be among fqe, dr, wdr, got ipw"),
        ({"preset": "large"}, "preset must be among default, reduced, got large"),
    ],
)
def test_invalid_options_of_the_ranking_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        Ranking(**change)
