"""One run of several processes: one writes, all leave together, and any number of them goes on."""

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
from rlxf.training.joining import here
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
AGENTS = {"GTrXL": (GTrXLPPO, ONLINE, 2 * ROLLOUT), "Decision Transformer": (DecisionTransformer, OFFLINE, 1)}
"""What learns, how it is told to, and behind how many steps something happens to it."""
JOB = "TORCHELASTIC_RUN_ID"


@pytest.fixture(scope="module", autouse=True)
def _in_an_empty_folder(tmp_path_factory):
    """One for the runs of all tests here, with data."""
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
    """A run of two processes that nothing happens to, and beside it one of one process.

    That comes first: what is imported then is there in all that are forked.
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


def at_step(monkeypatch, agent, step, what):
    """Something happens in the last process before the update behind a step."""
    train = agent.train

    def watched(self, *args):
        if self.num_timesteps >= step and here().rank == here().count - 1:
            what()
        train(self, *args)

    monkeypatch.setattr(agent, "train", watched)


def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_of_them_writes_what_one_process_would(whole):
    two, one = whole[0], f"one of {whole[0]}"
    assert (Path(one) / "config.json").read_bytes() == (Path(two) / "config.json").read_bytes()
    first, second = rows(Path(one)), rows(Path(two))
    assert [row["time/total_timesteps"] for row in first] == [row["time/total_timesteps"] for row in second]
    name = "train/loss"
    losses = [[float(row[name]) for row in lines if name in row] for lines in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-3)
    assert scalars(one).keys() == scalars(two).keys()


def test_a_signal_to_one_stops_all_and_two_go_on_to_the_same_bits(whole, capfd, monkeypatch):
    straight, agent, words, step = whole
    cut = f"cut of {straight}"
    with monkeypatch.context() as patch:
        at_step(patch, agent, step, interrupt)
        assert run(2, *words, "--run", cut) == ["SystemExit: 75"] * 2
    assert capfd.readouterr().err.count(f"stopped by SIGTERM; go on with: rlxf resume {cut}") == 1
    assert run(2, "resume", cut) == [None, None]
    said = capfd.readouterr()
    assert said.out.count(f"checkpoint: {cut}") == 1
    assert "rlxf:" not in said.err
    assert largest_difference(straight, cut) == 0
    assert scalars(straight) == scalars(cut)


@pytest.mark.faults
def test_what_torchrun_starts_anew_goes_on_in_another_number_where_one_was_killed(capfd, monkeypatch):
    monkeypatch.setenv(JOB, "this")
    with monkeypatch.context() as patch:
        at_step(patch, GTrXLPPO, 2 * ROLLOUT, die)
        assert run(2, *ONLINE, "--run", "killed") == ["SystemExit: 2", None]
    said = capfd.readouterr().err
    assert "the run in killed broke off: another of the 2 processes ended or did not respond" in said
    assert "go on with: rlxf resume killed" in said
    learned = []
    at_step(monkeypatch, GTrXLPPO, 0, lambda: learned.append("an update"))
    assert on_ranks(1, lambda: [main([*ONLINE, "--run", "killed"]), *learned]) == [[None] + 2 * ["an update"]]
    assert GTrXLPPO.load("killed/checkpoint.zip").num_timesteps == 3 * ROLLOUT


@pytest.mark.faults
@pytest.mark.parametrize("whole", ["GTrXL"], indirect=True)
def test_without_a_checkpoint_it_begins_anew_and_leaves_runs_of_others(whole, capfd, monkeypatch):
    words = [*ONLINE, "--checkpoint-seconds", "99", "--run", "begun"]
    monkeypatch.setenv(JOB, "this")
    with monkeypatch.context() as patch:
        at_step(patch, GTrXLPPO, 2 * ROLLOUT, die)
        assert run(2, *words) == ["SystemExit: 2", None]
    left, weights = rows(Path("begun")), Path("begun/checkpoint.zip").read_bytes()
    for other in ({JOB: "other"}, {JOB: "this", "AGENT": "other"}):
        with monkeypatch.context() as patch:
            pretend(patch, other)
            assert run(2, *words) == ["SystemExit: 2"] * 2
    assert capfd.readouterr().err.count("begun exists; choose another folder") == 4
    assert rows(Path("begun")) == left
    assert run(2, *words) == [None, None]
    assert largest_difference(whole[0], "begun") == 0
    assert Path("begun-before-1/checkpoint.zip").read_bytes() == weights


def pretend(monkeypatch, job):
    """To be started by another job of torchrun, or by another agent of one with the same id."""
    monkeypatch.setenv(JOB, job[JOB])
    if "AGENT" in job:
        monkeypatch.setattr("rlxf.cli.job._agent", lambda: job["AGENT"])


def test_what_cannot_be_shared_is_told_before_a_folder_is_made(capfd):
    assert run(2, *ONLINE, "--n-envs", "3", "--run", "odd") == ["SystemExit: 2"] * 2
    assert "n_envs is 3 in total, which is not divisible by the 2 processes" in capfd.readouterr().err
    assert not Path("odd").exists()


def torchrun(*words):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([*start, "-m", "--", "rlxf", *words], **quiet)


def wait_for_checkpoint(run, behind=0):
    """The step of the newest one, once it is this far."""
    for _ in range(1200):
        files = CheckpointFolder(Path(run, "checkpoints")).files()
        if files and (step := int(files[-1].stem[-12:])) > behind:
            return step
        time.sleep(0.05)
    raise AssertionError("nothing happens")


@pytest.mark.slow
@pytest.mark.faults
def test_torchrun_starts_anew_what_was_killed_and_stops_with_the_bits_of_a_run_that_was_not(monkeypatch):
    words = [*ONLINE, "--total-timesteps", "100000", "--run"]
    job = torchrun(*words, "cut")
    behind = wait_for_checkpoint("cut")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    wait_for_checkpoint("cut", behind + 2 * ROLLOUT)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    assert "rlxf: the run in cut broke off: another of the 2 processes ended or did not respond" in said
    assert "rlxf: stopped by SIGTERM; go on with: rlxf resume cut" in said
    newest = CheckpointFolder(Path("cut/checkpoints")).files()[-1]
    at_step(monkeypatch, GTrXLPPO, int(newest.stem[-12:]), interrupt)
    assert run(2, *words, "straight") == ["SystemExit: 75"] * 2
    assert largest_difference("straight", "cut") == 0
