"""Files of an exported agent: the step, its description, checksums, and the player."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlxf.export.acting_step import ActingStep, number_range, observation_parts
from rlxf.export.formats import (
    SUFFIXES,
    Format,
    check_format,
    check_installed,
    check_opset,
    trace_step,
    write_onnx,
    write_torch,
)
from rlxf.utils.files import make_folder, write_file
from rlxf.utils.warnings import silenced

PLAYER = Path(__file__).with_name("onnx_player.py")
"""Module that is copied next to an exported .onnx file. Its first line, which must not change, identifies
copies."""
DESCRIPTION_KEYS = {"agent", "rlxf", "n_envs", "observations", "action", "state"}
"""Keys of the result of `describe` by which a description is recognized."""
CHECKSUM = re.compile(r"[0-9a-f]{64} [ *](.+)")
"""Line of a .sha256 file, with the name of the file as group."""


def check_target(path: str | os.PathLike[str], format: str | None, opset: int | None) -> tuple[Path, Format]:
    """Return path and format of an export, before any work is done.

    Args:
        path: file to write. Without suffix it gets that of the format. `export_step` creates missing folders.
        format: name of the format; None for that of the suffix, without suffix "onnx".
        opset: ONNX opset; None for the default.

    Raises:
        ValueError: if the format is unknown, its suffix is another, or the opset is too old, or for another
            format.
        ImportError: if a package is missing.
        IsADirectoryError: if the path is a folder.
        NotADirectoryError: if a folder of the path is a file.
        FileExistsError: if the export would replace a .json file that is no description of an agent, or that
            of an export in another format; a .sha256 file that does not list exactly the files of this
            export; or an ``onnx_player.py`` that is no player of rlxf.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: choose a file in it, e.g. {target / 'policy.onnx'}")
    known = {suffix: name for name, suffix in SUFFIXES.items()}
    chosen = check_format(format or known.get(target.suffix, "onnx"))
    target = target if target.suffix else target.with_suffix(SUFFIXES[chosen])
    if target.suffix != SUFFIXES[chosen]:
        raise ValueError(f"a file of format {chosen!r} must end in {SUFFIXES[chosen]}, got {target.name}")
    _check_parents(target)
    if opset is not None and chosen != "onnx":
        raise ValueError(
            f"opset={opset} is for the format 'onnx', and the format is {chosen!r}: leave it out"
        )
    check_opset(opset)
    check_installed(chosen)
    _check_description(target.with_suffix(".json"), chosen)
    _check_checksums(target)
    if chosen == "onnx":
        _check_player(target.with_name(PLAYER.name))
    return target, chosen


def _check_parents(target: Path) -> None:
    """Raise NotADirectoryError if the folders of a file cannot be created, because one of them is a file."""
    existing = next(folder for folder in target.parents if folder.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file, not a folder: choose another path than {target}")


def _check_description(description: Path, format: Format) -> None:
    """Raise FileExistsError if a .json file exists that does not describe an export in this format."""
    if not description.exists():
        return
    try:
        fields = json.loads(description.read_bytes())
    except (ValueError, RecursionError):
        fields = None
    if not (isinstance(fields, dict) and fields.keys() >= DESCRIPTION_KEYS):
        raise FileExistsError(
            f"{description} would be replaced by the description of the agent, but is another file: choose "
            f"another name for the export, or move this file"
        )
    others = [suffix for name, suffix in SUFFIXES.items() if name == fields.get("format") != format]
    if others and (other := description.with_suffix(others[0])).exists():
        raise FileExistsError(
            f"{description} describes {other.name}: choose another name for the export, for example "
            f"{description.stem}-{format}{SUFFIXES[format]}"
        )


def _check_checksums(target: Path) -> None:
    """Raise FileExistsError if a .sha256 file exists that does not list exactly the files of this export."""
    sums = target.with_suffix(".sha256")
    files = {target.name, target.with_suffix(".json").name}
    if sums.exists() and _listed(sums) != files:
        raise FileExistsError(
            f"{sums} would be replaced by the checksums of {' and '.join(sorted(files))}, but is another "
            f"file: choose another name for the export, or move this file"
        )


def _listed(sums: Path) -> set[str] | None:
    """Return the names of the files in a .sha256 file; None if it is not in the format of sha256sum."""
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else [""]
    except UnicodeDecodeError:
        return None
    entries = [CHECKSUM.fullmatch(line) for line in lines]
    return {entry[1] for entry in entries if entry} if all(entries) else None


def _check_player(player: Path) -> None:
    """Raise FileExistsError if a file exists that does not begin with the first line of the player."""
    if not player.exists():
        return
    if not player.is_file() or _first_line(player) != _first_line(PLAYER):
        raise FileExistsError(
            f"{player} would be replaced by the player of rlxf, but is another file: choose another folder "
            f"for the export, or move this file"
        )


def _first_line(path: Path) -> bytes:
    return path.read_bytes().partition(b"\n")[0].rstrip()


def export_step(
    step: ActingStep, techniques: dict[str, Any], target: tuple[Path, Format], opset: int | None
) -> None:
    """Write an acting step, its description and checksums; for ONNX also the player.

    The files of an export to ``policy.onnx`` are ``policy.onnx``, ``policy.json``, ``policy.sha256`` in the
    format of sha256sum, and ``onnx_player.py``. They replace existing files of these names; `check_target`
    refuses other files than those of an export, except at the path itself.

    Args:
        step: the acting step.
        techniques: see `trace_step`.
        target: result of `check_target`.
        opset: ONNX opset; None for the default.

    Raises:
        ExportError: if a part of the step cannot be exported; nothing is written.
        OSError: if a file cannot be written.
    """
    path, format = target
    observations, start, state = step.arguments
    inputs = [*observations, "episode_start", *(f"state.{name}" for name in state)]
    outputs = ["action", *(f"next_state.{name}" for name in state)]
    with silenced():
        program = trace_step(step.eval(), techniques)
        if format == "onnx":
            content = write_onnx(program, step, inputs, outputs, check_opset(opset))
        else:
            content = write_torch(program)
    with torch.no_grad():
        action, _ = step(observations, start, state)
    description = describe(step, action) | {"format": format, "inputs": inputs, "outputs": outputs}
    files = {path.name: content, path.with_suffix(".json").name: json.dumps(description, indent=1).encode()}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    files[path.with_suffix(".sha256").name] = sums.encode()
    if format == "onnx":
        files[PLAYER.name] = PLAYER.read_bytes()
    make_folder(path.parent, exist_ok=True)
    for name, data in files.items():
        write_file(path.parent / name, data)


def describe(step: ActingStep, action: Tensor) -> dict[str, Any]:
    """Return the description of a step as JSON: names, shapes and dtypes of all tensors, and spaces.

    Observations also have "low" and "high", see `number_range`.
    """
    parts = observation_parts(step.spaces[0])
    return {
        "agent": step.agent,
        "rlxf": version("rlxf"),
        "n_envs": step.envs,
        "observation_space": str(step.spaces[0]),
        "action_space": str(step.spaces[1]),
        "observations": {
            name: layout | number_range(parts[name]) for name, layout in _layout(step.observations).items()
        },
        "action": _layout({"action": action})["action"],
        "state": {
            name: layout | {"values": _values(step.state[name])}
            for name, layout in _layout(step.state).items()
        },
    }


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        for name, x in tensors.items()
    }


def _values(x: Tensor) -> Any:
    """Return the values of a tensor in row-major order; one number if all are equal."""
    flat = x.flatten()
    if not len(flat):
        return []
    return flat[0].item() if bool((flat == flat[0]).all()) else flat.tolist()
