"""Tests of ``rlxf sweep``: trainings, resumption after a kill, several processes, and errors in one line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import optuna
import pytest

from rlxf.cli import main, sweep_run
from rlxf.cli.entry_point import parse
from rlxf.cli.sweep_run import SweepRun
from rlxf.experiments.execution import locked
from rlxf.experiments.study import StorageError
from rlxf.experiments.sweep_file import SPACES, read_sweep_plan
from rlxf.experiments.toml_files import PlanError
from tests.cli.running import refused

FILE = """\
command = "train gtrxl"
trials = 3

[settings]
env = "rlxf/TMaze-v0"
env_kwargs = { corridor_length = 3 }
total_timesteps = 64
n_envs = 2
n_steps = 16
segment_length = 8
batch_size = 16
n_epochs = 1
core.memory.length = 4
episodes = 3
attention_maps_every = "None"
videos = false
evaluate_every = 32
evaluation_episodes = 2
quiet = true

[search]
learning_rate = { low = 1e-4, high = 1e-2, log = true, format = "linear:{}:0" }
core.width = [4, 8, 6]
core.heads = [2, 3]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "runs" / "small"


@pytest.fixture
def few_samples(monkeypatch):
    """Draw six random combinations in place of twenty, since each is parsed."""
    monkeypatch.setattr(sweep_run, "SAMPLES", 6)


def check_options(path: str) -> None:
    SweepRun(read_sweep_plan(Path(path)), Path("runs"), processes=1, threads=1).check_options()


def study_of(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="small", storage=f"sqlite:///{folder}/study.db")


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.1)


