"""Tests that tables of docs/benchmarks and docs/results agree with the runs in docs/numbers."""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
from benchmarks import (
    ablation,
    ablation_runs,
    checkpoints,
    cores,
    corridors,
    curriculum,
    learning,
    mixers,
    offline_ablation,
    online,
    ranking,
    returns,
)
from benchmarks.result_cache import read_runs
from benchmarks.techniques import kept, rows, subjects

from rlxf.evaluation.intervals import bootstrap_interval, stratified_interquartile_mean
from rlxf.experiments.experiment_file import read_plan
from rlxf.experiments.jobs import Outcome
from rlxf.experiments.results import Results, RunResult
from rlxf.experiments.summary import Summary
from rlxf.training.completion import Completion
from tests.sources import ROOT

NUMBERS = ROOT / "docs" / "numbers"
PAGES = {
    page.stem: page.read_text(encoding="utf-8").splitlines()
    for page in (ROOT / "docs" / "benchmarks").glob("*.md")
}
RESULTS = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "results").glob("*.md")}
RESULTS_PAGE = {
    "minigrid-memory": "minigrid",
    "no-velocity": "classic-control",
    "ordinary": "classic-control",
    "pendulum-sweep": "classic-control",
    "tmaze-passive": "t-maze",
}
"""Experiment -> page of docs/results with its tables."""


def test_table_of_techniques():
    trials = list(kept(NUMBERS / "techniques.jsonl").values())
    assert_on_page("memory-tasks", rows(list(subjects()), trials))


def test_table_of_corridors():
    runs = [corridors.Run(**run) for run in read_runs(NUMBERS / "corridors.jsonl").values()]
    for longest in {run.longest for run in runs}:
        chosen = [run for run in runs if run.longest == longest]
        lengths = sorted({int(length) for run in chosen for length in run.success})
        assert_on_page("memory-tasks", corridors.rows(chosen, lengths))


def test_table_of_recurrent_mixers_in_a_corridor_of_250():
    runs = [learning.Run(**run) for run in read_runs(NUMBERS / "learning.jsonl").values()]
    for rate in {run.learning_rate for run in runs}:
        assert_on_page(
            "memory-tasks", [learning.cells(run)[1:8] for run in runs if run.learning_rate == rate]
        )


def test_table_of_curricula():
    trainings = defaultdict(list)
    for key, run in read_runs(NUMBERS / "curriculum.jsonl").items():
        trainings[key.partition(", at most")[0]].append(curriculum.Run(**run))
    page = RESULTS["t-maze"]
    for setting, runs in trainings.items():
        task, _, core = setting.partition(", corridors of ")
        penalty, core = core.partition("penalty ")[2].split(", ")
        corridors = [each for each in (20, 50, 100, 250, 500, 1000, 1500) if curriculum.stages_of(runs, each)]
        names = ["active" if "Active" in task else "passive", f"`{core}`".replace("`attention`", "attention")]
        cells = [*names, penalty, *(curriculum.cell(runs, each) for each in corridors)]
        assert f"\n| {' | '.join(cells)} |" in page
    section = page.partition("## Longer corridors after an evaluation")[2].partition("\n## ")[0]
    assert section.count("\n| ") == 1 + len(trainings)


def test_table_of_cores():
    assert_on_page(
        "memory-tasks", cores.rows([cores.Run(**run) for run in read_runs(NUMBERS / "cores.jsonl").values()])
    )


def test_results_of_default_settings_in_the_readme():
    groups = defaultdict(list)
    for key, run in read_runs(NUMBERS / "defaults.jsonl").items():
        groups[tuple(key.split(" | ")[:2])].append(run)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for (task, agent), runs in groups.items():
        if agent == "GTrXLPPO":
            means = sorted(run["mean"] for run in runs)
            decimals = 2 if abs(means[0]) <= 1 else 0
            shown = " to ".join(dict.fromkeys(f"{mean:.{decimals}f}" for mean in (means[0], means[-1])))
            minutes = np.median([run["seconds"] for run in runs]) / 60
            assert f" | {shown} | {minutes:.1f} | " in page.partition(f"\n| {task} |")[2].partition("\n")[0]


