"""``rlxf resume``: what was cut off ends as if it had not been."""

import csv
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from demonstration import asking, remembering
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer
from rlxf.cli import main
from rlxf.cli.program import parse
from rlxf.cli.resumable import Start
from rlxf.cli.train_dt import TrainDecisionTransformer
from rlxf.envs.trajectories import cache
from rlxf.training import RunFolder
from rlxf.training.checkpoints import Checkpoints, InBackground
from rlxf.training.plain_json import dump_json, load_json
from tests.cli import running
from tests.cli.running import refused
from tests.datasets import ID, record_cartpole

UPDATES = 7
TINY = shlex.split(
    f"--dataset {ID} --updates {UPDATES} --log-interval 2 --episodes 3 --context-length 4 --batch-size 4"
    " --evaluate-every 3 --checkpoint-seconds 0 --no-progress-bar --core.width 8 --core.layers 1"
    " --core.dropout 0.2 --learning-rate linear:0.01:0.001"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, and with a run on them that was not cut off."""
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
    """A copy of that run, beside its data."""
    shutil.copytree(trained / "minari", minari_root, dirs_exist_ok=True)
    shutil.copytree(trained / "whole", "whole")
    return RunFolder.open("whole")


@pytest.fixture(autouse=True)
def in_foreground(monkeypatch):
    """A checkpoint is on the disk before the next update: nobody waits for a thread of a run that died."""
    monkeypatch.setattr(InBackground, "start", lambda self, work: work())


@pytest.fixture
def at_update(monkeypatch):
    """Arranges that something happens before an update, once."""
    train = DecisionTransformer.train

    def arrange(number, what):
        def watched(self, windows, learning_rate):
            if self._n_updates == number and what:
                what.pop()()
            train(self, windows, learning_rate)

        monkeypatch.setattr(DecisionTransformer, "train", watched)

    return arrange


def die():
    """As if the process were gone: nothing that follows is done."""
    raise SystemError("gone")


def scalars(run):
    events = EventAccumulator(str(run)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def rows(run):
    with open(run / "progress.csv", newline="") as file:
        found = list(csv.DictReader(file))
    return [
        {key: value for key, value in row.items() if value and key != "time/updates_per_second"}
        for row in found
    ]


def assert_same_runs(one, other):
    assert (one / "checkpoint.zip").read_bytes() == (other / "checkpoint.zip").read_bytes()
    assert (one / "best.zip").read_bytes() == (other / "best.zip").read_bytes()
    assert scalars(one) == scalars(other)
    assert rows(one) == rows(other)
    headers = [(run / "progress.csv").read_text().splitlines()[0] for run in (one, other)]
    assert headers[0] == headers[1]


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_run_that_died_ends_as_if_it_had_not(whole, at_update, monkeypatch, number):
    at_update(number, [die])
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: None)  # who dies keeps nothing
        with pytest.raises(SystemError):
            main(["train", "dt", *TINY, "--run", "cut"])
    assert not Path("cut/checkpoint.zip").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_it_where_it_can_be_resumed(whole, at_update, capsys, name):
    at_update(4, [lambda: os.kill(os.getpid(), getattr(signal, name))])
    with pytest.raises(SystemExit) as left:
        main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; go on with: rlxf resume cut" in capsys.readouterr().err
    assert DecisionTransformer.load("cut/checkpoint.zip", device="cpu").num_timesteps == 5
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_signal_before_the_first_update_stops_it_where_it_can_be_resumed(whole, monkeypatch):
    begin = Checkpoints._on_training_start

    def at_once(self):
        begin(self)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_on_training_start", at_once)
        with pytest.raises(SystemExit) as left:
            main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_that_cannot_be_taken_up_stays(whole, at_update, capsys):
    """Its folder has all that was learned so far."""
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


def test_it_may_be_cut_off_twice(whole, at_update):
    for number, words in ((2, ["train", "dt", *TINY, "--run", "cut"]), (5, ["resume", "cut"])):
        at_update(number, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
        with pytest.raises(SystemExit):
            main(words)
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(whole, at_update, capsys):
    at_update(5, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit):
        main(["train", "dt", *TINY, "--run", "cut"])
    newest = RunFolder.reopen("cut").checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    main(["resume", "cut", "--no-progress-bar"])
    assert re.search(f"warning: .*{newest.name}.*the previous checkpoint is used", capsys.readouterr().err)
    assert_same_runs(whole.path, Path("cut"))


def test_what_dies_behind_its_last_update_is_finished(whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: die())
        with pytest.raises(SystemError):
            main(["train", "dt", *TINY, "--run", "cut"])
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_that_is_done_says_so_and_stays(whole, capsys):
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    main(["resume", "whole"])
    assert "whole has all of its 7 updates; see: rlxf evaluate whole" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


def test_what_cannot_be_resumed_is_told(minari_root, capsys, tmp_path):
    assert "there is no run folder none" in refused(capsys, "resume", "none")
    RunFolder.create(tmp_path / "other", {"agent": "of others"})
    assert "only a run of rlxf train gtrxl, rlxf train dt or rlxf pretrain can be resumed" in refused(
        capsys, "resume", str(tmp_path / "other")
    )
    RunFolder.create(tmp_path / "old", {"agent": "decision_transformer"})
    told = refused(capsys, "resume", str(tmp_path / "old"))
    assert "its config.json lacks 'context_length'. It was altered, or another version" in told


def test_a_run_of_the_demonstration_says_why_it_cannot_be_resumed(tmp_path, capsys):
    for make_run in (remembering.make_run, asking.make_run):
        run = make_run(tmp_path / make_run.__module__, 10, 0)
        told = refused(capsys, "resume", str(run.path))
        assert f"{run.path} was made by scripts/demo.sh, which keeps nothing to resume from" in told
        assert f"see: rlxf evaluate {run.path}" in told


def test_a_run_says_with_which_options_it_was_started(whole):
    given = parse(["train", "dt", *TINY, "--run", "whole"])
    again = TrainDecisionTransformer.of_run(whole, given.progress_bar)
    found = DecisionTransformer.load(whole.checkpoint, device="cpu")
    assert again.env == "CartPole-v1"
    assert again.target_returns == (found.return_range[1],)
    for name in ("dataset", "updates", "seed", "episodes", "evaluate_every", "log_interval", "core"):
        assert getattr(again, name) == getattr(given, name)
    assert again.learner.learning_rate == given.learner.learning_rate
    assert again.learner.return_scale == found.return_scale


def test_where_no_checkpoint_is_whole_nothing_is_changed(whole, capsys):
    Path("whole/completed.json").unlink()
    for file in whole.checkpoints.files():
        file.write_bytes(b"")
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="the previous checkpoint is used"), pytest.raises(FileNotFoundError):
        Start.of(whole)
    assert "there is no valid checkpoint in" in refused_at_last(capsys, "resume", "whole")
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


def refused_at_last(capsys, *words):
    """The last line that is printed when the command leaves with 2."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_died_before_its_first_checkpoint_begins_again(whole, at_update, monkeypatch):
    at_update(4, [die])
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: None)
        with pytest.raises(SystemError):
            main(["train", "dt", *TINY, "--run", "cut", "--checkpoint-seconds", "999"])
    assert not RunFolder.reopen("cut").checkpoints.files()
    assert rows(Path("cut"))
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_what_was_not_done_after_the_last_update_is_done_and_nothing_twice(whole):
    for name in ("completed.json", "checkpoint.zip"):
        shutil.copytree("whole", "cut")
        Path("cut", name).unlink()
        main(["resume", "cut", "--no-progress-bar"])
        assert_same_runs(whole.path, Path("cut"))
        assert scalars(whole.path / "evaluation-best") == scalars("cut/evaluation-best")
        assert Path("cut/completed.json").read_bytes() == Path("whole/completed.json").read_bytes()
        shutil.rmtree("cut")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_amid_the_last_evaluation_stops_it_where_it_can_be_resumed(whole, monkeypatch, capsys, name):
    def interrupted(*_, **__):
        os.kill(os.getpid(), getattr(signal, name))
        raise AssertionError("the signal was not heeded")

    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.train_dt.evaluate", interrupted)
        with pytest.raises(SystemExit) as left:
            main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; go on with: rlxf resume cut" in capsys.readouterr().err
    assert not Path("cut/completed.json").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_an_old_checkpoint_is_not_taken_for_the_result(whole, at_update, monkeypatch):
    """Stopped, resumed, and killed between its last checkpoint and checkpoint.zip."""
    at_update(3, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit):
        main(["train", "dt", *TINY, "--run", "cut"])
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: die())
        with pytest.raises(SystemError):
            main(["resume", "cut", "--no-progress-bar"])
    assert RunFolder.reopen("cut").checkpoints.file(UPDATES).is_file()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_result_that_was_changed_later_stays(whole, capsys):
    """E.g. by a calibration."""
    changed = whole.checkpoint.read_bytes() + b"more"
    whole.checkpoint.write_bytes(changed)
    main(["resume", "whole"])
    assert "whole has all of its 7 updates (checkpoint.zip changed since)" in capsys.readouterr().out
    assert whole.checkpoint.read_bytes() == changed


