"""Calls to HF transformers' DecisionTransformerModel in a separate virtual environment."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.offline_setting import Setting

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlxf" / "hugging-face-venv"
"""Default folder of the virtual environment."""
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("transformers>=4.40,<6", "-e", f"{ROOT}[mujoco]")
"""Packages of the virtual environment: transformers, and this checkout for data and evaluation."""


def install(venv: Path) -> None:
    """Create the virtual environment unless its file ``ready`` contains `requirements`."""
    ready = venv / "ready"
    if ready.is_file() and ready.read_text() == requirements():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([*pip, f"torch=={_torch_version()}"], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    ready.write_text(requirements())


def requirements() -> str:
    """Return the version of torch and the packages of the virtual environment."""
    return " ".join([_torch_version(), *PACKAGES])


def _torch_version() -> str:
    return torch.__version__.split("+")[0]


def run_task(venv: Path, task: str, setting: Setting, **options: Any) -> dict[str, Any]:
    """Run a function of ``hugging_face_tasks.py`` in the virtual environment, with as many threads as here.

    Args:
        venv: folder of the virtual environment.
        task: name of the function.
        setting: its first argument.
        options: its other arguments; JSON data.

    Raises:
        subprocess.CalledProcessError: if the function fails; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {"task": task, "setting": asdict(setting), "options": options, "answer": str(answer)}
        command = [str(venv / "bin" / "python"), "-m", "benchmarks.hugging_face_tasks", json.dumps(request)]
        subprocess.run(command, env=environment_variables(), cwd=folder, check=True)
        return json.loads(answer.read_text())


def environment_variables() -> dict[str, str]:
    """Return environment variables: module path, number of threads, and offline mode of HF."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "scripts"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
    }
