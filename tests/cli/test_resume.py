"""Tests of ``rlxf resume``: an interrupted run ends like an uninterrupted one."""

import csv
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from demonstration import decision_transformer, gtrxl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer
from rlxf.cli import main
from rlxf.cli.commands.train_baselines import MLPOptions
from rlxf.cli.commands.train_offline import TrainDecisionTransformer
from rlxf.cli.entry_point import parse
from rlxf.cli.training_session import StartPoint
from rlxf.data import cache
from rlxf.training import RunFolder, read_archive, write_archive
from rlxf.training.checkpoints import CheckpointWriter
from rlxf.training.strict_json import dump_json, load_json
from tests.cli import running
from tests.cli.running import death_expected, die, refused
from tests.datasets import ID, record_cartpole

pytestmark = pytest.mark.usefixtures("in_foreground")

UPDATES = 7
TINY = shlex.split(
    f"--dataset {ID} --updates {UPDATES} --log-interval 2 --episodes 3 --context-length 4 --batch-size 4"
    " --evaluate-every 3 --checkpoint-seconds 0 --no-progress-bar --core.width 8 --core.layers 1"
    " --core.dropout 0.2 --learning-rate linear:0.01:0.001"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with a dataset and an uninterrupted run on it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        patch.setenv("RLXF_CACHE", str(folder / "cache"))
        (folder / "minari").mkdir()
        record_cartpole()
        main(["train", "dt", *TINY, "--run", str(folder / "whole")])
    return folder


@pytest.fixture
def whole(minari_root, trained):
    """Copy of the uninterrupted run, with its dataset."""
    shutil.copytree(trained / "minari", minari_root, dirs_exist_ok=True)
    shutil.copytree(trained / "whole", "whole")
    return RunFolder.open("whole")


@pytest.fixture
def at_update(monkeypatch):
    """Function that calls an action once, before an update."""
    train = DecisionTransformer.train

    def arrange(number, actions):
        def watched(self, windows, learning_rate):
            if self._n_updates == number and actions:
                actions.pop()()
            train(self, windows, learning_rate)

        monkeypatch.setattr(DecisionTransformer, "train", watched)

    return arrange


def scalars(run):
    events = EventAccumulator(str(run)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def rows(run):
    with open(run / "progress.csv", newline="") as file:
        table = list(csv.DictReader(file))
    return [
        {key: value for key, value in row.items() if value and key != "time/updates_per_second"}
        for row in table
    ]


def assert_same_runs(one, other):
    assert (one / "checkpoint.zip").read_bytes() == (other / "checkpoint.zip").read_bytes()
    assert (one / "best.zip").read_bytes() == (other / "best.zip").read_bytes()
    assert scalars(one) == scalars(other)
    assert rows(one) == rows(other)
    headers = [(run / "progress.csv").read_text().splitlines()[0] for run in (one, other)]
    assert headers[0] == headers[1]


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_killed_run_ends_like_an_uninterrupted_one(whole, at_update, number):
    at_update(number, [die])
    with death_expected():
        main(["train", "dt", *TINY, "--run", "cut"])
    assert not Path("cut/checkpoint.zip").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_the_run_resumably(whole, at_update, capsys, name):
    at_update(4, [lambda: os.kill(os.getpid(), getattr(signal, name))])
    with pytest.raises(SystemExit) as left:
        main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; resume with: rlxf resume cut" in capsys.readouterr().err
    assert DecisionTransformer.load("cut/checkpoint.zip", device="cpu").num_timesteps == 5
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_signal_before_the_first_update_stops_the_run_resumably(whole, monkeypatch):
    begin = CheckpointWriter._on_training_start

    def at_once(self):
        begin(self)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_on_training_start", at_once)
        with pytest.raises(SystemExit) as left:
            main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_failed_resume_does_not_change_the_run(whole, at_update, capsys):
    at_update(4, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit):
        main(["train", "dt", *TINY, "--run", "cut"])
    config = Path("cut/config.json")
    written = config.read_text()
    config.write_text(written.replace('"batch_size": 4', '"batch_size": 3'))
    before = {path: path.read_bytes() for path in Path("cut").rglob("*.zip")}
    assert "batch_size" in refused(capsys, "resume", "cut")
    assert {path: path.read_bytes() for path in Path("cut").rglob("*.zip")} == before
    config.write_text(written)
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_can_be_interrupted_twice(whole, at_update):
    for number, words in ((2, ["train", "dt", *TINY, "--run", "cut"]), (5, ["resume", "cut"])):
        at_update(number, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
        with pytest.raises(SystemExit):
            main(words)
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_the_previous_checkpoint_replaces_a_damaged_one(whole, at_update, capsys):
    at_update(5, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit):
        main(["train", "dt", *TINY, "--run", "cut"])
    newest = RunFolder.reopen("cut").resume_checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    main(["resume", "cut", "--no-progress-bar"])
    assert re.search(f"warning: .*{newest.name}.*the previous checkpoint is used", capsys.readouterr().err)
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_killed_after_its_last_update_is_completed(whole):
    with death_expected(die):
        main(["train", "dt", *TINY, "--run", "cut"])
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_complete_run_is_not_changed(whole, capsys):
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    main(["resume", "whole"])
    assert "whole is complete: 7 updates; evaluate it with: rlxf evaluate whole" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


def test_errors_of_runs_that_cannot_be_resumed(minari_root, capsys, tmp_path):
    assert "there is no run folder none" in refused(capsys, "resume", "none")
    RunFolder.create(tmp_path / "other", {"agent": "of others"})
    assert "only runs of rlxf train and rlxf pretrain can be resumed" in refused(
        capsys, "resume", str(tmp_path / "other")
    )
    RunFolder.create(tmp_path / "old", {"agent": "decision_transformer"})
    message = refused(capsys, "resume", str(tmp_path / "old"))
    assert "'dataset' is missing in its config.json. The file was changed, or written" in message


def test_runs_of_the_demonstration_cannot_be_resumed(tmp_path, capsys):
    for make_run in (gtrxl.make_run, decision_transformer.create_run):
        run = make_run(tmp_path / make_run.__module__, 10, 0)
        message = refused(capsys, "resume", str(run.path))
        assert f"{run.path} was made by scripts/demo.sh, which saves no checkpoints" in message
        assert f"plot the run: rlxf plot {run.path}" in message
        run.final_checkpoint.touch()
        assert f"evaluate the run: rlxf evaluate {run.path}" in refused(capsys, "resume", str(run.path))


def test_options_are_read_from_the_run(whole):
    original = parse(["train", "dt", *TINY, "--run", "whole"])
    options = TrainDecisionTransformer.of_run(whole, original.progress_bar)
    agent = DecisionTransformer.load(whole.final_checkpoint, device="cpu")
    assert options.env == "CartPole-v1"
    assert options.target_returns == (agent.return_range[1],)
    for name in ("dataset", "updates", "seed", "episodes", "evaluate_every", "log_interval", "core"):
        assert getattr(options, name) == getattr(original, name)
    assert options.learner.learning_rate == original.learner.learning_rate
    assert options.learner.return_scale == agent.return_scale


def test_a_run_without_intact_checkpoints_is_not_changed(whole, capsys):
    Path("whole/completed.json").unlink()
    for file in whole.resume_checkpoints.files():
        file.write_bytes(b"")
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="the previous checkpoint is used"), pytest.raises(FileNotFoundError):
        StartPoint.of(whole)
    assert "there is no valid checkpoint in" in last_error_line(capsys, "resume", "whole")
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("name", "value"), [("played", None), ("best_step", "late")])
def test_an_altered_state_of_the_evaluations_is_refused(whole, capsys, name, value):
    Path("whole/completed.json").unlink()
    Path("whole/checkpoint.zip").unlink()
    newest, *later = whole.resume_checkpoints.files()
    for file in later:
        file.unlink()
    archive = read_archive(newest)
    archive.documents["stateful"]["evaluation"] |= {"best": 1.0, name: value}
    write_archive(newest, archive.documents, archive.tensors)
    assert f"{name} must be a whole number" in last_error_line(capsys, "resume", "whole")


def last_error_line(capsys, *words):
    """Return the last error line of a command that exits with status 2."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_killed_before_its_first_checkpoint_starts_over(whole, at_update, monkeypatch):
    at_update(4, [die])
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.training_session.save_agent", lambda *_: None)
        patch.setattr(CheckpointWriter, "save", lambda self: None)  # one is due before the evaluation
        with pytest.raises(SystemError):
            main(["train", "dt", *TINY, "--run", "cut", "--checkpoint-seconds", "999"])
    assert not RunFolder.reopen("cut").resume_checkpoints.files()
    assert rows(Path("cut"))
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_missing_final_stages_are_done_once(whole):
    for name in ("completed.json", "checkpoint.zip"):
        shutil.copytree("whole", "cut")
        Path("cut", name).unlink()
        main(["resume", "cut", "--no-progress-bar"])
        assert_same_runs(whole.path, Path("cut"))
        assert any(tag.startswith("evaluation_best/") for tag in scalars("cut"))
        assert Path("cut/completed.json").read_bytes() == Path("whole/completed.json").read_bytes()
        shutil.rmtree("cut")


def test_a_run_whose_result_was_removed_is_incomplete_until_its_final_stages_are_done(whole, monkeypatch):
    shutil.copytree("whole", "cut")
    Path("cut/checkpoint.zip").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.reports.evaluate", lambda *_, **__: die())
        with pytest.raises(SystemError):
            main(["resume", "cut", "--no-progress-bar"])
    assert not Path("cut/completed.json").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_during_the_final_evaluation_stops_the_run_resumably(whole, monkeypatch, capsys, name):
    def interrupted(*_, **__):
        os.kill(os.getpid(), getattr(signal, name))
        raise AssertionError("the signal was ignored")

    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.reports.evaluate", interrupted)
        with pytest.raises(SystemExit) as left:
            main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; resume with: rlxf resume cut" in capsys.readouterr().err
    assert not Path("cut/completed.json").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_an_old_checkpoint_is_not_used_as_the_result(whole, at_update):
    """The run is stopped, resumed, and killed between its last checkpoint and checkpoint.zip."""
    at_update(3, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit):
        main(["train", "dt", *TINY, "--run", "cut"])
    with death_expected(die):
        main(["resume", "cut", "--no-progress-bar"])
    assert RunFolder.reopen("cut").resume_checkpoints.file(UPDATES).is_file()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_result_changed_after_the_run_is_kept(whole, capsys):
    """A calibration changes ``checkpoint.zip``, for example."""
    changed = whole.final_checkpoint.read_bytes() + b"more"
    whole.final_checkpoint.write_bytes(changed)
    main(["resume", "whole"])
    assert "whole is complete: 7 updates (checkpoint.zip changed afterwards)" in capsys.readouterr().out
    assert whole.final_checkpoint.read_bytes() == changed


def test_distilled_runs_cannot_be_resumed(whole, capsys):
    config = Path("whole/config.json")
    config.write_text(config.read_text().replace("{", '{"teacher": "other",', 1))
    assert "is a run of rlxf distill, which cannot be resumed" in refused(capsys, "resume", "whole")


def test_a_signal_during_the_conversion_of_data_leaves_no_files(minari_root, monkeypatch, capsys):
    record_cartpole()
    convert = cache.convert

    def interrupted(*given):
        convert(*given)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was ignored")

    monkeypatch.setattr(cache, "convert", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 143
    assert not Path("cut").exists()
    assert not [path for path in cache.cache_root().rglob("*") if path.is_file()]
    assert list(cache.cache_root().iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["train", "dt", *TINY], ["train", "gtrxl", *running.TASK, *running.TINY]],
    ids=["dt", "gtrxl"],
)
def test_a_signal_before_the_training_removes_the_folder(whole, monkeypatch, words):
    def interrupted(*_):
        assert Path("cut/config.json").is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.training_command.print_settings", interrupted)
        with pytest.raises(SystemExit) as left:
            main([*words, "--run", "cut"])
    assert left.value.code == 143
    assert not Path("cut").exists()


@pytest.fixture
def altered(whole, tmp_path):
    """Function that makes a run without completion marker and with a changed ``config.json``."""

    def make(program, **changes):
        path = Path("altered")
        if program == "gtrxl":
            running.train("--run", str(path))
        else:
            shutil.copytree("whole", path)
        Path(path, "completed.json").unlink()
        config = load_json((path / "config.json").read_bytes())
        for name, value in changes.items():
            where = config["core"] if name in config["core"] else config
            where[name] = value
        (path / "config.json").write_bytes(dump_json(config))
        return path

    return make


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("gtrxl", {"width": 40_000}, "core.width 40000"),
        ("gtrxl", {"width": 2**28, "heads": 1}, "core.width"),
        ("gtrxl", {"feed_forward": 10**9}, "core.width 8"),
        ("gtrxl", {"n_envs": 10**7}, "n_envs=10000000"),
        ("gtrxl", {"n_steps": 8 * 10**9}, "n_steps=8000000000"),
        ("gtrxl", {"memory": {"name": "XL", "length": 10**9}, "pattern": {"name": "Full"}}, ""),
        ("dt", {"width": 40_000}, "core.width 40000"),
        ("dt", {"context_length": 10**9}, "context_length 1000000000"),
        ("dt", {"batch_size": 10**9}, "batch_size 1000000000"),
        ("dt", {"episode_length": 10**9}, "episode_length 1000000000"),
    ],
    ids=str,
)
def test_configurations_beyond_the_memory_budget_are_rejected(altered, capsys, program, changes, message):
    error = last_error_line(capsys, "resume", str(altered(program, **changes)))
    assert "altered/config.json needs too much memory: the file requires" in error
    assert message in error
    assert "the budget is" in error


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("gtrxl", {"n_envs": "2"}, "has n_envs = '2', which must be an integer"),
        ("gtrxl", {"n_envs": 2.5}, "has n_envs = 2.5, which must be an integer"),
        ("gtrxl", {"total_timesteps": None}, "has total_timesteps = None, which must be an integer"),
        ("gtrxl", {"gamma": [0.9]}, "has gamma = [0.9], which must be a number"),
        ("gtrxl", {"recompute_memory": 1}, "has recompute_memory = 1, which must be true or false"),
        ("gtrxl", {"env_timeout": "long"}, "has env_timeout = 'long', which must be a number"),
        ("dt", {"updates": True}, "has updates = True, which must be an integer"),
        ("dt", {"context_length": {}}, "has context_length = {}, which must be an integer"),
        ("dt", {"learning_rate": 0.1}, "has learning_rate = 0.1, which must be a string"),
    ],
    ids=str,
)
def test_configurations_with_wrong_types_are_rejected(altered, capsys, program, changes, message):
    error = last_error_line(capsys, "resume", str(altered(program, **changes)))
    assert f"altered/config.json {message}" in error


def test_many_workers_need_trust(altered, capsys):
    error = last_error_line(capsys, "resume", str(altered("gtrxl", n_envs=4000, workers=4000)))
    assert "the run has 4,000 worker processes; more than" in error
    assert "are started only with --trust" in error


def test_the_first_layer_of_a_perceptron_counts_for_the_memory_budget():
    options = MLPOptions(context_length=10_000, hidden_sizes=(1_000_000,))
    assert max(options.memory_usage().values()) >= 4 * 10**10


def test_a_larger_memory_budget_allows_resuming(altered, capsys, monkeypatch):
    """Checkpoints, which would increase the budget, are removed."""
    path = altered("dt")
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoint.zip").unlink()
    with monkeypatch.context() as patch:
        patch.setenv("RLXF_MEMORY_BUDGET", "1000")
        assert "needs too much memory" in last_error_line(capsys, "resume", str(path))
    main(["resume", str(path), "--no-progress-bar"])
    assert (path / "completed.json").is_file()
