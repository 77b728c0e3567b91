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
from rlxf.training import read_archive
from rlxf.training.joining import here
from tests.cli.running import TASK, TINY
from tests.cli.test_resume import rows, scalars
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

ONLINE = [
    "train",
    "gtrxl",
    *TASK,
    *TINY,
    "--total-timesteps",
    "128",
    "--n-epochs",
    "1",
    "--checkpoint-seconds",
    "0",
]
OFFLINE = shlex.split(
    f"train dt --dataset {ID} --updates 6 --log-interval 2 --episodes 3 --context-length 4 --batch-size 4"
    " --evaluate-every 3 --checkpoint-seconds 0 --no-progress-bar --core.width 8 --core.layers 1"
)
AGENTS = {"GTrXL": (GTrXLPPO, ONLINE), "Decision Transformer": (DecisionTransformer, OFFLINE)}


@pytest.fixture(autouse=True)
def data(minari_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_cartpole()


def run(count, *words):
    return on_ranks(count, lambda: main([*words, "--no-progress-bar"]))


def weights(run):
    return read_archive(Path(run) / "checkpoint.zip").tensors["policy"]


def largest_difference(one, other):
    one, other = weights(one), weights(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def at_update(monkeypatch, agent, number, what):
    """Something happens in the last process before an update."""
    train = agent.train

    def watched(self, *args):
        if self._n_updates >= number and here().rank == here().count - 1:
            what()
        train(self, *args)

    monkeypatch.setattr(agent, "train", watched)


@pytest.mark.parametrize(("agent", "words"), AGENTS.values(), ids=AGENTS)
def test_one_of_them_writes_what_one_process_would(agent, words, capfd):
    main([*words, "--run", "one"])
    capfd.readouterr()
    assert run(2, *words, "--run", "two") == [None, None]
    said = capfd.readouterr()
    assert said.out.count("checkpoint: two") == 1
    assert "rlxf:" not in said.err
    assert (Path("one") / "config.json").read_bytes() == (Path("two") / "config.json").read_bytes()
    first, second = rows(Path("one")), rows(Path("two"))
    assert [row["time/total_timesteps"] for row in first] == [row["time/total_timesteps"] for row in second]
    name = "train/loss"
    losses = [[float(row[name]) for row in lines if name in row] for lines in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-3)
    assert scalars("one").keys() == scalars("two").keys()


@pytest.mark.parametrize(("agent", "words"), AGENTS.values(), ids=AGENTS)
def test_a_signal_to_one_stops_all_and_two_go_on_to_the_same_bits(agent, words, capfd, monkeypatch):
    assert run(2, *words, "--run", "whole") == [None, None]
    with monkeypatch.context() as patch:
        at_update(patch, agent, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run(2, *words, "--run", "cut") == ["SystemExit: 75"] * 2
    said = capfd.readouterr().err
    assert said.count("stopped by SIGTERM; go on with: rlxf resume cut") == 1
    assert run(2, "resume", "cut") == [None, None]
    assert largest_difference("whole", "cut") == 0
    assert scalars("whole") == scalars("cut")


@pytest.mark.faults
def test_where_one_is_killed_the_other_says_so_and_one_process_goes_on(capfd, monkeypatch):
    with monkeypatch.context() as patch:
        at_update(patch, GTrXLPPO, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert run(2, *ONLINE, "--run", "cut") == ["SystemExit: 2", None]
    said = capfd.readouterr().err
    assert "the run in cut broke off: another of the 2 processes is gone" in said
    assert "go on with: rlxf resume cut" in said
    main(["resume", "cut", "--no-progress-bar"])
    assert GTrXLPPO.load("cut/checkpoint.zip").num_timesteps == 128


def test_what_torchrun_starts_anew_goes_on_from_its_checkpoint(monkeypatch):
    main([*ONLINE, "--run", "whole"])
    with monkeypatch.context() as patch:
        at_update(patch, GTrXLPPO, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            main([*ONLINE, "--run", "cut"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    main([*ONLINE, "--run", "cut"])
    assert largest_difference("whole", "cut") == 0


def test_what_cannot_be_shared_is_told_before_a_folder_is_made(capfd):
    assert run(2, *ONLINE, "--n-envs", "3", "--run", "odd") == ["SystemExit: 2"] * 2
    assert "n_envs is 3 over all, and cannot be divided among 2 processes" in capfd.readouterr().err
    assert not Path("odd").exists()


def torchrun(*words):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "rlxf"]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([*start, *words], **quiet)


def wait_for_checkpoints():
    for _ in range(1200):
        if len(list(Path("cut").glob("checkpoints/*.zip"))) > 2:
            return
        time.sleep(0.05)
    raise AssertionError("nothing happens")


@pytest.mark.slow
@pytest.mark.faults
def test_torchrun_ends_within_a_minute_of_a_kill():
    job = torchrun(*ONLINE, "--total-timesteps", "100000", "--run", "cut")
    wait_for_checkpoints()
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, said = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "rlxf: the run in cut broke off: another of the 2 processes is gone" in said
    assert "Signal 9 (SIGKILL) received" in said


@pytest.mark.slow
@pytest.mark.faults
def test_what_torchrun_was_told_to_stop_it_goes_on_with_to_the_same_bits():
    words = [*ONLINE, "--total-timesteps", "480"]
    assert run(2, *words, "--run", "whole") == [None, None]
    job = torchrun(*words, "--run", "cut")
    wait_for_checkpoints()
    job.send_signal(signal.SIGTERM)
    assert "rlxf: stopped by SIGTERM; go on with: rlxf resume cut" in job.communicate(timeout=60)[1]
    again = torchrun("resume", "cut", "--no-progress-bar")
    again.communicate(timeout=120)
    assert again.returncode == 0
    assert (Path("whole") / "checkpoint.zip").read_bytes() == (Path("cut") / "checkpoint.zip").read_bytes()
