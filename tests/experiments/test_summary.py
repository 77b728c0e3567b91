"""Tests of the tables, numbers and figures of an experiment."""

import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from rlxf.evaluation.intervals import interquartile_mean
from rlxf.experiments import summary as module
from rlxf.experiments.experiment_file import read_plan
from rlxf.experiments.figures import MAX_LINES
from rlxf.experiments.jobs import ExperimentError, Outcome
from rlxf.experiments.plan import Plan
from rlxf.experiments.results import Results, RunResult
from rlxf.experiments.summary import Summary, other_results, write_summary
from rlxf.experiments.task_table import ONE_SEED
from rlxf.training.completion import Completion
from tests.experiments.logs import write_run

FILE = """\
seeds = 3

[tasks.pole]
env = "CartPole-v1"
score_range = [0, 500]

[tasks.maze]
env = "rlxf/TMaze-v0"

[agents.ppo]
command = "baseline ppo"

[agents.random]
command = "baseline random"
"""
RNG = np.random.default_rng(0)
RETURNS = {
    f"{task}/{agent}/seed-{seed}": RNG.uniform(low, high, 8)
    for task, low, high in (("pole", 10, 500), ("maze", -1, 1))
    for agent in ("ppo", "random")
    for seed in range(3)
}


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "file.toml").write_text(FILE)
    return read_plan(tmp_path / "file.toml")


def summary(plan: Plan, missing: tuple[str, ...] = ()) -> Summary:
    """Return the summary of runs that took 120 seconds, or failed if they are missing."""
    runs = []
    for cell in plan.cells():
        failed = cell.name in missing
        outcome = Outcome([], int(failed), "no memory" if failed else "", 120.0, 1)
        runs.append(RunResult(cell, None if failed else RETURNS[cell.name], outcome))
    return Summary(Results(plan, tuple(runs)))


def rows(table) -> dict[str, list[str]]:
    """Return the cells of a table by its first cell."""
    lines = [line.split("|")[1:-1] for line in table.markdown().splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in lines}


def test_statistics_of_a_task(plan):
    table = rows(summary(plan).tables[0])["ppo"]
    returns = np.stack([RETURNS[f"pole/ppo/seed-{seed}"] for seed in range(3)])
    middle = np.sort(returns, axis=None)[6:18].mean()
    assert table[0] == "3 of 3"
    assert float(table[1].split()[0]) == pytest.approx(middle, rel=1e-3)
    assert [float(cell) for cell in table[2:]] == pytest.approx(
        [returns.mean(), np.median(returns.mean(1)), returns.mean(1).min(), 2.0], rel=1e-3
    )


def test_steps_are_shown_for_a_task_whose_trainings_can_end_early(plan, tmp_path):
    assert "steps" not in summary(plan).tables[0].markdown()
    (tmp_path / "file.toml").write_text(FILE.replace("score_range", "stop_return = 400\nscore_range"))
    plan = read_plan(tmp_path / "file.toml")
    runs = [
        replace(run, completion=None if run.returns is None else Completion(1000 * (run.cell.seed + 1), {}))
        for run in summary(plan, ("pole/ppo/seed-2",)).results.runs
    ]
    shown = Summary(Results(plan, tuple(runs)))
    pole, maze = (rows(table) for table in shown.tables[:2])
    assert pole["agent"][-1] == "steps"
    assert (pole["ppo"][-1], pole["random"][-1]) == ("1,500", "2,000")
    assert "steps" not in maze["agent"]
    list(write_summary(shown, tmp_path))
    assert "ends once an evaluation reaches stop_return" in (tmp_path / "table.md").read_text()
    written = json.loads((tmp_path / "results.json").read_text())["runs"]
    steps = [run["steps"] for run in written if (run["task"], run["agent"]) == ("pole", "ppo")]
    assert steps == [1000, 2000, None]


def test_curves_of_trainings_that_ended_early_are_continued(plan, tmp_path, monkeypatch):
    values = {0: (1.0, 9.0, 8.0), 1: (1.0, 2.0, 3.0, 4.0), 2: (1.0, 5.0)}
    for seed, each in values.items():
        write_run(tmp_path / f"pole/ppo/seed-{seed}", each, seed)
    marks = {0: Completion(250, {}, ended_early=True), 1: Completion(300, {}), 2: None}
    results = summary(plan, ("pole/ppo/seed-2",)).results
    runs = [replace(run, completion=marks[run.cell.seed]) for run in results.runs]
    drawn = []
    monkeypatch.setattr(module, "learning_curves", lambda groups, metric: drawn.extend(groups) or Figure())
    list(write_summary(Summary(Results(plan, tuple(runs))), tmp_path))
    lines = drawn[0].lines("eval/mean_reward")
    assert [curve.steps[-1] for curve in lines] == [300, 300]
    assert lines[0].values.tolist() == [1, 9, 9]