def start(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "rlxf", "sweep", "small.toml", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.usefixtures("runs_in_process")
def test_a_sweep_ends_with_settings_that_train(folder, capsys):
    """With this seed, two trials are possible and one has a width that the heads do not divide."""
    Path("small.toml").write_text(FILE.replace("trials = 3", "trials = 3\nsampler_seed = 0"))
    main(["sweep", "small.toml"])
    out = capsys.readouterr().out
    assert "0 of 3 trials: runs/small" in out
    assert len(re.findall(r"^trial \d: ", out, re.MULTILINE)) == 3
    assert "failed: Error parsing core: heads must divide width, got 3 heads and width 4" in out
    assert "no importance of options: it needs 10 complete trials" in out
    assert "ExperimentalWarning" not in out
    states = [trial.state.name for trial in study_of(folder).trials]
    assert set(states) == {"COMPLETE", "FAIL"}
    assert (folder / "history.png").read_bytes()[:4] == b"\x89PNG"
    best = (folder / "best.toml").read_text()
    command = re.search(r"^# rlxf (train gtrxl --config .*)$", best, re.MULTILINE)[1]
    main([*command.split(), "--run", "runs/best", "--no-progress-bar"])
    config = Path("runs/best/config.json").read_text()
    assert f'"learning_rate": "{re.search("learning_rate = .(linear:[^:]+:0)", best)[1]}"' in config
    capsys.readouterr()
    main(["sweep", "small.toml"])  # nothing is left to do
    assert not re.search(r"^trial ", capsys.readouterr().out, re.MULTILINE)


def test_a_sweep_without_a_complete_trial_exits_with_2(folder, capsys):
    """With this seed, the width of the only trial is not divisible by the heads, so nothing is trained."""
    Path("small.toml").write_text(FILE.replace("trials = 3", "trials = 1\nsampler_seed = 0"))
    assert "no trial is complete; the reasons are in runs/small/trials.md" in refused(
        capsys, "sweep", "small.toml"
    )
    assert "heads must divide width" in (folder / "trials.md").read_text()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_sweep_continues_its_runs(folder, capsys):
    text = FILE.replace("trials = 3", "trials = 1").replace("[4, 8, 6]", "[4, 8]").replace("[2, 3]", "[2]")
    text = text.replace("evaluate_every = 32", "evaluate_every = 0")
    Path("small.toml").write_text(text.replace("= 64", "= 1600\ncheckpoint_seconds = 0.2"))
    killed = start()
    run = folder / "trial-0000/seed-0"
    wait_for(lambda: list(run.glob("checkpoints/*")))
    killed.kill()
    killed.communicate()
    before = study_of(folder).trials[0]
    assert before.state.name == "RUNNING"
    main(["sweep", "small.toml"])
    (after,) = study_of(folder).trials
    assert (after.state.name, after.params) == ("COMPLETE", before.params)
    assert "1 of 1 trials: 1 complete" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.faults
def test_ctrl_c_reports_the_trials_and_saves_the_progress(folder, capfd):
    text = (
        FILE.replace("= 64", "= 1_000_000\ncheckpoint_seconds = 0.2")
        .replace("[4, 8, 6]", "[4, 8]")
        .replace("[2, 3]", "[2]")
    )
    Path("small.toml").write_text(text.replace("evaluate_every = 32", "evaluate_every = 0"))
    sweep = start()
    wait_for(lambda: list(folder.glob("trial-*/seed-0/checkpoints/*")))
    sweep.send_signal(signal.SIGINT)
    out, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert "1 not finished" in out
    assert out.rstrip().endswith("rlxf: interrupted")
    assert "Traceback" not in out
    assert '"returncode": 75' in next(folder.glob("trial-*/seed-0.json")).read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_share_a_sweep(folder):
    sweeps = [start("--storage", "shared.log"), start("--storage", "shared.log", "--processes", "2")]
    outs = [sweep.communicate(timeout=280)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outs
    numbers = sorted(int(each) for out in outs for each in re.findall(r"^trial (\d):", out, re.MULTILINE))
    assert numbers == [0, 1, 2]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "core.width =",
            "core.widht =",
            "small.toml, line 23: unknown option --core.widht; did you mean",
        ),
        ("episodes = 3", "episods = 3", "line 14: unknown option --episods; did you mean --episodes?"),
        ("episodes = 3", 'tuned = "tmaze-50"', "line 14: tuned cannot be set in a sweep: write the options"),
        ("[2, 3]", '[2]\ntuned = ["tmaze-50"]', "line 25: tuned cannot be set in a sweep: write the"),
        (
            "episodes = 3",
            "episodes = 2026-01-01",
            "line 14: episodes must contain texts",
        ),
        (
            "episodes = 3",
            "gamma = nan",
            "small.toml, line 14: gamma must be finite, got nan",
        ),
        ("trials =", "trails =", "line 2: the file has an unknown key trails; did you mean trials?"),
        ('env = "CartPole-v1"', 'env = ""', "--env is empty: name an environment"),
        ("low = 1e-4", "low = 1", "line 22: search.learning_rate must have low < high"),
    ],
)
def test_invalid_files_are_refused_before_anything_is_made(folder, capsys, old, new, message):
    assert old in FILE
    Path("small.toml").write_text(FILE.replace(old, new))
    assert message in refused(capsys, "sweep", "small.toml")
    assert not folder.exists()


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            'core.recurrence = ["None", "GRUU"]',
            "line 23: no combination with core.recurrence = 'GRUU' is accep",
        ),
        ('core.recurrence = ["None", "GRUU"]', "unknown recurrence 'GRUU'; did you mean GRU?"),
        (
            'core.recurrence = ["None", "GRU"]\n'
            'core.memory.lenght = { choices = [8, 16], when = { core.recurrence = "None" } }',
            "line 24: no combination with core.recurrence = 'None' is accepted: unknown option "
            "--core.memory.lenght; did you mean --core.memory.length?",
        ),
        (
            "n_epochs = { low = 1, high = 1000 }\n"
            "gamm = { low = 0.9, high = 0.99, when = { n_epochs = [1, 2] } }",
            "line 24: no combination with gamm is accepted: unknown option --gamm; did you mean --gamma?",
        ),
        ("normalize_rewards = [true, 2]", "line 23: no combination with normalize_rewards = 2 is accepted"),
    ],
)
def test_each_choice_and_each_option_is_checked(folder, added, message):
    """Random combinations need not contain them, but trials would."""
    text = FILE.replace("n_epochs = 1\n", "").replace("core.memory.length = 4\n", "")
    Path("small.toml").write_text(f"{text}{added}\n")
    with pytest.raises(PlanError) as error:
        check_options("small.toml")
    assert message in str(error.value)


@pytest.mark.parametrize("seed", range(3))
def test_choices_that_are_possible_together_with_some_others_are_accepted(folder, seed):
    """The widths 14, 22 and 26 suit one of the numbers of heads each."""
    heads = [[7, 11, 13], [11, 13, 7], [13, 7, 11]][seed]
    text = FILE.replace("[4, 8, 6]", "[14, 22, 26]").replace("[2, 3]", str(heads))
    Path("small.toml").write_text(text)
    check_options("small.toml")


def test_the_values_of_a_condition_are_tried_in_turn(folder, recwarn):
    """Five heads suit the second width only."""
    heads = "{ choices = [2, 3, 5], when = { core.width = [4, 6, 10], core.layers = [1, 2] } }"
    text = FILE.replace("[4, 8, 6]", "[4, 6, 10]\ncore.layers = [1, 2]").replace("[2, 3]", heads)
    Path("small.toml").write_text(text)
    check_options("small.toml")
    assert not recwarn.list


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("widths", "heads", "message"),
    [
        ("[5, 7]", "[2, 3]", "refuses 6 random combinations, so most of such trials will fail: "),
        ("[4, 8]", "[2, 3]", r" 6 random combinations with core\.heads = 3, so .*: heads must divide width"),
    ],
)
def test_choices_that_no_drawn_combination_suits_are_warned_about(folder, widths, heads, message):
    """Other combinations may be possible, so that the sweep starts."""
    Path("small.toml").write_text(FILE.replace("[4, 8, 6]", widths).replace("[2, 3]", heads))
    with pytest.warns(UserWarning, match=message) as warned:
        check_options("small.toml")
    assert len(warned) == 1


