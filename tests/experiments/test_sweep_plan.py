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


FIXED = FILE.replace("core.layers = 2", 'core.recurrence = "GRU"').replace(
    'core.recurrence = ["None", "GRU"]', ""
)


@pytest.mark.parametrize("name", ["None", "none", "NONE"])
def test_a_condition_can_hold_for_a_fixed_option(read, name):
    """Names of techniques are compared as on the command line."""
    plan = read(FIXED.replace('"GRU"', f'"{name}"', 1))
    assert "core.memory.length" in plan.space.draw(plan.fixed, 0)
    shipped = FIXED.partition("[search]")[0].replace("trials", 'space = "gtrxl"\ntrials')
    plan = read(shipped.replace('"GRU"', f'"{name}"', 1))
    assert "core.memory.length" in plan.space.draw(plan.fixed, 0)


def test_a_condition_of_the_package_need_not_hold(read):
    """Conditions of the file must hold: see the invalid files."""
    for extra in ("", '[search]\ncore.recurrence = ["MinGRU", "LRU"]\n'):
        text = FIXED.partition("[search]")[0].replace("trials", 'space = "gtrxl"\ntrials')
        plan = read((text.replace('core.recurrence = "GRU"', "") if extra else text) + extra)
        assert "core.memory.length" not in {name for name, _ in plan.space.cases(plan.fixed)}


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("[0.9, 0.99]", "0.99"),
        ('["gru-gate", "None"]', '"GRUGate"'),
        ("{ low = 1, high = 8 }", "8"),
        ("{ low = 1, high = 7, step = 2 }", "[3, 5]"),
        ("{ low = 0.1, high = 0.7, step = 0.2 }", "0.3"),
        ("[true, false]", "true"),
    ],
)
def test_an_option_is_drawn_with_each_choice_and_its_condition(read, value, given):
    """Whatever the other option has in a random draw, the option occurs if it is asked for."""
    text = FILE.replace("n_epochs = { low = 1, high = 8 }", f'"core.residual" = {value}')
    plan = read(f"{text}n_envs = {{ choices = [2, 4], when = {{ core.residual = {given} }} }}\n")
    cases = [case for case in plan.space.cases(plan.fixed) if case[0] == "n_envs"]
    assert cases == [("n_envs", 2), ("n_envs", 4)]
    for case in cases:
        for seed in range(5):
            values = plan.space.draw(plan.fixed, seed, case)
            assert values["n_envs"] == case[1]
            assert case in plan.space.cases_in(values)


