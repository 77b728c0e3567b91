"""Tests of sweep files: fixed options, search spaces, conditions, and messages for invalid files."""

import random

import numpy as np
import pytest

from rlxf.experiments.search_space import Choices, Range
from rlxf.experiments.sweep_file import SPACES, read_sweep_plan
from rlxf.experiments.sweep_plan import SweepPlan
from rlxf.experiments.toml_files import PlanError

FILE = """\
command = "train gtrxl"
trials = 5
seeds = [3, 7]

[settings]
env = "rlxf/TMaze-v0"
env_kwargs = { corridor_length = 3 }
core.layers = 2

[search]
learning-rate = { low = 1e-5, high = 1e-2, log = true, format = "linear:{}:0" }
n_epochs = { low = 1, high = 8 }
core.recurrence = ["None", "GRU"]
core.memory.length = { choices = [4, 8], when = { core.recurrence = "None" } }
env_kwargs.active = [true, false]
"""


@pytest.fixture
def read(tmp_path):
    def plan(text: str) -> SweepPlan:
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        return read_sweep_plan(path)

    return plan


def test_a_file_is_read(read):
    plan = read(FILE)
    assert (plan.trials, plan.seeds, plan.direction, plan.metric) == (
        5,
        (3, 7),
        "maximize",
        "eval/mean_reward",
    )
    assert plan.space.options == {
        "learning_rate": Range(1e-5, 1e-2, log=True, format="linear:{}:0"),
        "n_epochs": Range(1, 8),
        "core.recurrence": Choices(("None", "GRU")),
        "core.memory.length": Choices((4, 8), {"core.recurrence": ("None",)}),
        "env_kwargs.active": Choices((True, False)),
    }


def test_options_are_fixed_and_searched_ones(read):
    plan = read(FILE)
    for seed in range(20):
        options = plan.options(plan.space.draw(plan.fixed, seed))
        assert options["env_kwargs"]["corridor_length"] == 3
        assert isinstance(options["env_kwargs"]["active"], bool)
        assert options["learning_rate"].startswith("linear:")
        assert 1 <= options["n_epochs"] <= 8
        assert ("core.memory.length" in options) == (options["core.recurrence"] == "None")


@pytest.mark.parametrize(
    "dimension",
    [
        Range(64, 256, step=64),
        Range(3, 11, step=4),
        Range(0.1, 0.7, step=0.2),
        Range(1, 1000, log=True),
        Range(1e-4, 1e-2, log=True),
        Range(1, 3),
    ],
)
def test_draws_are_suggestions_of_optuna(dimension):
    """Random draws, which find out whether a combination is valid, are values that Optuna can suggest."""
    rng = random.Random(0)
    draws = [dimension.draw(rng) for _ in range(200)]
    assert all(dimension.contains(draw) for draw in draws)
    if dimension.step is not None:
        steps = np.array(draws, float) - dimension.low
        np.testing.assert_allclose(steps / dimension.step, (steps / dimension.step).round(), atol=1e-9)
        assert (
            len({round(x, 9) for x in draws}) == round((dimension.high - dimension.low) / dimension.step) + 1
        )
    if dimension.log:
        assert np.median(draws) < (dimension.low + dimension.high) / 5


def test_a_condition_can_hold_for_a_fixed_option(read):
    text = FILE.replace("core.layers = 2", 'core.recurrence = "GRU"').replace(
        'core.recurrence = ["None", "GRU"]', ""
    )
    plan = read(text)
    assert "core.memory.length" not in plan.space.draw(plan.fixed, 0)
    plan = read(text.replace('"GRU"', '"None"', 1))
    assert "core.memory.length" in plan.space.draw(plan.fixed, 0)


@pytest.mark.parametrize("space", SPACES)
def test_spaces_of_the_package(read, space):
    """Fixed options are not searched, and options of the file replace those of the package."""
    needed = "dataset" if space == "dt" else "env"
    text = f'command = "train {space}"\nspace = "{space}"\n[settings]\n{needed} = "x"\ncore.width = 8\n'
    plan = read(f"{text}[search]\nbatch_size = [1, 2]\n")
    assert len(plan.space.options) > 8
    assert "core.width" not in plan.space.options
    assert plan.space.options["batch_size"] == Choices((1, 2))


