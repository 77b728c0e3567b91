"""Tests of sweeps with a training that is a function: suggestions, pruning, failures, and resumption."""

import errno
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlxf.experiments import sweep as module
from rlxf.experiments.execution import locked
from rlxf.experiments.jobs import ExperimentError, Outcome
from rlxf.experiments.search_space import Choices
from rlxf.experiments.study import StorageError
from rlxf.experiments.sweep import objective
from rlxf.experiments.sweep_report import (
    MIN_IMPORTANCE,
    best_table,
    counts,
    importance_advice,
    option_importances,
    write_report,
)
from tests.experiments.sweeps import FILE, STEPS, fake_run, job_of, make_sweep

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
NO_PRUNING = f"pruning = false\n{FILE}"
EARLY = f"pruning = {{ startup_trials = 2, warmup = 0.1 }}\n{FILE}"


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    monkeypatch.setattr(module, "run_job", fake_run)


def suggestions(folder: Path, text: str = NO_PRUNING) -> list[dict]:
    sweep, study, _ = make_sweep(folder, text)
    sweep.run(1)
    return [trial.params for trial in study.trials()]


def test_all_trials_are_trained_and_the_best_is_found(tmp_path):
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    sweep.run(1)
    assert [end.number for end in ends] == list(range(8))
    assert {end.state for end in ends} == {"complete"}
    best = max(ends, key=lambda end: end.value)
    assert study.complete()[0].number == best.number
    assert best.value == pytest.approx(best.options["gamma"])
    assert counts(study) == "8 of 8 trials: 8 complete"
    assert best_table(study).columns[0]._cells[0] == str(best.number)


def test_the_direction_can_be_reversed(tmp_path):
    sweep, study, ends = make_sweep(tmp_path, f"direction = 'minimize'\n{NO_PRUNING}")
    sweep.run(1)
    assert study.complete()[0].value == min(end.value for end in ends)


def test_the_objective_is_the_mean_over_seeds(tmp_path):
    sweep, _, ends = make_sweep(tmp_path, f"seeds = [0, 4]\n{NO_PRUNING}".replace("8", "1"))
    sweep.run(1)
    assert ends[0].value == pytest.approx(ends[0].options["gamma"] + 2)
    assert sorted(path.name for path in (tmp_path / "trial-0000").glob("seed-?")) == ["seed-0", "seed-4"]


def test_equal_seeds_give_equal_suggestions_with_and_without_interruption(tmp_path):
    text = NO_PRUNING.replace("trials = 8", "trials = 12")  # the first ten are random
    whole = suggestions(tmp_path / "a", text)
    suggestions(tmp_path / "b", text.replace("12", "5"))
    assert suggestions(tmp_path / "b", text) == whole
    other = suggestions(tmp_path / "c", f"sampler_seed = 1\n{text}".replace("12", "2"))
    assert other[0] != whole[0]
    assert len({trial["gamma"] for trial in whole}) == 12


def test_trials_below_the_median_are_pruned_at_any_polling(tmp_path, monkeypatch):
    """The decision depends on the learning curve only, even if it is read after the end of the run."""
    text = EARLY.replace("trials = 8", "trials = 10")
    sweep, study, ends = make_sweep(tmp_path / "a", text)
    sweep.run(1)
    states = [end.state for end in ends]
    assert states[:2] == ["complete"] * 2
    assert states.count("pruned") > 2
    complete = [end.options["gamma"] for end in ends if end.state == "complete"]
    assert max(end.options["gamma"] for end in ends) == max(complete)
    pruned = [trial for trial in study.trials() if trial.state.name == "PRUNED"]
    assert all(max(trial.intermediate_values) < 19 for trial in pruned)
    assert all(
        not (tmp_path / f"a/trial-{each.number:04}/seed-0/evaluation.json").exists() for each in pruned
    )

    monkeypatch.setattr(module, "run_job", lambda job, should_stop: fake_run(job))
    sweep, _, late = make_sweep(tmp_path / "b", text)
    sweep.run(1)
    assert [(end.state, end.options) for end in late] == [(end.state, end.options) for end in ends]