def test_table_of_mixers():
    assert_on_page(
        "attention", mixers.rows([mixers.read(run) for run in read_runs(NUMBERS / "mixers.jsonl").values()])
    )


def test_table_of_implementation_details():
    runs = [ablation_runs.Run(**run) for run in read_runs(NUMBERS / "ablation.jsonl").values()]
    assert_on_page("online", ablation_runs.rows(runs, ablation.DETAILS))


def test_table_of_implementation_details_of_decision_transformers():
    runs = [ablation_runs.Run(**run) for run in read_runs(NUMBERS / "offline-ablation.jsonl").values()]
    assert_on_page("decision-transformer", ablation_runs.rows(runs, offline_ablation.DETAILS))


def test_table_of_off_policy_rankings():
    runs = [ranking.Run(**run) for run in read_runs(NUMBERS / "ranking.jsonl").values()]
    for dataset, *cells in ranking.rows(runs):
        assert f"| `{dataset}` | {' | '.join(cells)} |" in PAGES["offline"]


def test_table_of_cloning_with_averaged_weights():
    lines = read_runs(NUMBERS / "returns.jsonl").items()
    runs = [returns.Run(**run) for key, run in lines if "averaging 0.9999" in key or key.endswith(", data")]
    assert_on_page("offline", table_of_returns(runs, (0, 2, 3, 5)))


def test_table_of_offline_methods():
    methods = {returns.DATA, "bc", "bc-best", "bc-weighted", "rvs", "dt", "hf"}
    lines = read_runs(NUMBERS / "returns.jsonl").items()
    runs = [
        returns.Run(**run)
        for key, run in lines
        if key.endswith(", data")
        or ("30000 updates" in key and "averaging 0.9999" not in key and "dropout" not in key)
    ]
    assert_on_page("offline", table_of_returns([r for r in runs if r.method in methods], (0, 1, 2, 3, 5)))


SETTINGS = {
    "BC": ("bc", "averaging 0.999,"),
    "BC of the best 10%": ("bc-best", "averaging 0.999,"),
    "BC of the best 10%, longer average": ("bc-best", "averaging 0.9999,"),
    "BC, return-weighted": ("bc-weighted", "averaging 0.999,"),
    "BC, high returns, longer average": ("bc-high", "averaging 0.9999,"),
    "RvS": ("rvs", "averaging 0.999,"),
    "DT": ("dt", "batch 32, weight averaging 0.999,"),
    "DT without dropout": ("dt", "dropout 0, weight averaging 0.999,"),
    "HF DT": ("hf", "batch 32, seed"),
}
"""Method, and part of the keys of its runs, by title in the table of all methods."""


def test_table_of_all_offline_methods_side_by_side():
    lines = read_runs(NUMBERS / "returns.jsonl").items()
    groups = {
        title: [returns.Run(**run) for key, run in lines if f", {method}, " in key and part in key]
        for title, (method, part) in SETTINGS.items()
    }
    assert {len(runs) for runs in groups.values()} == {20}
    of_data = [returns.Run(**run) for key, run in lines if key.endswith(", data")]
    of_data.sort(key=lambda run: returns.MUJOCO.index(run.dataset))
    assert_on_page("offline", returns.side_by_side({"the data": of_data} | groups, of_data))


def test_table_of_costs_of_offline_methods():
    runs = [returns.Run(**run) for run in read_runs(NUMBERS / "costs.jsonl").values()]
    rows = returns.rows([run for run in runs if run.method != returns.DATA], [runs[0].dataset])
    assert_on_page("offline", [[row[column] for column in (0, 6, 7)] for row in rows])


