"""Tests of the execution of runs: completion, failures, kills, locks, and a cluster whose worker dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlxf.experiments import execution
from rlxf.experiments.execution import (
    cluster_executor,
    failure_message,
    local_executor,
    locked,
    only_process,
    run_job,
    run_jobs,
    stop_all,
)
from rlxf.experiments.jobs import ExperimentError, Job, Outcome, is_complete

SHORT = ("--env", "CartPole-v1", "--episodes", "2", "--quiet")
GTRXL = (
    *("--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}', "--episodes", "2", "--quiet"),
    *("--n-envs", "2", "--n-steps", "16", "--segment-length", "8", "--batch-size", "16", "--core.width", "8"),
    *("--core.heads", "2", "--core.memory.length", "4", "--attention-maps-every", "None", "--no-videos"),
    *("--n-epochs", "1", "--evaluate-every", "0", "--checkpoint-seconds", "0.2"),
)


def random_job(folder: Path, name: str = "seed-0", *options: str) -> Job:
    return Job(str(folder / name), "baseline random", (*SHORT, *options))


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def children() -> list[int]:
    """Return the ids of the processes that this process has started, and of those that they have started."""
    text = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in text.splitlines()[1:]]
    found = [os.getpid()]
    for parent in found:
        found += [pid for pid, of in pairs if of == parent]
    return found[1:]


def training(folder: Path) -> list[int]:
    """Return the ids of the processes that train in a folder."""

    def command(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            return ""

    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if f"{folder} " in command(pid)]


@pytest.mark.thorough
def test_a_run_is_trained_once(tmp_path):
    job = random_job(tmp_path)
    first = run_job(job)
    assert (first.returncode, first.message, first.attempts) == (0, "", 1)
    assert is_complete(job)
    made = (Path(job.folder) / "completed.json").stat().st_mtime_ns
    assert run_job(job) == first == Outcome.read(job)
    assert (Path(job.folder) / "completed.json").stat().st_mtime_ns == made


def test_experiments_are_imported_without_fcntl():
    """Windows does not have this module."""
    code = "import sys; sys.modules['fcntl'] = None; import rlxf.experiments.execution"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.faults
def test_modules_of_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rlxf", "numpy", "gymnasium"):
        Path(f"{name}.py").write_text("open('imported', 'w')")
    assert run_job(random_job(tmp_path)).returncode == 0
    assert not Path("imported").exists()


@pytest.mark.thorough
def test_a_failure_has_the_message_of_the_process_and_is_tried_again(tmp_path):
    job = Job(str(tmp_path / "seed-0"), "baseline random", ("--env", "NoSuchTask-v0"))
    failed = run_job(job)
    assert failed.returncode == 2
    assert failed.message.startswith("unknown environment id 'NoSuchTask-v0'")
    assert run_job(job).attempts == 2


@pytest.mark.thorough
def test_a_run_without_checkpoints_starts_again(tmp_path):
    job = random_job(tmp_path)
    Path(job.folder).mkdir(parents=True)
    (Path(job.folder) / "config.json").write_text("{}")
    assert run_job(job).returncode == 0


@pytest.mark.thorough
def test_failures_do_not_end_the_others(tmp_path):
    bad = Job(str(tmp_path / "bad"), "baseline random", ("--env", "NoSuchTask-v0"))
    jobs, outcomes = [bad, random_job(tmp_path, "a"), random_job(tmp_path, "b")], {}
    with local_executor(2) as executor:
        run_jobs(jobs, executor, lambda job, outcome: outcomes.update({job: outcome.returncode}))
    assert [outcomes[job] for job in jobs] == [2, 0, 0]


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_run_is_resumed(tmp_path):
    job = Job(str(tmp_path / "run"), "train gtrxl", (*GTRXL, "--total-timesteps", "3200"), trusted=True)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(run_job, job)
        wait_for(lambda: list(Path(job.folder).glob("checkpoints/*")))
        for pid in training(Path(job.folder)):
            os.kill(pid, signal.SIGKILL)
        assert future.result().returncode == -signal.SIGKILL
    assert not is_complete(job)
    assert job.words[0] == "resume"
    outcome = run_job(job)
    assert (outcome.returncode, outcome.attempts, is_complete(job)) == (0, 2, True)


@pytest.mark.slow
@pytest.mark.faults
def test_an_interrupt_saves_the_progress_and_cancels_the_rest(tmp_path):
    first = Job(str(tmp_path / "first"), "train gtrxl", (*GTRXL, "--total-timesteps", "1e6"), trusted=True)
    second, outcomes = random_job(tmp_path, "second"), {}

    def interrupt() -> None:
        wait_for(lambda: list(Path(first.folder).glob("checkpoints/*")))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), local_executor(1) as executor:
        run_jobs([first, second], executor, lambda job, outcome: outcomes.update({job: outcome}))
    assert outcomes == {}
    assert Outcome.read(first).returncode == 75
    assert not Path(second.folder).exists()
    assert not training(Path(first.folder))


@pytest.mark.faults
def test_an_error_also_stops_the_run_that_starts_at_this_moment(tmp_path):
    first = Job(str(tmp_path / "first"), "baseline random", ("--env", "NoSuchTask-v0"))
    second = Job(str(tmp_path / "second"), "train gtrxl", (*GTRXL, "--total-timesteps", "1e6"), trusted=True)

    def fail(job, outcome) -> None:
        wait_for(lambda: Path(second.folder).exists())
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), local_executor(1) as executor:
        run_jobs([first, second], executor, fail)
    assert Outcome.read(second).returncode != 0
    assert not training(Path(second.folder))


def test_an_interrupt_ends_the_wait_for_the_lock_of_a_run(tmp_path):
    job = random_job(tmp_path)

    def interrupt() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with locked(job.sibling("lock")), pytest.raises(KeyboardInterrupt), local_executor(1) as executor:
        run_jobs([job], executor, lambda job, outcome: None)
    assert not Path(job.folder).exists()
    assert Outcome.read(job) is None


@pytest.mark.faults
def test_the_options_of_a_run_are_recorded_before_it_trains(tmp_path):
    """The caller is killed at once; its process ends, and the run counts as complete, with its time."""
    job = random_job(tmp_path)
    code = f"from rlxf.experiments.execution import *; run_job({job!r})"
    caller = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: training(Path(job.folder)) not in ([], [caller.pid]))
    caller.kill()
    caller.wait()
    begun = Outcome.read(job)
    assert (begun.command, begun.returncode, begun.attempts) == ([job.command, *job.arguments], None, 1)
    wait_for(lambda: is_complete(job))
    outcome = run_job(job)
    assert (outcome.returncode, outcome.attempts) == (0, 1)
    assert outcome.seconds > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_is_stopped_early_and_can_be_resumed(tmp_path):
    job = Job(str(tmp_path / "run"), "train gtrxl", (*GTRXL, "--total-timesteps", "1e6"), trusted=True)
    outcome = run_job(job, lambda: bool(list(Path(job.folder).glob("checkpoints/*"))))
    assert outcome.returncode == 75
    assert not is_complete(job)
    assert job.words[0] == "resume"
    assert not training(Path(job.folder))


@pytest.mark.faults
def test_an_error_in_the_decision_to_stop_ends_the_process(tmp_path):
    def fail() -> bool:
        raise RuntimeError

    job = Job(str(tmp_path / "run"), "train gtrxl", (*GTRXL, "--total-timesteps", "1e6"), trusted=True)
    with pytest.raises(RuntimeError):
        run_job(job, fail)
    assert not training(Path(job.folder))


@pytest.mark.thorough
@pytest.mark.faults
def test_the_process_of_a_dead_caller_keeps_the_lock(tmp_path):
    """A caller is killed while its process trains: nobody else trains in this folder before that one ends."""
    job = Job(str(tmp_path / "run"), "train gtrxl", (*GTRXL, "--total-timesteps", "1e6"), trusted=True)
    code = f"from rlxf.experiments.execution import *; run_job({job!r})"
    caller = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: (Path(job.folder) / "config.json").exists())
    (orphan,) = [pid for pid in training(Path(job.folder)) if pid != caller.pid]
    caller.kill()
    caller.wait()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(run_job, job)
        time.sleep(1)
        assert training(Path(job.folder)) == [orphan]
        os.kill(orphan, signal.SIGKILL)
        wait_for(lambda: [pid for pid in training(Path(job.folder)) if pid != orphan])
        stop_all([future])
        assert future.result().returncode != 0


def test_two_processes_do_not_work_on_one_folder(tmp_path):
    code = (
        "import sys, pathlib, rlxf.experiments.execution as e\n"
        f"with e.only_process(pathlib.Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ExperimentError, match="another process works on"), only_process(tmp_path):
        pass
    other.communicate("")
    with only_process(tmp_path):
        pass


def test_errors_of_an_experiment_are_not_those_of_its_lock(tmp_path):
    with pytest.raises(BlockingIOError, match="from a run"), only_process(tmp_path):
        raise BlockingIOError("from a run")


@pytest.mark.parametrize("suffix", ["lock", "log"])
def test_files_of_a_run_do_not_follow_a_link(tmp_path, suffix):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / f"seed-0.{suffix}").symlink_to(target)
    with pytest.raises(ExperimentError, match=rf"seed-0\.{suffix} is a symbolic link, .*: remove the link"):
        run_job(random_job(tmp_path))
    assert target.read_text() == "mine"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"command": [], "other": 1}'])
def test_a_damaged_outcome_is_named(tmp_path, content):
    job = random_job(tmp_path)
    job.sibling("json").write_text(content)
    with pytest.raises(ExperimentError, match=r"seed-0\.json is damaged: remove it and the folder"):
        Outcome.read(job)


MESSAGE = "Error parsing --core.position: unknown position 'LogBias'; choose RoPE, or T5Bias"
FRAMED = """\
rlxf: an earlier line
╭─ Value error ──────────────────────────────────────╮
│ Error parsing --core.position: unknown position    │
│ 'LogBias'; choose RoPE, or T5Bias                  │
│ ────────────────────────────────────────────────── │
│ Argument helptext:                                 │
│     --core.position NAME                           │
│ ────────────────────────────────────────────────── │
│ For full helptext, see rlxf train gtrxl --help     │
╰────────────────────────────────────────────────────╯
""".encode()
FRAMED_IN_ASCII = b"""\
rlxf: an earlier line
 Value error
 ----------------------------------------------------
  Error parsing --core.position: unknown position
  'LogBias'; choose RoPE, or T5Bias
  --------------------------------------------------
  Argument helptext:
      --core.position NAME
  --------------------------------------------------
  For full helptext, see rlxf train gtrxl --help