def test_a_pruned_trial_trains_no_further_seeds(tmp_path):
    sweep, _, ends = make_sweep(tmp_path, f"seeds = 3\n{EARLY}".replace("trials = 8", "trials = 10"))
    sweep.run(1)
    trained = {end.number: len(list(tmp_path.glob(f"trial-{end.number:04}/seed-?"))) for end in ends}
    assert {trained[end.number] for end in ends if end.state == "complete"} == {3}
    assert {trained[end.number] for end in ends if end.state == "pruned"} == {1}


def test_the_advice_names_what_an_importance_needs(tmp_path):
    one_option = NO_PRUNING.replace("core.layers = [1, 2, 3]\n", "").replace("trials = 8", "trials = 12")
    sweep, study, _ = make_sweep(tmp_path, one_option)
    assert importance_advice(study) == "it needs 10 complete trials with different values"
    sweep.run(1)
    assert importance_advice(study) == "it needs two searched options that all complete trials have"


def test_a_value_after_the_training_does_not_affect_pruning(tmp_path):
    """The evaluation at the end is logged at the same step as the last one during the training."""
    sweep, study, _ = make_sweep(tmp_path)
    fake_run(job_of(tmp_path / "run", {"gamma": 1.0}, 0))
    curve = module.LearningCurve(study.study.ask(), tmp_path / "run", sweep.plan, 0, study)
    before = curve._values()
    with open(tmp_path / "run" / "progress.csv", "a") as file:
        file.write("-500,100\n")
    np.testing.assert_array_equal(curve._values(), before)


def test_learning_curves_are_reported_after_each_twentieth_of_the_training(tmp_path):
    """The first value is logged after a tenth."""
    sweep, study, _ = make_sweep(tmp_path)
    fake_run(job_of(tmp_path / "run", {"gamma": 0.5}, 0))
    trial = study.study.ask()
    assert not module.LearningCurve(trial, tmp_path / "run", sweep.plan, 0, study)()
    reported = study.frozen(trial.number).intermediate_values
    assert reported == {point: pytest.approx(0.5 * STEPS * point / 20) for point in range(2, 20)}


def test_trials_are_not_pruned_in_the_first_part_of_a_training(tmp_path, monkeypatch):
    sweep, study, _ = make_sweep(tmp_path, EARLY.replace("warmup = 0.1", "warmup = 0.4"))
    fake_run(job_of(tmp_path / "run", {"gamma": 0.5}, 0))
    trial = study.study.ask()
    monkeypatch.setattr(trial, "should_prune", lambda: True)
    curve = module.LearningCurve(trial, tmp_path / "run", sweep.plan, 0, study)
    assert curve()
    assert curve.reported == 0.4 * 20


def test_a_full_disk_ends_the_sweep_and_the_trial_is_continued(tmp_path, monkeypatch):
    def full(job, should_stop):
        fake_run(job, should_stop)
        return Outcome([], 2, f"cannot write x ({os.strerror(errno.ENOSPC)})")

    monkeypatch.setattr(module, "run_job", full)
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    with pytest.raises(OSError, match=r"No space left on device.*the same command continues the trial"):
        sweep.run(1)
    assert [trial.state.name for trial in study.trials()] == ["RUNNING"]
    monkeypatch.setattr(module, "run_job", fake_run)
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    sweep.run(1)
    assert [end.state for end in ends] == ["complete"] * 8


def test_failures_have_a_reason_and_do_not_end_the_sweep(tmp_path, monkeypatch):
    def run(job, should_stop):
        number = int(Path(job.folder).parent.name.removeprefix("trial-"))
        codes = {0: Outcome([], 2, "NaN loss"), 1: Outcome([], -9), 2: Outcome([], 1), 3: Outcome([], 75)}
        return codes.get(number) or fake_run(job, should_stop)

    monkeypatch.setattr(module, "run_job", run)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0)
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    sweep.run(1)
    reasons = [end.reason for end in ends]
    assert reasons[0] == "NaN loss"
    assert reasons[1] == "the training was ended by SIGKILL, e.g. because the memory was exhausted"
    assert reasons[2:4] == ["exit status 1", "exit status 75"]
    assert counts(study) == "8 of 8 trials: 4 failed, 4 complete"
    list(write_report(study, tmp_path, lambda options: []))
    assert "| NaN loss |" in (tmp_path / "trials.md").read_text()