def test_table_of_decision_transformers_without_dropout():
    lines = read_runs(NUMBERS / "returns.jsonl").items()
    runs = [returns.Run(**run) for key, run in lines if ", dropout 0," in key or key.endswith(", data")]
    assert_on_page("offline", table_of_returns(runs, (0, 1, 2, 3, 4, 5)))


def table_of_returns(runs, columns):
    """Return these columns of `returns.rows` for each dataset, and for all together."""
    groups = {f"`{name}`": [name] for name in returns.MUJOCO} | {"all four": returns.MUJOCO}
    return [
        [title, *(row[column] for column in columns)]
        for title, datasets in groups.items()
        for row in returns.rows([run for run in runs if run.dataset in datasets], datasets)
    ]


def test_returns_of_cloning_on_acrobot():
    lines = read_runs(NUMBERS / "without-target.jsonl").items()
    runs = [returns.Run(**run) for key, run in lines if "acrobot" in key and "averaging 0.9999" in key]
    page = " ".join(line.strip() for line in PAGES["offline"])
    for method in ("bc-best", "bc-high"):
        table = np.array([run.returns for run in runs if run.method == method])
        assert len(table) == 5
        assert f" {stratified_interquartile_mean([table]):.1f} " in page
        assert f" {table.mean():.1f}" in page


def test_table_of_online_fine_tuning():
    page = "\n".join(PAGES["decision-transformer"])
    for run in (online.Run(**run) for run in read_runs(NUMBERS / "online.jsonl").values()):
        cells = map(mean_cell, (run.before, run.after, run.after - run.before))
        assert f"| {run.seed} | {' | '.join(cells)} |\n" in page


def test_table_of_the_best_agents_of_online_fine_tuning():
    runs = [(key, online.Run(**run)) for key, run in read_runs(NUMBERS / "online.jsonl").items()]
    cells = [
        (updates_per_thousand_steps(key), removed(key), run.seed, run.best_step, *map(np.array, run.other))
        for key, run in runs
        if run.other is not None
    ]
    table = [
        [
            str(updates),
            f"`{name}`",
            str(seed),
            f"{step:,} steps",
            *map(mean_cell, (before, best, best - before)),
        ]
        for updates, name, seed, step, before, best in sorted(cells, key=order_on_page)
    ]
    assert_on_page("decision-transformer", table)


def test_table_of_checkpoints():
    runs = [checkpoints.as_run(run) for run in read_runs(NUMBERS / "checkpoints.jsonl").values()]
    assert_on_page("decision-transformer", checkpoints.rows(runs))


def order_on_page(row):
    """Return the sort key of a row: updates, the default removal before others, and the seed."""
    updates, name, seed, *_ = row
    return updates, name != "worst", seed


def removed(key):
    """Return the episodes that the replay buffer removes, from the key of a run of online fine-tuning."""
    return re.search(r"episodes without ([a-z-]+)", key).group(1)


def updates_per_thousand_steps(key):
    """Return the updates of a round per 1,000 steps, from the key of a run of online fine-tuning."""
    updates, steps = map(int, re.search(r"(\d+) updates per (\d+) steps", key).groups())
    return 1000 * updates // steps


def mean_cell(returns):
    """Return a mean with its interval over episodes."""
    low, high = bootstrap_interval(returns)
    return f"{returns.mean():.0f} ({low:.0f} to {high:.0f})"


@pytest.mark.parametrize(("name", "page"), RESULTS_PAGE.items())
def test_tables_of_experiments(name, page):
    runs = json.loads((NUMBERS / f"{name}.json").read_text())["runs"]
    for task in dict.fromkeys(run["task"] for run in runs):
        assert f"\n{experiment_table(name, task, runs)}\n\n" in RESULTS[page]