def test_a_distilled_run_is_not_taken_for_one_of_its_teacher(whole, capsys):
    config = Path("whole/config.json")
    config.write_text(config.read_text().replace("{", '{"teacher": "other",', 1))
    assert "is of rlxf distill, which cannot be resumed" in refused(capsys, "resume", "whole")


def test_a_signal_amid_the_conversion_of_data_leaves_nothing(minari_root, monkeypatch, capsys):
    record_cartpole()
    convert = cache.convert

    def interrupted(*given):
        convert(*given)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heeded")

    monkeypatch.setattr(cache, "convert", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["train", "dt", *TINY, "--run", "cut"])
    assert left.value.code == 143
    assert not Path("cut").exists()
    assert not [path for path in cache.cache_root().rglob("*") if path.is_file()]
    assert list(cache.cache_root().iterdir()) == []


@pytest.mark.parametrize(
    ("module", "words"),
    [("train_dt", ["train", "dt", *TINY]), ("train_gtrxl", ["train", "gtrxl", *running.TASK, *running.TINY])],
    ids=["dt", "gtrxl"],
)
def test_a_signal_before_the_training_begins_removes_the_folder_of_the_run(whole, monkeypatch, module, words):
    def interrupted(*_):
        assert Path("cut/config.json").is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(f"rlxf.cli.{module}.as_table", interrupted)
        with pytest.raises(SystemExit) as left:
            main([*words, "--run", "cut"])
    assert left.value.code == 143
    assert not Path("cut").exists()