@pytest.mark.parametrize(("when", "depends"), [("", True), (', when = { "core.memory" = "XL" }', False)])
def test_an_option_of_another_technique_depends_on_the_technique(folder, when, depends):
    text = FILE.replace("core.memory.length = 4\n", "")
    searched = f'"core.memory" = ["None", "XL"]\ncore.memory.length = {{ choices = [4, 8]{when} }}\n'
    Path("small.toml").write_text(f"{text}{searched}")
    run = SweepRun(read_sweep_plan(Path("small.toml")), Path("runs"), processes=1, threads=1)
    assert run._depends_on_others(ValueError("unknown option --core.memory.length; see: x")) is depends
    assert not run._depends_on_others(ValueError("unknown option --core.memory.lenght; see: x"))


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("option", "choices", "message"),
    [
        ("core.layers", "[1, 0]", "layers must be at least 1"),
        ("n_envs", "[1, 1.5]", "n_envs must be a whole number .*, got 1.5"),
        ("normalize_rewards", "[true, 2]", "normalize_rewards must be true or false, got 2"),
        ("core.activation", '["gelu", "gleu"]', "core.activation must be one of .*, got 'gleu'"),
    ],
)
def test_values_that_are_invalid_with_any_others_are_refused(folder, option, choices, message):
    text = FILE.replace("n_envs = 2\n", "").replace("[4, 8, 6]", "[4, 8]").replace("[2, 3]", "[2]")
    Path("small.toml").write_text(f"{text}{option} = {choices}\n")
    with pytest.raises(PlanError, match=message):
        check_options("small.toml")


@pytest.mark.parametrize("space", SPACES)
def test_all_choices_of_the_spaces_of_the_package_are_accepted(tmp_path, space):
    path = tmp_path / "sweep.toml"
    needed = 'dataset = "a/b-v0"' if space == "dt" else 'env = "CartPole-v1"'
    path.write_text(f'command = "train {space}"\nspace = "{space}"\n[settings]\n{needed}\n')
    check_options(str(path))


def test_files_of_the_user_are_not_replaced(folder, capsys):
    folder.mkdir(parents=True)
    (folder / "best.toml").write_text("mine")
    message = refused(capsys, "sweep", "small.toml")
    assert "runs/small has best.toml, which would be replaced, but was not made by this command" in message
    assert "must not contain a ?" in refused(capsys, "sweep", "small.toml", "--output", "what?")


@pytest.mark.parametrize("option", ["--processes", "--threads", "--trials"])
def test_counts_are_checked(folder, capsys, option):
    assert f"{option} must be at least 1" in refused(capsys, "sweep", "small.toml", option, "0")
    assert not folder.exists()


def test_only_one_process_creates_the_study(folder, monkeypatch):
    """Optuna creates its tables without a lock, so that two processes would fail."""

    def open_locked(*_):
        with pytest.raises(BlockingIOError), locked(folder / ".study.lock", blocking=False):
            pass
        raise InterruptedError

    monkeypatch.setattr("rlxf.cli.sweep_run.open_study", open_locked)
    with pytest.raises(InterruptedError):
        parse(["sweep", "small.toml"]).prepare()


def test_errors_of_the_report_do_not_name_the_storage(tmp_path, monkeypatch):
    report = "rlxf.cli.sweep_run"
    monkeypatch.setattr(f"{report}.counts", lambda _: "no trials")
    full = OSError(28, "cannot write trials.md (No space left on device)")
    monkeypatch.setattr(f"{report}.write_report", Mock(side_effect=full))
    study = SimpleNamespace(place="sqlite:///study.db", complete=list)
    with pytest.raises(OSError, match=r"cannot write trials\.md") as error:
        SweepRun(Mock(), tmp_path, processes=1, threads=1)._report(study)
    assert not isinstance(error.value, StorageError)


def test_a_missing_optuna_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'rlxf[sweep]'" in refused(capsys, "sweep", "small.toml")
    assert not folder.exists()


def test_a_folder_of_another_sweep_is_refused(folder, capsys):
    folder.mkdir(parents=True)
    optuna.create_study(study_name="small", storage=f"sqlite:///{folder}/study.db").set_user_attr("x", 1)
    assert "was not made by rlxf sweep" in refused(capsys, "sweep", "small.toml")


def test_storages_that_cannot_be_used_are_named(folder, capsys):
    message = refused(capsys, "sweep", "small.toml", "--storage", "nonsense://x")
    assert message.startswith("rlxf: cannot use the storage nonsense:")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can write everywhere")
def test_a_folder_that_cannot_be_written_is_named(folder, capsys):
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert str(folder.name) in refused(capsys, "sweep", "small.toml")
