"""Runs of CleanRL's unmodified ppo_trxl.py in a separate virtual environment."""

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
from benchmarks.machine import is_cuda
from benchmarks.shapes import Shape
from benchmarks.throughput import rates

PACKAGES = ("gymnasium<0.30", "memory-gym>=1.0.2,<2", "minigrid>=2.3.1,<3", "numpy<2", "einops>=0.7,<0.8")
"""Pinned packages of the script, in addition to torch; tyro and tensorboard have our versions."""

PYTHON = shutil.which("python3.11") or sys.executable
"""Python interpreter; the pinned packages have no wheels for Python after 3.12."""

PROGRESS = re.compile(r"^\s*\d+ SPS=")


@dataclass(frozen=True)
class CleanRLRun:
    """Result of a run of the script.

    Args:
        rates: environment steps per second of each iteration after the first.
        peak_bytes: peak memory of the process.
    """

    rates: list[float]
    peak_bytes: int


def run(checkout: Path, venv: Path, shape: Shape, iterations: int, device: str = "cpu") -> CleanRLRun:
    """Train for ``1 + iterations`` iterations on `light_task`, timed by the printed progress lines.

    The transformer is the script's default. The number of threads is that of torch in this process. Before
    each line the script reads the losses, so a GPU has done its work.

    Raises:
        FileNotFoundError: if the checkout has no ppo_trxl.py.
        RuntimeError: if the script fails; the message contains its last output.
    """
    script = checkout / "cleanrl" / "ppo_trxl" / "ppo_trxl.py"
    if not script.is_file():
        raise FileNotFoundError(f"{script} does not exist; --cleanrl must be a checkout of vwxyzjn/cleanrl")
    install(venv)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(venv / "bin" / "python"), str(script.resolve()), *arguments(shape, iterations, device)]
        return timed(command, Path(folder), shape.envs * shape.steps)


def install(venv: Path) -> None:
    """Create the virtual environment unless its file ``ready`` contains `requirements`."""
    ready = venv / "ready"
    if ready.is_file() and ready.read_text() == requirements():
        return
    subprocess.run([PYTHON, "-m", "venv", "--clear", venv], check=True)
    subprocess.run([venv / "bin" / "pip", "install", "--quiet", *requirements().split()], check=True)
    ready.write_text(requirements())


def requirements() -> str:
    """Return the packages of the virtual environment: our version of torch and the pinned packages."""
    return " ".join([f"torch=={torch.__version__.split('+')[0]}", "tyro", "tensorboard", *PACKAGES])


def arguments(shape: Shape, iterations: int, device: str = "cpu") -> list[str]:
    """Return the command-line arguments of the script for ``1 + iterations`` iterations on a device."""
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
    chosen = "--cuda" if is_cuda(device) else "--no-cuda"
    return [chosen, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def timed(command: list[str], folder: Path, steps: int) -> CleanRLRun:
    """Run the command; the time between two progress lines is an iteration of ``steps`` steps."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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


def environment_variables() -> dict[str, str]:
    """Return environment variables: module path, number of threads, no display, unbuffered output."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "SDL_VIDEODRIVER": "dummy",
    }


def stored_bytes(shape: Shape, steps: int) -> int:
    r"""Return the bytes of the script's storage of a rollout of S steps.

    With E environments, L layers, width C, window M, episodes of at most P steps (and here exactly):

        ``4 P L C (E + E ceil(S / P))``  current memories, and a copy of the memory of each started episode
        ``+ S E (8 + 1) M``              indices (int64) and mask (bool) of every step's window
        ``+ S E (4 x 4 + 4 x 4 + 8 + 8)``  observation, reward, done, log-probability, value, action, episode.
    """
    E, M, P = shape.envs, shape.memory, EPISODE_STEPS
    memory = 4 * P * shape.layers * shape.width
    episodes = E * -(-steps // P)
    return memory * (E + episodes) + steps * E * (9 * M + 48)


def gathered_bytes(shape: Shape) -> int:
    r"""Return the bytes of memories that the script gathers for one minibatch of B steps.

    ``4 B L C (P + 2 M)``: the memory of the whole episode for each step, the window selected from it, and the
    window with added positions. Tensors that autograd saves in addition are not counted.
    """
    return 4 * shape.minibatch * shape.layers * shape.width * (EPISODE_STEPS + 2 * shape.memory)
