"""HF transformers' DecisionTransformerModel, in an environment of its own."""

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
"""Where its environment is made unless told otherwise."""
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("transformers>=4.40,<6", "-e", f"{ROOT}[mujoco]")
"""The model, and this checkout: the same data, windows and evaluation."""


def install(venv: Path) -> None:
    """Make the environment unless it is there."""
    ready = venv / "ready"
    torch_version = torch.__version__.split("+")[0]
    wanted = " ".join([torch_version, *PACKAGES])
    if ready.is_file() and ready.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch_version}"], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    ready.write_text(wanted)


def call(venv: Path, task: str, setting: Setting, **options: Any) -> dict[str, Any]:
    """What a function of ``hugging_face_tasks.py`` gives, run there with as many threads as here.

    Args:
        venv: of `install`.
        task: name of the function.
        setting: its first argument.
        options: the others; plain data.

    Raises:
        subprocess.CalledProcessError: if it fails; its output stands on the screen.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {"task": task, "setting": asdict(setting), "options": options, "answer": str(answer)}
        command = [str(venv / "bin" / "python"), "-m", "benchmarks.hugging_face_tasks", json.dumps(request)]
        subprocess.run(command, env=surroundings(), cwd=folder, check=True)
        return json.loads(answer.read_text())


def surroundings() -> dict[str, str]:
    """Environment variables: this folder on the path, as many threads, nothing asked of the network."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "scripts"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
    }
