"""Tests of the benchmarks that compare offline methods, at small sizes."""

import ast
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import checkpoints, hugging_face, offline_runs, online, pretraining, ranking
from benchmarks.checkpoints import AVERAGE, NEWEST, VARIANTS, Checkpoint, Checkpoints
from benchmarks.offline_criteria import criteria
from benchmarks.offline_methods import METHODS, PRESETS
from benchmarks.offline_runs import DATA, Job, measure
from benchmarks.offline_setting import Setting
from benchmarks.online import Online
from benchmarks.pretraining import KINDS, Pretraining
from benchmarks.ranking import Ranking, regret
from benchmarks.result_cache import read_runs
from benchmarks.returns import Returns, agent_rows, rows, side_by_side

from rlxf import DecisionTransformer, collect
from rlxf.data import Windows, load_trajectories
from rlxf.evaluation import evaluate
from rlxf.evaluation.intervals import interquartile_mean
from tests.datasets import ID, record_cartpole
from tests.sources import ROOT

pytestmark = pytest.mark.usefixtures("benchmarks_in_process")
OURS = tuple(name for name in METHODS if name != "hf")
TINY = {"preset": "reduced", "updates": 2, "width": 8, "layers": 1, "context": 3, "batch_size": 4}


@pytest.fixture
def cartpole(minari_root):
    """Id of twelve random episodes of CartPole-v1."""
    collect(None, "CartPole-v1", "cartpole/random-v0", episodes=12, n_envs=4)
    return "cartpole/random-v0"


def run_of(method="dt", dataset="a", seed=0, values=(1.0, 2.0), milliseconds=1.0, megabytes=2.0):
    """Return a run without target and reference scores."""
    return offline_runs.Run(dataset, method, seed, None, list(values), milliseconds, megabytes, 3.0, None)


