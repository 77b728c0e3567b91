"""Trainings that are killed at random moments and resumed until they are done."""

import math
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlxf
from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import TransformerSpec
from rlxf.envs.trajectories import ReferenceScores
from rlxf.training import CheckpointFolder, Checkpoints, read_archive

EVERY_SECONDS = 0.02
SCALE = ReferenceScores(0.0, 500.0, "the bounds of the task")
MINUTE = 60.0
SMALL_ONLINE = gtrxl(16, width=32, layers=2, heads=2)
SMALL_OFFLINE = decision_transformer(width=32, layers=2, heads=2)


def online(core: TransformerSpec | None = SMALL_ONLINE) -> Any:
    """A GTrXLPPO, before its training; small, or of the usual core."""
    sizes: dict[str, Any] = {"n_steps": 16, "segment_length": 8, "batch_size": 32, "n_epochs": 2}
    return GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=4, core=core, seed=0, device="cpu", **sizes)


def offline(core: TransformerSpec | None = SMALL_OFFLINE) -> Any:
    """A Decision Transformer, before its training, on data of random play that are recorded once."""
    os.environ.setdefault("MINARI_DATASETS_PATH", "datasets")
    root = Path(os.environ["MINARI_DATASETS_PATH"])
    if not (root / "faults").exists():
        rlxf.collect(None, "CartPole-v1", "faults/random-v0", 100, reference_scores=SCALE)
    return DecisionTransformer("faults/random-v0", 5, core=core, batch_size=16, seed=0, device="cpu")


AGENTS: dict[str, tuple[Callable[..., Any], int]] = {
    "GTrXLPPO": (online, 64 * 20),
    "DecisionTransformer": (offline, 150),
}
"""What makes an agent, and its steps."""

CLASSES: dict[str, Any] = {"GTrXLPPO": GTrXLPPO, "DecisionTransformer": DecisionTransformer}
"""What loads it."""
SAVED: dict[str, Callable[[], Any]] = {
    "small GTrXLPPO": online,
    "GTrXLPPO of the usual core": partial(online, None),
    "small DecisionTransformer": offline,
    "DecisionTransformer of the usual core": partial(offline, None),
}
"""Of which it is measured what saving costs."""
SAVES = 10


@dataclass
class Killed:
    """What became of runs.

    Args:
        kills: SIGKILLs that hit a training.
        runs: trainings that went to their end in spite of them.
        equal: those of them with the bits of the one that was left alone.
    """

    kills: int = 0
    runs: int = 0
    equal: int = 0

    def missed(self) -> list[str]:
        """What should not have come of them."""
        return [f"{self.runs - self.equal} of {self.runs} ended with other bits"] * (self.equal < self.runs)


def killed_runs(name: str, kills: int, seed: int, root: Path) -> Killed:
    """Runs of an agent that die again and again, until so many deaths are there."""
    os.environ["MINARI_DATASETS_PATH"] = str(root / "minari")
    chance, found = random.Random(seed), Killed()
    train(name, root / f"{name}-first")  # so that what runs fork from is warm
    start, alone = time.monotonic(), root / f"{name}-alone"
    killed_after(math.inf, partial(train, name, alone))
    length, reference = time.monotonic() - start, alone / "whole.zip"
    while found.kills < kills:
        folder = root / f"{name}-{found.runs}"
        while not finished(folder):
            found.kills += killed_after(chance.uniform(0.1, 0.8) * length, partial(train, name, folder))
        found.runs += 1
        found.equal += same(reference, folder / "whole.zip")
    return found


def train(name: str, folder: Path) -> Path:
    """Train to the end, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # episodes that begin anew would not be the same
        learned(name, CheckpointFolder(folder)).save(folder / "whole.zip")
    return folder / "whole.zip"


def learned(name: str, checkpoints: CheckpointFolder) -> Any:
    """An agent that has taken all steps."""
    make, steps = AGENTS[name]
    newest = checkpoints.newest() if checkpoints.files() else None
    if newest is not None and steps_in(newest) >= steps:  # it died between its last checkpoint and its end
        return CLASSES[name].load(newest, device="cpu")
    return make().learn(steps, Checkpoints(checkpoints, EVERY_SECONDS), resume_from=newest)


def steps_in(checkpoint: Path) -> int:
    """How many steps a file of a training has behind it."""
    return int(read_archive(checkpoint).documents["agent"]["progress"]["num_timesteps"])


def finished(folder: Path) -> bool:
    """Whether the run has come to its end."""
    return (folder / "whole.zip").exists()


def killed_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Do it in a process that is killed then; whether a SIGKILL ended it, which may be its own.

    Raises:
        RuntimeError: if it ended by an error of its own.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = ended(child, seconds)
    if end is None:
        os.kill(child, signal.SIGKILL)
        end = os.waitpid(child, 0)[1]
    if os.WIFEXITED(end) and os.WEXITSTATUS(end):
        raise RuntimeError("a run ended by an error, see above")
    return os.WIFSIGNALED(end)


def ended(child: int, seconds: float) -> int | None:
    """The status of a process that ends within so many seconds; None if it goes on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            return status
        time.sleep(0.002)
    return None


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same weights and optimiser, to the bit."""
    a, b = (read_archive(file).tensors for file in (one, other))
    groups = ("policy", "optimizer")
    return all(torch.equal(a[group][name], b[group][name]) for group in groups for name in a[group])


def cost_of_saving(make: Callable[[], Any], folder: Path) -> tuple[float, float]:
    """Seconds that a checkpoint keeps a training from going on, and their share of a minute.

    That is the copy; what the thread behind it takes of the processor is counted, too, as if it had to wait.
    """
    saving = Checkpoints(CheckpointFolder(folder), every_seconds=0.0)
    seconds: list[float] = []

    def timed(save: Callable[[], None] = saving.save) -> None:
        start = time.process_time()
        save()
        saving._writer.wait()
        seconds.append(time.process_time() - start)

    saving.save = timed  # type: ignore[method-assign]
    agent = make()
    agent.learn(SAVES * (agent.n_steps * agent.n_envs if isinstance(agent, GTrXLPPO) else 1), saving)
    mean = sum(seconds) / len(seconds)
    return mean, mean / MINUTE