def test_a_draw_of_a_case_changes_no_other_option(read):
    plan = read(FILE)
    before = plan.space.draw(plan.fixed, 3)
    for choice in (True, False):
        after = plan.space.draw(plan.fixed, 3, ("env_kwargs.active", choice))
        assert after == before | {"env_kwargs.active": choice}


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
        ('"train gtrxl"', '["train gtrxl"]', "line 1: command is ['train gtrxl']; did you mean train gtrxl?"),
        ("train gtrxl", "baseline random", "line 1: command is 'baseline random'; "),
        ("train gtrxl", "train dt", "command train dt needs dataset: add it to [settings]"),
        ("trials = 5", "trials = 0", "line 2: trials must be a whole number from 1 to 100,000, got 0"),
        ("trials = 5", "trials = true", "line 2: trials must be a whole number"),
        ("[3, 7]", "[3, 3]", "line 3: seeds must be a number, or a list of different seeds"),
        ("trials = 5", 'direction = "maximiz"', "did you mean maximize?"),
        (
            "trials = 5",
            'space = "gtrlx"',
            "line 2: space must be gtrxl or dt, got 'gtrlx'; did you mean gtrxl?",
        ),
        ("core.layers = 2", "episodes = 0", "line 8: settings has episodes = 0, so no run has the metric"),
        ("trials = 5", "metric = 3", "line 2: metric must be the name of a metric"),
        ("trials = 5", "pruning = 3", "line 2: pruning must be a table, got 3"),
        ("trials = 5", "pruning = { warmpu = 1 }", "line 2: pruning has an unknown key warmpu; did"),
        ("trials = 5", "pruning = { warmup = 2 }", "line 2: pruning.warmup must be a number from 0"),
        ("trials = 5", "pruning = { startup_trials = 0 }", "line 2: pruning.startup_trials must be a whole"),
        ("core.layers = 2", "seed = 2", "line 8: settings has seed, which the sweep sets for each run"),
        ("n_epochs =", "run =", "search has run, which the sweep sets"),
        ("low = 1,", "low = 9,", "line 12: search.n_epochs must have low < high, got low = 9 and high = 8"),
        ("low = 1e-5", "low = 0.0", "line 11: search.learning_rate must have low > 0 with log = true"),
        ("low = 1e-5", "low = nan", "line 11: search.learning_rate must have numbers low and high"),
        ("low = 1,", "", "line 12: search.n_epochs must have numbers low and high, got low = None"),
        ("low = 1,", "low = '1',", "line 12: search.n_epochs must have numbers low and high, got low = '1'"),
        ("low = 1,", "lwo = 1,", "line 12: search.n_epochs has an unknown key lwo; did you mean low?"),
        ("low = 1,", "low = 1, lgo = true,", "search.n_epochs has an unknown key lgo; did you mean log?"),
        ("core.layers = 2", "space = 'gtrxl'", "line 8: settings has space, which is a key of the file: wri"),
        ("core.layers = 2", "sampler-seed = 2", "line 8: settings has sampler_seed, which is a key of the f"),
        ("n_epochs =", "seeds = [0, 1]\nn_epochs =", "line 12: search has seeds, which is a key of the file"),
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
        (
            'when = { core.recurrence = "None" }',
            'when = { core.recurrence = ["None", "GRUU"] }',
            "when of search.core.memory.length has core.recurrence = 'GRUU', which is never suggested"
            ": the choices are 'None' or 'GRU'",
        ),
        (
            'when = { core.recurrence = "None" }',
            "when = { n_epochs = 9 }",
            "line 14: when of search.core.memory.length has n_epochs = 9, which is never suggested from",
        ),
        (
            'when = { core.recurrence = "None" }',
            "when = { n_epochs = 1.5 }",
            "n_epochs = 1.5, which is never suggested from low = 1 and high = 8: conditions need choices, or",
        ),
        (
            'when = { core.recurrence = "None" }',
            "when = { learning_rate = 1e-4 }",
            "learning_rate = 0.0001, which is never suggested from low = 1e-05 and high = 0.01: condition",
        ),
        (
            'when = { core.recurrence = "None" }',
            "when = { core.recurrence = [] }",
            "when of search.core.memory.length has no value of core.recurrence: give at least one",
        ),
        (
            'when = { core.recurrence = "None" }',
            "when = { core.layers = [1, 3] }",
            "when of search.core.memory.length never holds: [settings] has core.layers = 2, not 1 or 3",
        ),
        (
            'core.recurrence = ["None", "GRU"]',
            'core.recurrence = { choices = ["None"], when = { core.layers = 2 } }',
            "when of search.core.memory.length names core.recurrence, which has a condition itself",
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


def test_draws_with_a_choice_keep_values_that_satisfy_its_condition(read):
    """Values that do not satisfy it are replaced by different ones that do."""
    searched = "\ncore.heads = { choices = [2, 5], when = { n_epochs = [2, 3, 4, 5] } }\n"
    plan = read(FILE + searched)
    pairs = [
        (plan.space.draw(plan.fixed, seed), plan.space.draw(plan.fixed, seed, ("core.heads", 5)))
        for seed in range(40)
    ]
    kept = [(given["n_epochs"], found["n_epochs"]) for given, found in pairs if 2 <= given["n_epochs"] <= 5]
    assert all(first == second for first, second in kept)
    assert {found["n_epochs"] for given, found in pairs if given["n_epochs"] in (1, 8)} > {2}
    assert {found["core.heads"] for _, found in pairs} == {5}
