"""Tests of runs with several processes: only one writes, all exit together, any number can resume."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.cli import main
from rlxf.training import CheckpointFolder, read_archive
from rlxf.training.distributed import process_group
from tests.cli.running import TASK, TINY
from tests.cli.test_resume import rows, scalars
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

ROLLOUT = 32
ONLINE = shlex.split(
    "train gtrxl --total-timesteps 96 --n-epochs 1 --episodes 2 --checkpoint-seconds 0"
    " --evaluate-every 32 --evaluation-episodes 2"
)
ONLINE = [*ONLINE[:2], *TASK, *TINY, *ONLINE[2:]]
OFFLINE = shlex.split(
    f"train dt --dataset {ID} --updates 4 --log-interval 2 --episodes 2 --context-length 4 --batch-size 4"
    " --evaluate-every 2 --checkpoint-seconds 0 --core.width 8 --core.layers 1"
)
ROBUST = shlex.split("--weight-averaging 0.8 --validation-fraction 0.3 --sampling uniform-episodes")
AGENTS = {
    "GTrXL": (GTrXLPPO, ONLINE, 2 * ROLLOUT),
    "Decision Transformer": (DecisionTransformer, OFFLINE, 1),
    "averaged Decision Transformer": (DecisionTransformer, [*OFFLINE, *ROBUST], 3),
}
"""Agent class, words of the command, and the step after which the training is interrupted."""
JOB = "TORCHELASTIC_RUN_ID"


@pytest.fixture(scope="module", autouse=True)
def _empty_working_directory(tmp_path_factory):
    """Folder for the runs of all tests of this module, with a dataset; it replaces that of each test."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        patch.setenv("RLXF_CACHE", str(folder / "cache"))
        (folder / "minari").mkdir()
        record_cartpole()
        yield


@pytest.fixture(scope="module", params=AGENTS)
def whole(request):
    """Uninterrupted run of two processes, next to a run of one process.

    The run of one process is first, so that its imports are available in the forked processes.
    """
    name, words = f"whole {request.param}", AGENTS[request.param][1]
    main([*words, "--run", f"one of {name}", "--no-progress-bar"])
    assert run(2, *words, "--run", name) == [None, None]
    return name, *AGENTS[request.param]


def run(count, *words):
    return on_ranks(count, lambda: main([*words, "--no-progress-bar"]))


def weights(run):
    return read_archive(Path(run) / "checkpoint.zip").tensors["policy"]