def test_table_of_popgym():
    runs = json.loads((NUMBERS / "popgym.json").read_text())["runs"]
    sampled = json.loads((NUMBERS / "popgym-sampled.json").read_text())
    page = RESULTS["popgym"]
    for run in runs:
        returns = np.array(run["returns"])
        iqm = stratified_interquartile_mean([returns[None]])
        cells = [run["task"], f"{iqm.value:.3f} ({iqm.low:.3f} to {iqm.high:.3f})", f"{returns.mean():.3f}"]
        key = run["task"] if run["agent"] == "gtrxl" else f"{run['task']}/{run['agent']}"
        row = " | ".join([*cells, f"{sampled[key]:.3f}"])
        assert re.search(rf"^\| {re.escape(row)} \| [-.0-9]* \| {run['steps']:,} \|$", page, re.MULTILINE), (
            row
        )
    assert (
        len(runs)
        == len(sampled)
        == len(re.findall(r"^\| \w+(?:Easy|Medium|Hard) \| -?\d\.\d+ \(", page, re.MULTILINE))
    )


def test_table_of_popgym_with_three_seeds():
    runs = json.loads((NUMBERS / "popgym-seeds.json").read_text())["runs"]
    page = RESULTS["popgym"]
    for task in dict.fromkeys(run["task"] for run in runs):
        own = [run for run in runs if run["task"] == task]
        means = ", ".join(f"{np.mean(run['returns']):.3f}" for run in own)
        steps = ", ".join(f"{run['steps']:,}" for run in own)
        assert f"| {task} | {means} | {steps} |" in page


def test_table_of_the_t_maze_with_a_curriculum():
    runs = json.loads((NUMBERS / "tmaze-curriculum.json").read_text())["runs"]
    page = RESULTS["t-maze"]
    for agent, task in dict.fromkeys((run["agent"], run["task"]) for run in runs):
        own = [run for run in runs if (run["agent"], run["task"]) == (agent, task)]
        solved = [run for run in own if run["returns"] and np.mean(run["returns"]) >= 0.95]
        steps = [run["steps"] for run in solved]
        kind, penalty, corridor = task.split("-")
        cells = [
            agent,
            kind,
            penalty.replace("paper", "schedule"),
            f"{int(corridor):,}",
            f"{len(solved)} of {len(own)}",
        ]
        minutes = np.median([run["seconds"] for run in solved]) / 60
        cells += [f"{np.median(steps):,.0f}", f"{max(steps):,}", f"{minutes:.1f}"]
        assert f"\n| {' | '.join(cells)} |\n" in page, (agent, task)


def test_numbers_of_the_sweep():
    lines = (NUMBERS / "pendulum-sweep-trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    pruned = sum(trial["state"] == "pruned" for trial in trials)
    values = [trial["value"] for trial in trials if trial["state"] == "complete"]
    page = RESULTS["classic-control"]
    assert f"# {len(trials)} trials, {pruned} of them pruned; 24 minutes" in page
    assert f"have values from {max(values):.0f} to {min(values):.0f} with seed 0" in page


def experiment_table(name, task, runs):
    """Return the table of a task, made from the returns of an experiment."""
    own = {(run["agent"], run["seed"]): run for run in runs if run["task"] == task}
    agents = list(dict.fromkeys(agent for agent, _ in own))
    plan = read_plan(ROOT / f"scripts/experiments/{name}.toml").selection([task], agents)
    results = Results(plan, tuple(result(cell, own[cell.agent, cell.seed]) for cell in plan.cells()))
    return Summary(results).tables[0].markdown().partition("\n\n")[2].strip()


def result(cell, run):
    """Return the result of a run in the ``results.json`` of an experiment."""
    returns = None if run["returns"] is None else np.array(run["returns"])
    completion = Completion(run["steps"], {}) if run.get("steps") else None
    outcome = Outcome([], 0, "", run["seconds"] or 0.0, 1)
    return RunResult(cell, returns, outcome, completion=completion)


def assert_on_page(name, cells):
    """Check that a page has a table of these rows and no others."""
    page = PAGES[name]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    first = page.index(lines[0])
    assert page[first : first + len(lines)] == lines
    assert not page[first + len(lines)].startswith("|")