"""


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", ""),
        (b"one\nrlxf: two\n\n", "two"),
        (b"\xff\n", "�"),
        (b"x" * 10_000_000, "x" * 500),
        (FRAMED, MESSAGE),
        (
            FRAMED_IN_ASCII,
            "Error parsing --core.position: unknown position 'LogBias'; choose RoPE, or T5Bias",
        ),
        ("rlxf: one\n│ two │\n╰─────╯\n".encode(), "two"),
        ("rlxf: one\n╰─────╯\n".encode(), "one"),
        (b"rlxf: Value error of a task\n-----\n| time | 3 |\n-----\n", "| time | 3 |"),
        (FRAMED + b"step 1\nstep 2\n-----\n", "step 2"),
    ],
    ids=[
        *("empty", "prefix", "binary", "long", "frame", "frame in ASCII", "end of a frame", "frame only"),
        *("table", "lines after a frame"),
    ],
)
def test_the_message_at_the_end_of_a_log(tmp_path, content, line):
    (tmp_path / "log").write_bytes(content)
    assert failure_message(tmp_path / "log") == line


def test_lines_of_earlier_attempts_do_not_count(tmp_path, monkeypatch):
    """A process that ends without a message, e.g. by a signal, leaves the lines of the attempt before."""
    job = random_job(tmp_path)
    job.sibling("log").write_text("saved checkpoint\n")
    monkeypatch.setattr(execution, "_train", lambda *arguments: 3)
    assert run_job(job).failure == "exit status 3"


@pytest.mark.parametrize(
    ("code", "message", "failure"),
    [
        (0, "", ""),
        (2, "no memory", "no memory"),
        (2, "", "exit status 2"),
        (-9, "saved checkpoint", "the training was ended by SIGKILL, e.g. because the memory was exhausted"),
        (-99, "", "the training was ended by signal 99"),
        (None, "", "it has not ended, or the program that started it was killed"),
    ],
)
def test_the_reason_of_a_failure(code, message, failure):
    assert Outcome([], code, message).failure == failure


def test_a_run_without_a_folder_begins_with_the_options_of_the_file(tmp_path):
    job = random_job(tmp_path)
    Outcome(["baseline random", "--n-envs", "1000"], 2, "no memory", 50.0, 1).write(job)
    outcome = run_job(job)
    assert (outcome.command, outcome.attempts) == ([job.command, *job.arguments], 2)
    assert outcome.seconds < 50


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.faults
def test_the_runs_of_a_dead_worker_are_resumed_by_another(tmp_path):
    distributed = pytest.importorskip("distributed")
    options = (*GTRXL, "--total-timesteps", "3200")
    jobs = [Job(str(tmp_path / name), "train gtrxl", options, trusted=True) for name in ("a", "b")]
    outcomes = {}
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
    ) as cluster:
        victim = cluster.workers[0].pid

        def kill() -> None:
            wait_for(lambda: all(list(Path(job.folder).glob("checkpoints/*")) for job in jobs))
            os.kill(victim, signal.SIGKILL)

        threading.Thread(target=kill).start()
        with cluster_executor(cluster.scheduler_address) as executor:
            run_jobs(jobs, executor, lambda job, outcome: outcomes.update({job: outcome.returncode}))
    assert outcomes == dict.fromkeys(jobs, 0)
    sums = [json.loads(Path(job.folder, "completed.json").read_text())["sha256"] for job in jobs]
    assert sums[0] == sums[1]


def test_a_missing_scheduler_is_named():
    pytest.importorskip("distributed")
    message = "there is no dask scheduler at nonsense"
    with pytest.raises(ConnectionError, match=message), cluster_executor("nonsense"):
        pass