def test_refused_combinations_start_no_process(tmp_path):
    def refuse(folder, options, seed):
        if options["core.layers"] != 2:
            raise ValueError("layers must be 2")
        return job_of(folder, options, seed)

    sweep, _, ends = make_sweep(tmp_path, NO_PRUNING, make_job=refuse)
    sweep.run(1)
    for end in ends:
        refused = end.options["core.layers"] != 2
        assert end.reason == ("layers must be 2" if refused else "")
        assert (tmp_path / f"trial-{end.number:04}/seed-0").exists() != refused
    assert {"complete", "failed"} == {end.state for end in ends}


def test_threads_share_the_trials(tmp_path):
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    sweep.run(3)
    assert sorted(end.number for end in ends) == list(range(8))
    assert len(study.trials()) == 8


@pytest.mark.parametrize("storage", [None, "shared.log", "sqlite:///shared.db"])
def test_two_sweeps_share_a_study(tmp_path, monkeypatch, storage):
    monkeypatch.chdir(tmp_path)
    sweeps = [make_sweep(tmp_path / "folder", NO_PRUNING, storage) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda made: made[0].run(1), sweeps))
    numbers = Counter(end.number for _, _, ends in sweeps for end in ends)
    assert numbers == Counter(range(8))
    assert not storage or (tmp_path / storage.rpartition("/")[2]).exists()


def die_in_trial(monkeypatch, folder: Path, number: int, text: str = NO_PRUNING) -> None:
    """Interrupt a sweep in a trial as a signal does."""

    def run(job, should_stop):
        if f"trial-{number:04}" in job.folder:
            raise KeyboardInterrupt
        return fake_run(job, should_stop)

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_job", run)
        sweep, *_ = make_sweep(folder, text)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(1)


def test_an_interrupted_trial_is_continued(tmp_path, monkeypatch):
    die_in_trial(monkeypatch, tmp_path / "cut", 3)
    sweep, study, ends = make_sweep(tmp_path / "cut", NO_PRUNING)
    assert counts(study) == "4 of 8 trials: 3 complete, 1 not finished"
    sweep.run(1)
    assert [end.number for end in ends] == [3, 4, 5, 6, 7]
    assert [trial.params for trial in study.trials()] == suggestions(tmp_path / "whole")


def test_a_trial_of_a_living_process_is_left_alone(tmp_path, monkeypatch):
    die_in_trial(monkeypatch, tmp_path, 0)
    with locked(tmp_path / "trial-0000" / ".lock"):
        sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
        sweep.run(1)
    assert [end.number for end in ends] == list(range(1, 8))
    assert study.trials()[0].state.name == "RUNNING"


def test_a_trial_of_another_folder_is_left_alone(tmp_path, monkeypatch):
    """Machines without a common folder share a storage: whether the process of a trial lives is unknown."""
    storage = f"sqlite:///{tmp_path}/shared.db"
    _, study, _ = make_sweep(tmp_path / "a", NO_PRUNING, storage)
    study.study.ask()
    sweep, _, ends = make_sweep(tmp_path / "b", NO_PRUNING, storage)
    sweep.run(1)
    assert [end.number for end in ends] == list(range(1, 8))


@pytest.mark.parametrize("stored", [(), ("core.layers",), ("gamma", "core.layers")])
def test_a_trial_whose_process_died_before_all_suggestions_is_continued(tmp_path, stored):
    """Stored suggestions are kept, and missing ones are made; without any, as in an uninterrupted sweep."""
    _, study, _ = make_sweep(tmp_path / "cut", NO_PRUNING)
    trial = study.study.ask()
    kept = {name: study.plan.space.options[name].suggest(trial, name) for name in stored}
    sweep, study, ends = make_sweep(tmp_path / "cut", NO_PRUNING)
    sweep.run(1)
    assert [end.state for end in ends] == ["complete"] * 8
    params = study.trials()[0].params
    assert params.keys() == {"gamma", "core.layers"}
    assert kept.items() <= params.items()
    if not stored:
        assert [trial.params for trial in study.trials()] == suggestions(tmp_path / "whole")