@pytest.mark.thorough
def test_all_methods_are_compared_and_completed_runs_are_not_repeated(cartpole, tmp_path, capsys):
    bench = Returns((cartpole,), **TINY, seeds=2, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    shown = capsys.readouterr().out
    assert "hf is left out: HF's model needs vectors as observations and Box actions" in " ".join(
        shown.split()
    )
    assert all(METHODS[name].title in shown for name in OURS)
    of_data, *runs = [offline_runs.Run(**run) for run in read_runs(bench.output).values()]
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


def test_methods_are_shown_side_by_side(cartpole, tmp_path, capsys):
    collect(None, "CartPole-v1", "cartpole/other-v0", episodes=12, n_envs=4, seed=1)
    datasets = (cartpole, "cartpole/other-v0")
    bench = Returns(datasets, ("bc", "dt"), **TINY, seeds=2, episodes=2, output=tmp_path / "runs.jsonl")
    bench.run()
    shown = " ".join(capsys.readouterr().out.split())
    runs = [offline_runs.Run(**run) for run in read_runs(bench.output).values()]
    of_data = [run for run in runs if run.method == DATA]
    for method in ("bc", "dt"):
        own = [run for run in runs if run.method == method]
        means = [
            run.scores.mean() - data.scores.mean()
            for data in of_data
            for run in own
            if run.dataset == data.dataset
        ]
        (row,) = side_by_side({"title": own}, of_data)
        assert row[-1] == f"{min(means):.1f}"
        assert row[-1] in shown
        assert [float(cell.split()[0]) for cell in row[1:-1]] == [
            pytest.approx(interquartile_mean(np.concatenate([run.scores for run in part])), abs=0.051)
            for part in (*([r for r in own if r.dataset == each] for each in datasets), own)
        ]
    assert side_by_side({"title": runs[:1]}, of_data) == []


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


def test_options_of_robust_training_reach_the_agents_and_their_keys(cartpole, tmp_path, capsys):
    sizes = Returns(**TINY, dropout=0.3, state_loss_weight=0.5, validation_fraction=0.2).sizes
    agent = METHODS["dt"].train(load_trajectories(cartpole), sizes, 0)
    assert (agent.core.dropout, agent.state_loss_weight, agent.validation_fraction) == (0.3, 0.5, 0.2)
    keys = {name: Job(cartpole, name, sizes, 0, 2).key for name in ("bc", "dt", "hf")}
    for text, names in {
        "dropout 0.3": {"dt", "hf"},
        "state loss 0.5": {"dt"},
        "validation fraction 0.2": {"bc", "dt"},
    }.items():
        assert {name for name, key in keys.items() if text in key} == names
    bench = Returns(
        (cartpole,),
        ("bc", "dt-max"),
        **TINY,
        validation_fraction=0.2,
        seeds=2,
        episodes=2,
        output=tmp_path / "runs",
    )
    bench.run()
    assert "validation loss" in capsys.readouterr().out
    _, *runs = [offline_runs.Run(**run) for run in read_runs(bench.output).values()]
    assert [row[1:3] for row in agent_rows(runs[::-1])] == [
        [METHODS[name].title, str(seed)] for name in ("bc", "dt-max") for seed in range(2)
    ]
    assert all(np.isfinite(run.validation_loss) for run in runs)


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
    assert (of_data[:2], of_data[3:]) == (["the data", ""], ["5.0", "5.0", "", "", ""])
    assert cloning[:4] == ["BC", "1", "2.0 (2.0 to 2.0)", "2.0"]
    assert transformer[1] == "2"
    assert transformer[2].startswith(f"{interquartile_mean(np.array([1.0, 3, 5, 7])):.1f} (")
    assert transformer[3:] == ["4.0", "4.0", "2.0", "2.0", "9"]
    over_all = rows(runs, ["a", "b"])
    assert [row[0] for row in over_all] == ["the data", "DT, highest target"]  # BC has no runs on b
    assert over_all[0][3] == "4.5"
    assert over_all[1][1:2] + over_all[1][3:] == ["1", "12.0", "", "2.0", "3.0", "9"]


def test_scores_are_normalized_if_the_data_have_reference_scores():
    run = replace(run_of(values=(10.0, 15.0)), references=(5.0, 15.0))
    assert run.scores.tolist() == [50, 100]
    assert rows([run], ["a"])[0][3:5] == ["75.0", "12.5"]  # the second is the mean return
    assert run_of(values=(10.0, 15.0)).scores.tolist() == [10, 15]


def test_criteria_compare_methods_on_each_dataset():
    scores = {"data": (1.0, 2.0), "bc-best": (5.0, 5.0), "dt": (4.0, 6.0), "dt-q": (17.0, 19.0)}
    runs = [run_of(name, "ab"[i], 0, [x, x]) for name, xs in scores.items() for i, x in enumerate(xs)]
    runs.append(run_of("dt", "a", 1, [0.5, 0.5]))  # the worst seed; the IQM on a is then 2.25
    runs.append(run_of("bc", "a"))  # not measured on b
    best, plain, critic = criteria(runs, ["a", "b"])
    assert best[1:] == ["yes (+0.0)", "no (+0.9)", "yes (+3.0)"]
    assert plain[1:] == ["no (-2.8)", "no (+0.0)", "no (-0.5)"]
    assert critic[1:] == ["yes (+12.0)", "yes (+13.9)", "yes (+16.0)"]
    assert criteria([run_of("data"), run_of("dt-q")], ["a"])[0][1:] == ["", "", "yes (+0.0)"]


def test_only_sampled_returns_are_evaluated_with_a_stochastic_policy(cartpole, tmp_path, monkeypatch):
    asked = []

    def evaluate(agent, env, episodes, target_returns, deterministic):
        asked.append(deterministic)
        return SimpleNamespace(returns=[1.0])

    monkeypatch.setattr(offline_runs, "evaluate", evaluate)
    jobs = [Job(cartpole, name, Returns(**TINY).sizes, 0, 1) for name in ("bc", "dt-max", "dt-sampled")]
    for job in jobs:
        measure(job, tmp_path)
    assert asked == [True, True, False]
    assert ["stochastic policy" in job.key for job in jobs] == [False, False, True]


def test_given_sizes_replace_those_of_the_preset():
    sizes = Returns(preset="reduced", width=16, context=7).sizes
    assert (sizes.updates, sizes.transformer.width, sizes.transformer.context_length) == (7_500, 16, 7)
    assert sizes.transformer.layers == PRESETS["reduced"].transformer.layers
    assert Returns().sizes == PRESETS["default"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("bc", "cql")}, "methods must be among bc, .*, hf, got cql"),
        ({"preset": "tiny"}, r"preset must be one of \('default', 'reduced'\), got 'tiny'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
    ],
)
def test_invalid_options_of_the_comparison_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        Returns(**change)


# Ranking of agents without the environment