@pytest.mark.parametrize(
    ("failed", "ends"), [((2,), [200, 200]), ((0, 1), [100]), ((0, 1, 2), [300, 300, 100])]
)
def test_curves_of_runs_that_failed_are_drawn_only_without_complete_runs(
    plan, tmp_path, monkeypatch, failed, ends
):
    for seed, count in enumerate((3, 3, 1)):
        write_run(tmp_path / f"pole/ppo/seed-{seed}", [1.0] * count, seed)
    drawn = []
    monkeypatch.setattr(module, "learning_curves", lambda groups, metric: drawn.extend(groups) or Figure())
    list(write_summary(summary(plan, tuple(f"pole/ppo/seed-{seed}" for seed in failed)), tmp_path))
    assert [curve.steps[-1] for curve in drawn[0].lines("eval/mean_reward")] == ends
    assert drawn[0].unfinished == len(failed)


def test_the_evaluation_after_a_training_is_not_in_the_figure(plan, tmp_path):
    values = [1.0, 2.0, 9.0]
    for seed in range(3):
        write_run(tmp_path / f"pole/ppo/seed-{seed}", values, seed)
    ((_, figure), *_) = module._figures(summary(plan), tmp_path)
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[100, 1], [200, 2]]
    assert figure.axes[0].get_ylabel() == "mean return"


def test_failed_runs_are_counted_and_named(plan, tmp_path):
    broken = summary(plan, ("maze/ppo/seed-1",))
    assert rows(broken.tables[1])["ppo"][0] == "2 of 3, 1 failed"
    list(write_summary(broken, tmp_path))
    assert "- maze/ppo/seed-1: no memory" in (tmp_path / "table.md").read_text()
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["failure"] for run in runs if run["returns"] is None] == ["no memory"]


def test_an_agent_without_results_on_a_task_is_left_out_of_the_scores(plan):
    assert list(summary(plan).scores) == ["ppo", "random"]
    absent = tuple(f"pole/ppo/seed-{seed}" for seed in range(3))
    assert list(summary(plan, absent).scores) == ["random"]
    assert rows(summary(plan, absent).tables[0])["ppo"][1] == ""


def absent(*pairs):
    return tuple(f"{pair}/seed-{seed}" for pair in pairs for seed in range(3))


def test_the_table_of_scores_names_the_agents_that_it_leaves_out(plan, tmp_path):
    sentence = "{} is left out of the normalized scores and of profile.png: no complete run on pole."
    second, first = summary(plan, absent("pole/random")), summary(plan, absent("pole/ppo"))
    assert second.tables[2].caption == sentence.format("random")
    assert rows(second.tables[2])["agent"][-1] == "P(this > ppo)"
    replaced = "The probabilities compare with random in place of ppo."
    assert first.tables[2].caption == f"{sentence.format('ppo')} {replaced}"
    assert rows(first.tables[2])["agent"][-1] == "P(this > random)"
    assert summary(plan).tables[2].caption is None
    for each in (first, second):
        list(write_summary(each, tmp_path))
        assert (tmp_path / "table.md").read_text().count("is left out") == 1


def test_without_any_score_there_is_no_table_of_scores(plan, tmp_path):
    empty = summary(plan, absent("pole/ppo", "pole/random"))
    assert [table.title.partition(":")[0] for table in empty.tables] == ["pole", "maze"]
    list(write_summary(empty, tmp_path))
    assert not (tmp_path / "profile.png").exists()
    text = (tmp_path / "table.md").read_text()
    for agent in ("ppo", "random"):
        assert text.count(f"{agent} is left out of the normalized scores: no complete run on pole.") == 1
    assert "The probabilities compare" not in text


def test_results_that_new_tables_lack_are_named(plan, tmp_path):
    written = summary(plan, ("pole/ppo/seed-2",))
    list(write_summary(written, tmp_path))
    assert other_results(tmp_path, plan.cells()) == []
    fewer = replace(plan, seeds=(0, 1)).selection(["pole"], [])
    assert other_results(tmp_path, fewer.cells()) == ["maze/ppo", "maze/random", "pole/random/seed-2"]
    assert other_results(tmp_path, []) == ["maze/ppo", "maze/random", "pole/ppo", "pole/random"]


def test_agents_of_environments_and_of_datasets_have_a_table_of_scores_each(tmp_path):
    """No agent trains on both kinds of tasks, so one table would be empty."""
    data = '[tasks.logged]\ndataset = "a/b-v0"\nscore_range = [0, 500]\n[agents.bc]\ncommand = "train bc"\n'
    (tmp_path / "both.toml").write_text(FILE + data)
    plan = read_plan(tmp_path / "both.toml")
    both = Summary(
        Results(plan, tuple(RunResult(cell, np.arange(8.0), Outcome([], 0)) for cell in plan.cells()))
    )
    *_, first, second = both.tables
    assert (first.title, second.title) == (
        "Normalized scores on pole (95% intervals)",
        "Normalized scores on logged (95% intervals)",
    )
    assert (list(rows(first))[1:], list(rows(second))[1:]) == (["ppo", "random"], ["bc"])
    assert rows(first)["agent"][-1] == "P(this > ppo)"
    text = "\n".join(path.name for path in write_summary(both, tmp_path))
    assert "profile.png" in text
    assert "profile.png shows each agent on its own tasks" in (tmp_path / "table.md").read_text()


