"""Tests of the experiment files of the project."""

import tomllib

import pytest

from rlxf.cli.config_file import flat_options, to_arguments
from rlxf.cli.entry_point import parse
from rlxf.experiments.experiment_file import read_plan
from rlxf.experiments.sweep_file import read_sweep_plan
from rlxf.experiments.sweep_report import to_toml
from rlxf.tuned import tuned_file
from tests.sources import ROOT

FILES = sorted((ROOT / "scripts" / "experiments").glob("*.toml"))
SWEEPS = sorted((ROOT / "scripts" / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_options_of_all_runs_are_valid(file):
    plan = read_plan(file)
    for task, agent in plan.pairs():
        values = plan.options(task, agent)
        options = parse([*agent.command.split(), *to_arguments(values)])
        assert options.total_timesteps == values["total_timesteps"]
        steps = getattr(options, "learner", None) and options.learner.n_steps
        assert not steps or steps % options.learner.segment_length == 0, (task.name, agent.name)
    assert len(plan.cells()) == len(plan.seeds) * len(list(plan.pairs()))


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
@pytest.mark.parametrize("seed", range(3))
def test_all_combinations_of_a_sweep_are_valid(file, seed):
    plan = read_sweep_plan(file)
    parse([*plan.command.split(), *to_arguments(plan.options(plan.space.draw(plan.fixed, seed)))])


def test_the_best_settings_of_a_sweep_are_shipped():
    plan = read_plan(ROOT / "scripts/experiments/pendulum-sweep.toml")
    options = plan.options(plan.tasks[0], plan.agents[1])
    tuned = flat_options(tomllib.loads(tuned_file("pendulum-no-velocity", "train gtrxl").read_text()))
    assert {name: flat_options(options)[name] for name in tuned} == tuned


@pytest.mark.parametrize("text", ["a", "\U0001f600 ü", 'say "hi"', "a\\b", "\x00\x1f\x7f"])
def test_texts_of_best_settings_are_read_as_they_are(text):
    assert tomllib.loads(f"value = {to_toml(text)}") == {"value": text}