@pytest.fixture
def altered(whole, tmp_path):
    """Makes a run of a program without its completion marker, whose ``config.json`` was altered."""

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
    ("program", "changes", "told"),
    [
        ("gtrxl", {"width": 40_000}, "core.width 40000"),
        ("gtrxl", {"width": 2**28, "heads": 1}, "core.width"),
        ("gtrxl", {"feed_forward": 10**9}, "core.width 8"),
        ("gtrxl", {"n_envs": 10**7}, "n_envs 10000000"),
        ("gtrxl", {"n_steps": 8 * 10**9}, "n_steps 8000000000"),
        ("gtrxl", {"memory": {"name": "XL", "length": 10**9}, "pattern": {"name": "Full"}}, ""),
        ("dt", {"width": 40_000}, "core.width 40000"),
        ("dt", {"context_length": 10**9}, "context_length 1000000000"),
        ("dt", {"batch_size": 10**9}, "batch_size 1000000000"),
        ("dt", {"episode_length": 10**9}, "episode_length 1000000000"),
    ],
    ids=str,
)
def test_a_configuration_that_asks_for_much_memory_is_refused(altered, capsys, program, changes, told):
    error = refused_at_last(capsys, "resume", str(altered(program, **changes)))
    assert "altered/config.json asks for too much memory: the file requires" in error
    assert told in error
    assert "the budget is" in error


@pytest.mark.parametrize(
    ("program", "changes", "told"),
    [
        ("gtrxl", {"n_envs": "2"}, "has n_envs = '2', which must be an integer"),
        ("gtrxl", {"n_envs": 2.5}, "has n_envs = 2.5, which must be an integer"),
        ("gtrxl", {"total_timesteps": None}, "has total_timesteps = None, which must be an integer"),
        ("gtrxl", {"gamma": [0.9]}, "has gamma = [0.9], which must be a number"),
        ("gtrxl", {"refresh": 1}, "has refresh = 1, which must be true or false"),
        ("gtrxl", {"env_timeout": "long"}, "has env_timeout = 'long', which must be a number"),
        ("dt", {"updates": True}, "has updates = True, which must be an integer"),
        ("dt", {"context_length": {}}, "has context_length = {}, which must be an integer"),
        ("dt", {"learning_rate": 0.1}, "has learning_rate = 0.1, which must be a string"),
    ],
    ids=str,
)
def test_a_configuration_of_other_types_is_refused(altered, capsys, program, changes, told):
    error = refused_at_last(capsys, "resume", str(altered(program, **changes)))
    assert f"altered/config.json {told}" in error


def test_a_budget_that_is_raised_lets_a_run_go_on(altered, capsys, monkeypatch):
    """One without checkpoints has but the budget."""
    path = altered("dt")
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoint.zip").unlink()
    with monkeypatch.context() as patch:
        patch.setenv("RLXF_MEMORY_BUDGET", "1000")
        assert "asks for too much memory" in refused_at_last(capsys, "resume", str(path))
    main(["resume", str(path), "--no-progress-bar"])
    assert (path / "completed.json").is_file()