def test_the_interquartile_mean_of_scores_is_that_of_runs(plan):
    """The first and the last quarter of three runs are three quarters of a run each."""
    scores = np.sort([RETURNS[f"pole/random/seed-{seed}"].mean() / 500 for seed in range(3)])
    found = summary(plan).statistics["random"]["iqm"].value
    assert found == pytest.approx(interquartile_mean(scores))


def test_different_numbers_of_seeds_are_shown(tmp_path):
    (tmp_path / "file.toml").write_text(FILE.replace('TMaze-v0"', 'TMaze-v0"\nscore_range = [-1, 1]'))
    fewer = summary(read_plan(tmp_path / "file.toml"), ("maze/ppo/seed-1",))
    table = rows(fewer.tables[2])
    assert (table["ppo"][0], table["random"][0]) == ("2 to 3", "3")


def test_intervals_of_one_seed_are_explained(plan):
    several = summary(plan, ("pole/ppo/seed-0",))
    one = summary(plan, ("pole/ppo/seed-0", "pole/ppo/seed-1"))
    assert {table.caption for table in several.tables} == {None}
    assert [table.caption for table in one.tables] == [ONE_SEED, None, ONE_SEED]
    assert summary(plan, absent("pole/ppo", "pole/random")).tables[0].caption is None


def test_numbers_of_any_size_are_written(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("rlxf.training.strict_json.MAX_JSON_BYTES", 100)
    list(write_summary(summary(plan), tmp_path))
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 12


def test_scores_are_compared_with_those_of_the_first_agent(plan):
    table = rows(summary(plan).tables[2])
    scores = {
        agent: [RETURNS[f"pole/{agent}/seed-{seed}"].mean() / 500 for seed in range(3)]
        for agent in ("ppo", "random")
    }
    wins = np.mean([own > other for own in scores["random"] for other in scores["ppo"]])
    assert wins != 0.5
    assert float(table["random"][-1].split()[0]) == pytest.approx(wins, abs=0.006)
    assert table["ppo"][-1] == ""
    for agent, values in scores.items():
        found = [float(table[agent][column].split()[0]) for column in (2, 4)]
        assert found == pytest.approx([np.mean(values), 1 - np.mean(values)], abs=0.006)


def test_scores_are_those_of_the_range(plan):
    (scores,) = summary(plan).scores["random"]
    returns = np.stack([RETURNS[f"pole/random/seed-{seed}"] for seed in range(3)])
    np.testing.assert_allclose(scores, returns / 500)


def test_files_of_a_selection_replace_those_of_all_tasks(plan, tmp_path):
    names = [path.name for path in write_summary(summary(plan), tmp_path)]
    assert names == ["table.md", "results.json", "profile.png"]
    names = [path.name for path in write_summary(summary(plan.selection(["maze"], [])), tmp_path)]
    assert names == ["table.md", "results.json"], "maze has no score_range"
    assert not (tmp_path / "profile.png").exists()
    assert "pole" not in (tmp_path / "table.md").read_text()


def test_a_table_of_best_checkpoints_names_runs_with_the_last_one(plan):
    best = replace(plan, checkpoint="best")
    runs = [
        RunResult(cell, RETURNS[cell.name], None, "last" if cell.agent == "random" else "best")
        for cell in best.cells()
    ]
    for table in Summary(Results(best, tuple(runs))).tables:
        assert list(rows(table))[1:] == ["ppo", "random (last checkpoint)"]
    runs[0] = replace(runs[0], checkpoint="last")
    mixed = Results(best, tuple(runs))
    assert mixed.label("ppo", ["pole"]) == "ppo (last checkpoint of 1 of 3 runs)"
    assert mixed.label("ppo", ["pole", "maze"]) == "ppo (last checkpoint of 1 of 6 runs)"


def test_different_numbers_of_episodes_are_refused(plan):
    runs = [RunResult(cell, np.zeros(3 + cell.seed % 2), None) for cell in plan.cells()]
    with pytest.raises(ExperimentError, match="the runs of ppo on pole have 3, 4 evaluation episodes"):
        Results(plan, tuple(runs)).returns("pole", "ppo")


def test_figures_of_many_agents_show_the_first_ones(tmp_path):
    names = [f"agent-{number}" for number in range(MAX_LINES + 2)]
    agents = "\n".join(f'[agents.{name}]\ncommand = "baseline random"' for name in names)
    (tmp_path / "many.toml").write_text(f"{FILE.partition('[agents')[0]}{agents}")
    many = read_plan(tmp_path / "many.toml")
    runs = [RunResult(cell, np.full(4, float(cell.seed)), None) for cell in many.cells()]
    written = list(write_summary(Summary(Results(many, tuple(runs))), tmp_path))
    assert tmp_path / "profile.png" in written
    text = (tmp_path / "table.md").read_text()
    assert f"profile.png shows the first {MAX_LINES} of {MAX_LINES + 2} agents." in text
    assert "curves.png" not in text  # there are no logs
    assert f"| {names[-1]} |" in text