def test_a_storage_that_fails_during_suggestions_loses_no_trial(tmp_path, monkeypatch):
    suggest, calls = Choices.suggest, []

    def fail_once(self, trial, name):
        calls.append(name)
        if len(calls) == 1:
            raise OSError("the storage is not reachable")
        return suggest(self, trial, name)

    monkeypatch.setattr(Choices, "suggest", fail_once)
    sweep, study, _ = make_sweep(tmp_path, NO_PRUNING)
    with pytest.raises(StorageError, match="the storage is not reachable"):
        sweep.run(1)
    assert [trial.params.keys() for trial in study.trials()] == [{"gamma"}]
    sweep, study, ends = make_sweep(tmp_path, NO_PRUNING)
    sweep.run(1)
    assert [end.state for end in ends] == ["complete"] * 8


def test_reported_points_are_not_judged_again(tmp_path, monkeypatch):
    """A continued trial goes on after the last point of its learning curve that was reported."""
    sweep, study, _ = make_sweep(tmp_path, EARLY)
    trial = study.study.ask()
    sweep.plan.space.suggest(trial, sweep.plan.fixed)
    trial.report(0.5, 4)
    curve = module.LearningCurve(study.trial(0), tmp_path, sweep.plan, 0, study)
    assert curve.reported == 4


def test_importances_need_trials(tmp_path):
    few = NO_PRUNING.replace("trials = 8", f"trials = {MIN_IMPORTANCE - 1}")
    sweep, study, _ = make_sweep(tmp_path, few)
    sweep.run(1)
    names = [path.name for path in write_report(study, tmp_path, lambda options: [])]
    assert names == ["trials.md", "best.toml", "history.png"]
    sweep, study, _ = make_sweep(tmp_path, few.replace(f"trials = {MIN_IMPORTANCE - 1}", "trials = 18"))
    sweep.run(1)
    names = [path.name for path in write_report(study, tmp_path, lambda options: [])]
    assert names == ["trials.md", "best.toml", "history.png", "importance.png"]
    assert (tmp_path / "importance.png").read_bytes()[:4] == b"\x89PNG"
    importances = option_importances(study)
    assert importances["gamma"] > importances["core.layers"]  # which has no effect
    assert sum(importances.values()) == pytest.approx(1)


def test_another_metric_is_the_last_value_of_the_log(tmp_path):
    fake_run(job_of(tmp_path / "run", {"gamma": 0.5}, 0))
    (tmp_path / "run/progress.csv").write_text("train/loss,time/total_timesteps\n3,1\n2,2\n")
    assert objective(tmp_path / "run", "train/loss") == 2
    with pytest.raises(ValueError, match="the run has no metric train/los; did you mean train/loss"):
        objective(tmp_path / "run", "train/los")


def test_a_misspelled_metric_ends_the_sweep_after_the_first_trial(tmp_path):
    sweep, study, _ = make_sweep(tmp_path, f"metric = 'eval/mean_rewrd'\n{NO_PRUNING}")
    with pytest.raises(
        ExperimentError, match=r"no metric eval/mean_rewrd; did you mean .*: correct the metric"
    ):
        sweep.run(1)
    assert counts(study) == "1 of 8 trials: 1 failed"


def test_a_metric_that_some_trials_have_does_not_end_the_sweep(tmp_path, monkeypatch):
    def run(job, should_stop):
        outcome = fake_run(job, should_stop)
        if "trial-0001" in job.folder:
            (Path(job.folder) / "progress.csv").write_text("train/loss,time/total_timesteps\n3,100\n")
        return outcome

    monkeypatch.setattr(module, "run_job", run)
    sweep, study, _ = make_sweep(tmp_path, f"metric = 'eval/mean_reward'\n{NO_PRUNING}")
    monkeypatch.setattr(module, "MEAN_RETURN", "")  # so that the metric is read from the log
    sweep.run(1)
    assert counts(study) == "8 of 8 trials: 7 complete, 1 failed"


@pytest.mark.parametrize("returns", ["[NaN]", "[]", "3"])
def test_returns_that_are_no_numbers_are_refused(tmp_path, returns):
    (tmp_path / "evaluation.json").write_text(json.dumps({"last": {"returns": 0}}).replace("0", returns))
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
        objective(tmp_path, "eval/mean_reward")
