"""Fault injection for training: runs are killed at random moments and resumed until they are complete."""

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
from rlxf import BehaviorCloning, DecisionTransformer, GTrXLPPO, ReturnConditionedMLP
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import TransformerSpec
from rlxf.data import ReferenceScores
from rlxf.training import CheckpointFolder, CheckpointWriter, read_archive

EVERY_SECONDS = 0.02
SCALE = ReferenceScores(0.0, 500.0, "the bounds of the task")
MINUTE = 60.0
SMALL_ONLINE = gtrxl(16, width=32, layers=2, heads=2)
SMALL_OFFLINE = decision_transformer(width=32, layers=2, heads=2)


def online(core: TransformerSpec | None = SMALL_ONLINE) -> Any:
    """Build an untrained GTrXLPPO, small or with the default core."""
    sizes: dict[str, Any] = {"n_steps": 16, "segment_length": 8, "batch_size": 32, "n_epochs": 2}
    return GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=4, core=core, seed=0, device="cpu", **sizes)


def dataset() -> str:
    """Return the id of random episodes, which are recorded once."""
    os.environ.setdefault("MINARI_DATASETS_PATH", "datasets")
    root = Path(os.environ["MINARI_DATASETS_PATH"])
    if not (root / "faults").exists():
        rlxf.collect(None, "CartPole-v1", "faults/random-v0", 100, reference_scores=SCALE)
    return "faults/random-v0"


def offline(core: TransformerSpec | None = SMALL_OFFLINE) -> Any:
    """Build an untrained Decision Transformer on random episodes."""
    return DecisionTransformer(dataset(), 5, core=core, batch_size=16, seed=0, device="cpu")


def cloning() -> Any:
    """Build an untrained behavior cloning of the best episodes, with a history and dropout."""
    return BehaviorCloning(dataset(), 0.5, 3, (16, 16), 0.2, batch_size=16, seed=0, device="cpu")


def conditioned_cloning() -> Any:
    """Build an untrained return-conditioned perceptron with dropout."""
    return ReturnConditionedMLP(dataset(), 1, (16, 16), 0.2, batch_size=16, seed=0, device="cpu")


AGENTS: dict[str, tuple[Callable[..., Any], int]] = {
    "GTrXLPPO": (online, 64 * 20),
    "DecisionTransformer": (offline, 150),
    "BehaviorCloning": (cloning, 400),
    "ReturnConditionedMLP": (conditioned_cloning, 400),
}
"""Builder and number of training steps of each agent."""

CLASSES: dict[str, Any] = {
    "GTrXLPPO": GTrXLPPO,
    "DecisionTransformer": DecisionTransformer,
    "BehaviorCloning": BehaviorCloning,
    "ReturnConditionedMLP": ReturnConditionedMLP,
}
"""Class of each agent."""
SAVED: dict[str, Callable[[], Any]] = {
    "small GTrXLPPO": online,
    "GTrXLPPO with default core": partial(online, None),
    "small DecisionTransformer": offline,
    "DecisionTransformer with default core": partial(offline, None),
    "small BehaviorCloning": cloning,
    "small ReturnConditionedMLP": conditioned_cloning,
}
"""Agents for the measurement of saving costs."""
SAVES = 10


@dataclass
class KilledRuns:
    """Outcomes of killed runs.

    Args:
        kills: SIGKILLs that ended a run.
        runs: runs that were resumed until they were complete.
        equal: runs with a result equal to the bit to that of an uninterrupted run.
    """

    kills: int = 0
    runs: int = 0
    equal: int = 0

    def missed(self) -> list[str]:
        """Return the violated expectations."""
        return [f"{self.runs - self.equal} of {self.runs} had other results"] * (self.equal < self.runs)


def killed_runs(name: str, kills: int, seed: int, root: Path) -> KilledRuns:
    """Kill and resume runs of an agent until there are ``kills`` SIGKILLs."""
    os.environ["MINARI_DATASETS_PATH"] = str(root / "minari")
    rng, outcomes = random.Random(seed), KilledRuns()
    train(name, root / f"{name}-first")  # load everything before processes are forked
    start, uninterrupted = time.monotonic(), root / f"{name}-alone"
    killed_after(math.inf, partial(train, name, uninterrupted))
    length, reference = time.monotonic() - start, uninterrupted / "whole.zip"
    while outcomes.kills < kills:
        folder = root / f"{name}-{outcomes.runs}"
        while not finished(folder):
            outcomes.kills += killed_after(rng.uniform(0.1, 0.8) * length, partial(train, name, folder))
        outcomes.runs += 1
        outcomes.equal += same(reference, folder / "whole.zip")
    return outcomes


def train(name: str, folder: Path) -> Path:
    """Train to the end, from the newest checkpoint if one exists, and save the agent."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning means that episodes cannot be resumed exactly
        learned(name, CheckpointFolder(folder)).save(folder / "whole.zip")
    return folder / "whole.zip"


def learned(name: str, checkpoints: CheckpointFolder) -> Any:
    """Return an agent after all of its training steps."""
    make, steps = AGENTS[name]
    newest = checkpoints.newest() if checkpoints.files() else None
    if newest is not None and steps_in(newest) >= steps:  # killed after its last checkpoint
        return CLASSES[name].load(newest, device="cpu")
    return make().learn(steps, CheckpointWriter(checkpoints, EVERY_SECONDS), resume_from=newest)


def steps_in(checkpoint: Path) -> int:
    """Return the number of training steps of a checkpoint."""
    return int(read_archive(checkpoint).documents["agent"]["progress"]["num_timesteps"])


def finished(folder: Path) -> bool:
    """Return whether a run is complete."""
    return (folder / "whole.zip").exists()


def killed_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a forked process, kill the process after ``seconds``, and return whether it was killed.

    The process may also kill itself.

    Raises:
        RuntimeError: if the process failed with an error.
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
        raise RuntimeError("a run failed, see its error above")
    return os.WIFSIGNALED(end)


def ended(child: int, seconds: float) -> int | None:
    """Return the status of a process that ends within ``seconds``, or None if it is still running."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    return None


def same(one: Path, other: Path) -> bool:
    """Return whether two checkpoints have bit-equal weights and optimizer states."""
    a, b = (read_archive(file).tensors for file in (one, other))
    groups = ("policy", "optimizer")
    return all(torch.equal(a[group][name], b[group][name]) for group in groups for name in a[group])


def cost_of_saving(make: Callable[[], Any], folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of saving a checkpoint, and their share of a minute.

    The CPU time of the background thread counts as if training waited for it.
    """
    saving = CheckpointWriter(CheckpointFolder(folder), every_seconds=0.0)
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