@pytest.mark.thorough
def test_ranking_compares_estimates_with_real_returns(cartpole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranking, "estimate_behavior", lambda data, seed: np.full(data.steps, 0.5))
    effort = ranking.Effort(fitted_updates=2, members=2, episodes=2)
    monkeypatch.setattr(ranking, "EFFORTS", {"reduced": effort})
    bench = Ranking((cartpole,), preset="reduced", updates=20, output=tmp_path / "runs.jsonl")
    bench.run()
    assert "Spearman" in capsys.readouterr().out
    runs = [ranking.Run(**run) for run in read_runs(bench.output).values()]
    names = [name for run in runs for name in run.names]
    assert len(names) == len(set(names)) == 17
    assert [name for name in names if name.startswith("BC")] == [
        *("BC, 2 updates", "BC, 20 updates"),
        *("BC of the best 10%, 2 updates", "BC of the best 10%, 20 updates"),
    ]
    assert all(len(run.estimates[name]) == len(run.names) for run in runs for name in ("fqe", "wdr"))
    assert [row[:3] for row in ranking.rows(runs)] == [[cartpole, "fqe", "17"], [cartpole, "wdr", "17"]]
    bench.run()
    assert len(bench.output.read_text().splitlines()) == 9


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
        ({"agents": ("bc", "dt-q-max")}, "at least 10 agents, got 3"),
        ({"agents": ("dt",)}, "at least 10 agents, got 9"),
        ({"agents": ("hf",)}, "agents must be among bc, bc-best, rvs, dt, dt-q-max, got hf"),
        ({"estimators": ("fqe", "ipw")}, "estimators must be among fqe, dr, wdr, got ipw"),
        ({"preset": "large"}, r"preset must be one of \('default', 'reduced'\), got 'large'"),
    ],
)
def test_invalid_options_of_the_ranking_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        Ranking(**change)


# Online fine-tuning after offline training


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("agent", online.AGENTS)
def test_online_fine_tuning_is_measured_before_and_after_on_the_same_episodes(
    cartpole, agent, tmp_path, capsys
):
    bench = Online(
        cartpole,
        ceiling=None,
        agent=agent,
        target=20.0,
        updates=2,
        steps=32,
        round_steps=16,
        round_updates=1,
        width=8,
        context_length=3,
        seeds=1,
        first_seed=4,
        evaluations=1,
        episodes=3,
        output=tmp_path / "runs.jsonl",
    )
    bench.run()
    (run,) = [online.Run(**run) for run in read_runs(bench.output).values()]
    steps = [step for step, _ in run.curve]
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    assert steps[-1] >= 32
    assert all(len(returns) == 3 for _, returns in run.curve)
    before, best = run.other
    assert len(before) == len(best) == 3
    assert before != run.curve[0][1]  # other episodes
    assert run.best_step > 0 or before == best
    mean = f"{load_trajectories(cartpole).returns.mean():.1f}"
    difference = f"{(run.after - run.before).mean():.1f} ("
    shown = " ".join(capsys.readouterr().out.split())
    assert f"4 │ {mean} │ {run.before.mean():.1f} │ {run.after.mean():.1f} │ {difference}" in shown
    assert bench.output.with_suffix(".png").stat().st_size > 1000
    bench.run()
    assert len(bench.output.read_text().splitlines()) == 1


@pytest.mark.parametrize(("means", "step"), [((3, 2, 1), 0), ((1, 3, 3), 10), ((1, 2, 3), 20)])
def test_the_best_evaluation_of_a_fine_tuning(means, step):
    curve = [(10 * number, [mean - 1.0, mean + 1.0]) for number, mean in enumerate(means)]
    assert online.Run(0, curve).best_step == step


def test_checkpoints_have_the_newest_weights_and_their_average(cartpole, tmp_path, capsys):
    bench = Checkpoints(cartpole, ("dropout 0.1",), 1, 6, 2, average_decay=0.5, episodes=2, processes=1)
    bench = replace(bench, output=tmp_path / "runs.jsonl")
    bench.run()
    assert "lowest held-out loss of each seed" in " ".join(capsys.readouterr().out.split())
    (run,) = map(checkpoints.as_run, read_runs(bench.output).values())
    kinds = [(each.update, each.weights) for each in run.checkpoints]
    assert kinds == [(3, NEWEST), (3, AVERAGE), (6, NEWEST), (6, AVERAGE)]
    data, weights = load_trajectories(cartpole), []
    agent = DecisionTransformer(
        data, seed=0, device="cpu", validation_fraction=0.1, **VARIANTS["dropout 0.1"].arguments()
    )

    def store(local_variables, global_variables):
        weights.append({name: value.clone() for name, value in agent.policy.state_dict().items()})
        return True

    agent.learn(6, store)
    newest, average = run.checkpoints[2:]
    assert agent.validation_losses()["loss"] == newest.loss
    with closing(agent.make_env(2)) as env:
        report = evaluate(agent, env, 2, target_returns=[float(data.returns.max())]).first
    assert report.returns.tolist() == newest.returns
    assert report.lengths.tolist() == newest.lengths
    slow = weights[0]
    for each in weights[1:]:
        slow = {name: torch.lerp(slow[name].double(), each[name].double(), 0.5) for name in each}
    agent.policy.load_state_dict(slow)
    assert agent.validation_losses()["loss"] == pytest.approx(average.loss, rel=1e-5)
    assert average.loss != newest.loss
    bench.run()
    assert len(bench.output.read_text().splitlines()) == 1