def test_stored_suggestions_are_restored(read):
    plan = read(FILE)
    stored = {"learning_rate": 0.001, "n_epochs": 2, "core.recurrence": "GRU", "env_kwargs.active": True}
    assert plan.space.restore(stored, plan.fixed)["learning_rate"] == "linear:0.001:0"
    with pytest.raises(ValueError, match="it has no value of n_epochs"):
        plan.space.restore({key: stored[key] for key in stored if key != "n_epochs"}, plan.fixed)
    for name, value in [
        ("n_epochs", 9),
        ("n_epochs", 2.0),
        ("core.recurrence", "LSTM"),
        ("env_kwargs.active", 1),
    ]:
        with pytest.raises(ValueError, match="which is not in the search space"):
            plan.space.restore(stored | {name: value}, plan.fixed)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials", "trails", "line 2: the file has an unknown key trails; did you mean trials?"),
        ("train gtrxl", "train gtrlx", "line 1: command is 'train gtrlx'; did you mean train gtrxl?"),
        ("train gtrxl", "baseline random", "line 1: command is 'baseline random'; "),
        ("train gtrxl", "train dt", "command train dt needs dataset: add it to [settings]"),
        ("trials = 5", "trials = 0", "line 2: trials must be a whole number from 1 to 100,000, got 0"),
        ("trials = 5", "trials = true", "line 2: trials must be a whole number"),
        ("[3, 7]", "[3, 3]", "line 3: seeds must be a number, or a list of different seeds"),
        ("trials = 5", 'direction = "maximise"', "did you mean maximize?"),
        (
            "trials = 5",
            'space = "gtrlx"',
            "line 2: space must be gtrxl or dt, got 'gtrlx'; did you mean gtrxl?",
        ),
        ("core.layers = 2", "episodes = 0", "line 8: settings has episodes = 0, so no run has the metric"),
        ("trials = 5", "metric = 3", "line 2: metric must be the name of a metric"),
        ("trials = 5", "pruning = 3", "line 2: pruning must be a table, got 3"),
        ("trials = 5", "pruning = { warmpu = 1 }", "pruning has an unknown key warmpu; did you mean warmup?"),
        ("trials = 5", "pruning = { warmup = 2 }", "warmup must be a number from 0 to 1, got 2"),
        ("core.layers = 2", "seed = 2", "line 8: settings has seed, which the sweep sets for each run"),
        ("n_epochs =", "run =", "search has run, which the sweep sets"),
        ("low = 1,", "low = 9,", "line 12: search.n_epochs must have low < high, got low = 9 and high = 8"),
        ("low = 1e-5", "low = 0.0", "line 11: search.learning_rate must have low > 0 with log = true"),
        ("low = 1e-5", "low = nan", "line 11: search.learning_rate must have numbers low and high"),
        ("low = 1,", "", "line 12: search.n_epochs must have numbers low and high, got low = None"),
        ("low = 1,", "low = '1',", "line 12: search.n_epochs must have numbers low and high, got low = '1'"),
        ("low = 1,", "lwo = 1,", "search.n_epochs has an unknown key lwo; did you mean low?"),
        ("high = 8", "high = 8, step = 0", "line 12: search.n_epochs must have a step"),
        ("high = 8", "high = 8, step = 0.5", "line 12: search.n_epochs must have a step"),
        (
            "log = true,",
            "log = true, step = 1e-3,",
            "line 11: search.learning_rate must not have both log and step",
        ),
        ("log = true", "log = 1", "line 11: search.learning_rate must have log = true or false"),
        ("linear:{}:0", "linear", "format of search.learning_rate must be a text with one {}"),
        ('["None", "GRU"]', "[]", "line 13: search.core.recurrence must be a list of different"),
        ('["None", "GRU"]', "[1, 1.0]", "line 13: search.core.recurrence must be a list of different"),
        ('["None", "GRU"]', "[inf]", "line 13: search.core.recurrence must be a list of different"),
        ('["None", "GRU"]', '"GRU"', "line 13: search.core.recurrence must be a list of choices, or a table"),
        ("core.layers = 2", "n-epochs = 2", "n_epochs is in both [settings] and [search]: remove one"),
        ("core.layers = 2", "core.memory = {name = 'XL', length = 3}", "core.memory.length is in both"),
        ("[search]", "[search]\nenv_kwargs = [{}]\n[other]", "the file has an unknown key other"),
        ("n_epochs =", "learning_rate = [1]\nn_epochs =", "search has learning_rate twice, in two spellings"),
        ("when = { core.recurrence", "when = { core.recurence", "did you mean core.recurrence?"),
        (
            'when = { core.recurrence = "None" }',
            "when = 3",
            "when of search.core.memory.length must be a table",
        ),
        ("[search]", "[search", "is not a TOML file"),
        ("n_epochs", "n_epochs" + ".a" * 10_000, "sweep.toml: the key in line 12 has more than 64 parts"),
        (
            "n_epochs = {",
            f"n_epochs = {{{'a = {' * 70}{'}' * 70} }}\nx = {{",
            "is not a TOML file: tables and",
        ),
    ],
)
def test_invalid_files_are_refused_with_their_line(read, old, new, message):
    assert old in FILE
    with pytest.raises(PlanError) as error:
        read(FILE.replace(old, new, 1))
    assert message in str(error.value)
    assert "sweep.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_search_is_refused(read):
    with pytest.raises(PlanError, match=r"has no options to search: add them to a table \[search\]"):
        read(FILE.partition("[search]")[0])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no sweep file"):
        read_sweep_plan(tmp_path / "nowhere.toml")
