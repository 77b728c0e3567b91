"""CleanRL's ppo_trxl.py, unchanged, in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.light_task import EPISODE_STEPS
from benchmarks.shapes import Shape
from benchmarks.throughput import rates

PACKAGES = ("gymnasium<0.30", "memory-gym>=1.0.2,<2", "minigrid>=2.3.1,<3", "numpy<2", "einops>=0.7,<0.8")
"""What the script imports besides torch, as it pins them; its tyro and tensorboard are ours."""

PYTHON = shutil.which("python3.11") or sys.executable
"""Its old packages have no wheels for Python after 3.12."""

PROGRESS = re.compile(r"^\s*\d+ SPS=")


@dataclass(frozen=True)
class CleanRLRun:
    """What a run of the script showed.

    Args:
        rates: environment steps per second of each iteration after the first.
        peak_bytes: most memory that the process held at a time.
    """

    rates: list[float]
    peak_bytes: int


def run(checkout: Path, venv: Path, shape: Shape, iterations: int) -> CleanRLRun:
    """Train for ``1 + iterations`` iterations on `light_task` and time them by the lines it prints.

    The transformer is the script's default. Threads are torch's number here.

    Raises:
        FileNotFoundError: if the checkout has no ppo_trxl.py.
        RuntimeError: if the script fails; its last output is in the message.
    """
    script = checkout / "cleanrl" / "ppo_trxl" / "ppo_trxl.py"
    if not script.is_file():
        raise FileNotFoundError(f"no {script}: --cleanrl takes a checkout of github.com/vwxyzjn/cleanrl")
    install(venv)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(venv / "bin" / "python"), str(script.resolve()), *arguments(shape, iterations)]
        return timed(command, Path(folder), shape.envs * shape.steps)


def install(venv: Path) -> None:
    """Make the environment unless it is there: this program's torch, and the script's packages."""
    ready = venv / "ready"
    wanted = " ".join([f"torch=={torch.__version__.split('+')[0]}", "tyro", "tensorboard", *PACKAGES])
    if ready.is_file() and ready.read_text() == wanted:
        return
    subprocess.run([PYTHON, "-m", "venv", "--clear", venv], check=True)
    subprocess.run([venv / "bin" / "pip", "install", "--quiet", *wanted.split()], check=True)
    ready.write_text(wanted)


def arguments(shape: Shape, iterations: int) -> list[str]:
    """Command line of the script for ``1 + iterations`` iterations."""
    batch = shape.envs * shape.steps
    options = {
        "env-id": "light_task:LightTask-v0",
        "trxl-num-layers": shape.layers,
        "trxl-num-heads": shape.heads,
        "trxl-dim": shape.width,
        "trxl-memory-length": shape.memory,
        "num-envs": shape.envs,
        "num-steps": shape.steps,
        "num-minibatches": batch // shape.minibatch,
        "update-epochs": shape.epochs,
        "total-timesteps": batch * (1 + iterations),
    }
    return ["--no-cuda", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def timed(command: list[str], folder: Path, steps: int) -> CleanRLRun:
    """Run the command; an iteration of ``steps`` lies between two of its progress lines."""
    process = subprocess.Popen(
        command, cwd=folder, env=surroundings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = [(time.perf_counter(), line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    times = [when for when, line in lines if PROGRESS.match(line)]
    if process.returncode or len(times) < 2:
        output = "".join(line for _, line in lines[-20:])
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{output}")
    return CleanRLRun(rates(times, steps), usage.ru_maxrss * 1024)


def surroundings() -> dict[str, str]:
    """Environment variables: the light task on the path, as many threads, no screen, lines as they come."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "SDL_VIDEODRIVER": "dummy",
    }


def stored_bytes(shape: Shape, steps: int) -> int:
    r"""Bytes that the script keeps of a rollout of S steps to learn from.

    With E environments, L layers, width C, window M, episodes of at most P steps (and here exactly):

        ``4 P L C (E + E ceil(S / P))``  memories in use, and a copy of the memory of every episode begun
        ``+ S E (8 + 1) M``              indices (int64) and mask (bool) of every step's window
        ``+ S E (4 x 4 + 4 x 4 + 8 + 8)``  observation, reward, done, log-probability, value, action, episode.
    """
    E, M, P = shape.envs, shape.memory, EPISODE_STEPS
    memory = 4 * P * shape.layers * shape.width
    episodes = E * -(-steps // P)
    return memory * (E + episodes) + steps * E * (9 * M + 48)


def gathered_bytes(shape: Shape) -> int:
    r"""Bytes of the memories that the script copies together for one minibatch of B steps.

    ``4 B L C (P + 2 M)``: the whole episode's memory for every step, its window out of it, and the
    window with positions added. What autograd keeps beyond that is not counted.
    """
    return 4 * shape.minibatch * shape.layers * shape.width * (EPISODE_STEPS + 2 * shape.memory)