def test_failed_checkpoints_are_those_below_half_of_the_best():
    def run(seed, newest, average):
        return checkpoints.Run(
            "dropout 0.1",
            seed,
            [
                Checkpoint(update, weights, loss=-value, returns=[value], lengths=[2])
                for weights, values in ((NEWEST, newest), (AVERAGE, average))
                for update, value in enumerate(values)
            ],
        )

    runs = [run(0, [10, 4, 7], [10, 12, 11]), run(1, [9, 6, 6], [8, 10, 8])]  # limit: 6
    assert checkpoints.rows(runs) == [
        ["dropout 0.1", NEWEST, "7", "2", "1 of 6", "3", "4, 6", "7, 6", "1.0, 1.0"],
        ["dropout 0.1", AVERAGE, "10", "2", "0 of 6", "2", "10, 8", "11, 8", "1.0, 1.0"],
    ]
    assert checkpoints.lowest_losses(runs) == {"dropout 0.1": [12.0, 10.0]}


def test_the_ceiling_excludes_episodes(cartpole):
    returns = load_trajectories(cartpole).returns
    ceiling = float(np.median(returns))
    below = Online(cartpole, ceiling=ceiling).data()
    assert below.returns.tolist() == returns[returns < ceiling].tolist()
    with pytest.raises(ValueError, match=r"agent must be one of \('imitation', 'critic'\), got 'dt'"):
        Online(cartpole, agent="dt")
    with pytest.raises(ValueError, match="replay_remove must be one of"):
        Online(cartpole, replay_remove="best")


# Pre-training


@pytest.mark.thorough
def test_all_initial_weights_are_compared(cartpole, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(pretraining.SHORT, "small", Setting(8, 1, context_length=3, batch_size=4))
    sizes = {"pretraining_updates": 2, "updates": 1, "seeds": 1, "episodes": 2, "share": 0.5}
    bench = Pretraining(cartpole, **sizes, output=tmp_path / "runs.jsonl")
    bench.run()
    runs = [pretraining.Run(**run) for run in read_runs(bench.output).values()]
    assert [run.initialization for run in runs] == list(pretraining.INITIALIZATIONS)
    shown = capsys.readouterr().out
    assert all(each.title in shown for each in pretraining.INITIALIZATIONS.values())
    with pytest.raises(ValueError, match=r"initializations must be among fresh, .*, got gpt"):
        Pretraining(cartpole, initializations=("gpt",))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("masked", KINDS), ("masked-transformer", KINDS), ("masked-actions", ("action",))],
)
def test_kinds_of_masked_tokens_are_those_of_the_title(cartpole, name, kinds):
    sizes = Setting(8, 1, context_length=3).arguments()
    source = pretraining.INITIALIZATIONS[name].pretraining(cartpole, mask_probability=0.5, seed=0, **sizes)
    masking = source._batch(Windows(source.trajectories, 3)).masking
    for part in (masking.chosen, masking.masked, masking.swapped):
        found = [kind for kind, tokens in zip(KINDS, part.unbind(-1), strict=True) if tokens.any()]
        assert found == list(kinds)


@pytest.mark.parametrize("parts", [("transformer",), ("tokens", "features")])
def test_only_the_named_parts_are_copied(cartpole, parts):
    sizes = Setting(8, 1, context_length=3).arguments()
    agent, source, fresh = (DecisionTransformer(cartpole, seed=seed, **sizes) for seed in (0, 1, 0))
    pretraining.load_parts(agent, source, parts)
    for name in pretraining.PARTS:
        expected = getattr((source if name in parts else fresh).policy, name).state_dict()
        for key, value in getattr(agent.policy, name).state_dict().items():
            assert torch.equal(value, expected[key]), (name, key)
