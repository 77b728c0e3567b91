"""Tests that tables of docs/benchmarks agree with the runs in docs/numbers."""

import json

import numpy as np
from benchmarks import ablation, cores, corridors, learning, mixers
from benchmarks.result_cache import read_runs
from benchmarks.techniques import kept, rows, subjects

from rlxf.experiments.execution import Outcome
from rlxf.experiments.plan import Plan
from rlxf.experiments.results import Results, RunResult
from rlxf.experiments.summary import Summary
from tests.sources import ROOT

NUMBERS = ROOT / "docs" / "numbers"
PAGES = {
    page.stem: page.read_text(encoding="utf-8").splitlines()
    for page in (ROOT / "docs" / "benchmarks").glob("*.md")
}


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


def test_table_of_cores():
    assert_on_page(
        "memory-tasks", cores.rows([cores.Run(**run) for run in read_runs(NUMBERS / "cores.jsonl").values()])
    )


def test_table_of_mixers():
    assert_on_page(
        "attention", mixers.rows([mixers.read(run) for run in read_runs(NUMBERS / "mixers.jsonl").values()])
    )


def test_table_of_implementation_details():
    runs = [ablation.Run(**run) for run in read_runs(NUMBERS / "ablation.jsonl").values()]
    assert_on_page("online", ablation.rows(runs))


def test_table_of_cartpole_without_velocities():
    document = json.loads((NUMBERS / "no-velocity.json").read_text())
    agents = list(dict.fromkeys(run["agent"] for run in document["runs"]))
    plan = Plan.read(ROOT / "scripts/experiments/no-velocity.toml").selection(["CartPole"], agents)
    runs = {(run["task"], run["agent"], run["seed"]): run for run in document["runs"]}
    results = Results(
        plan, tuple(result(cell, runs[cell.task, cell.agent, cell.seed]) for cell in plan.cells())
    )
    table = Summary(results).tables[0].markdown().partition("\n\n")[2].strip()
    assert f"\n{table}\n\n" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def result(cell, run):
    """Return the result of a run in the ``results.json`` of an experiment."""
    returns = None if run["returns"] is None else np.array(run["returns"])
    return RunResult(cell, returns, Outcome([], 0, "", run["seconds"] or 0.0, 1))


def assert_on_page(name, cells):
    """Check that a page has a table of these rows and no others."""
    page = PAGES[name]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    first = page.index(lines[0])
    assert page[first : first + len(lines)] == lines
    assert not page[first + len(lines)].startswith("|")