def largest_difference(one, other):
    one, other = weights(one), weights(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def at_step(monkeypatch, agent, step, action):
    """Call ``action`` in the last process before the first update after this step."""
    train = agent.train

    def watched(self, *args):
        if self.num_timesteps >= step and process_group().rank == process_group().world_size - 1:
            action()
        train(self, *args)

    monkeypatch.setattr(agent, "train", watched)


def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.first_cases(1)
def test_two_processes_write_the_same_files_as_one(whole):
    two, one = whole[0], f"one of {whole[0]}"
    assert (Path(one) / "config.json").read_bytes() == (Path(two) / "config.json").read_bytes()
    first, second = rows(Path(one)), rows(Path(two))
    assert [row["time/total_timesteps"] for row in first] == [row["time/total_timesteps"] for row in second]
    name = "train/loss"
    losses = [[float(row[name]) for row in lines if name in row] for lines in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-3)
    assert scalars(one).keys() == scalars(two).keys()


@pytest.mark.first_cases(1)
def test_a_signal_to_one_process_stops_all_and_resuming_is_exact(whole, capfd, monkeypatch):
    straight, agent, words, step = whole
    cut = f"cut of {straight}"
    with monkeypatch.context() as patch:
        at_step(patch, agent, step, interrupt)
        assert run(2, *words, "--run", cut) == ["SystemExit: 75"] * 2
    assert (
        capfd.readouterr().err.count(f"stopped by SIGTERM; resume with: rlxf resume {shlex.quote(cut)}") == 1
    )
    assert run(2, "resume", cut) == [None, None]
    captured = capfd.readouterr()
    assert captured.out.count(f"checkpoint: {cut}") == 1
    assert "rlxf:" not in captured.err
    assert largest_difference(straight, cut) == 0
    assert scalars(straight) == scalars(cut)


@pytest.mark.faults
def test_a_restart_by_torchrun_resumes_with_another_number_of_processes(capfd, monkeypatch):
    monkeypatch.setenv(JOB, "this")
    with monkeypatch.context() as patch:
        at_step(patch, GTrXLPPO, 2 * ROLLOUT, die)
        assert run(2, *ONLINE, "--run", "killed") == ["SystemExit: 2", None]
    errors = capfd.readouterr().err
    assert "the run in killed failed: another of the 2 processes ended or did not respond" in errors
    assert "resume with: rlxf resume killed" in errors
    updates = []
    at_step(monkeypatch, GTrXLPPO, 0, lambda: updates.append("an update"))
    assert on_ranks(1, lambda: [main([*ONLINE, "--run", "killed"]), *updates]) == [[None] + 2 * ["an update"]]
    assert GTrXLPPO.load("killed/checkpoint.zip").num_timesteps == 3 * ROLLOUT


@pytest.mark.thorough
@pytest.mark.faults
@pytest.mark.parametrize("whole", ["GTrXL"], indirect=True)
def test_a_restart_without_checkpoints_starts_over_and_keeps_runs_of_other_jobs(whole, capfd, monkeypatch):
    unsaved = ["--checkpoint-seconds", "99", "--evaluate-every", "0"]  # evaluations would need a checkpoint
    words = [*ONLINE, *unsaved, "--run", "restarted"]
    monkeypatch.setenv(JOB, "this")
    with monkeypatch.context() as patch:
        at_step(patch, GTrXLPPO, 2 * ROLLOUT, die)
        assert run(2, *words) == ["SystemExit: 2", None]
    log, weights = rows(Path("restarted")), Path("restarted/checkpoint.zip").read_bytes()
    for other in ({JOB: "other"}, {JOB: "this", "AGENT": "other"}):
        with monkeypatch.context() as patch:
            set_job(patch, other)
            assert run(2, *words) == ["SystemExit: 2"] * 2
    assert capfd.readouterr().err.count("restarted exists; choose another folder") == 4
    assert rows(Path("restarted")) == log
    assert run(2, *words) == [None, None]
    assert largest_difference(whole[0], "restarted") == 0
    assert Path("restarted-before-1/checkpoint.zip").read_bytes() == weights


def set_job(monkeypatch, job):
    """Set the id of the torchrun job, and optionally its agent."""
    monkeypatch.setenv(JOB, job[JOB])
    if "AGENT" in job:
        monkeypatch.setattr("rlxf.cli.torchrun_job._agent", lambda: job["AGENT"])


def test_environments_must_be_divisible_among_processes(capfd):
    assert run(2, *ONLINE, "--n-envs", "3", "--run", "odd") == ["SystemExit: 2"] * 2
    assert "n_envs is 3 in total, which is not divisible by the 2 processes" in capfd.readouterr().err
    assert not Path("odd").exists()


def torchrun(*words):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([*start, "-m", "--", "rlxf", *words], **quiet)


def wait_for_checkpoint(run, after=0):
    """Wait for a checkpoint after this step, and return its step."""
    for _ in range(1200):
        files = CheckpointFolder(Path(run, "checkpoints")).files()
        if files and (step := int(files[-1].stem[-12:])) > after:
            return step
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint after step {after}")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.faults
def test_a_run_restarted_by_torchrun_equals_an_uninterrupted_run(monkeypatch):
    words = [*ONLINE, "--total-timesteps", "100000", "--run"]
    job = torchrun(*words, "cut")
    step = wait_for_checkpoint("cut")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    wait_for_checkpoint("cut", step + 2 * ROLLOUT)
    job.send_signal(signal.SIGTERM)
    errors = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    assert "rlxf: the run in cut failed: another of the 2 processes ended or did not respond" in errors
    assert "rlxf: stopped by SIGTERM; resume with: rlxf resume cut" in errors
    newest = CheckpointFolder(Path("cut/checkpoints")).files()[-1]
    at_step(monkeypatch, GTrXLPPO, int(newest.stem[-12:]), interrupt)
    assert run(2, *words, "straight") == ["SystemExit: 75"] * 2
    assert largest_difference("straight", "cut") == 0
