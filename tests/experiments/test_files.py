"""Tests of the experiment files of the project."""

import pytest

from rlxf.cli.config_file import to_arguments
from rlxf.cli.entry_point import parse
from rlxf.experiments.plan import Plan
from tests.sources import ROOT

FILES = sorted((ROOT / "scripts" / "experiments").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_options_of_all_runs_are_valid(file):
    plan = Plan.read(file)
    for task, agent in plan.pairs():
        values = plan.options(task, agent)
        options = parse([*agent.command.split(), *to_arguments(values)])
        assert options.total_timesteps == values["total_timesteps"]
    assert len(plan.cells()) == len(plan.seeds) * len(list(plan.pairs()))
