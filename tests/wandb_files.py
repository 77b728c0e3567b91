"""Reader of the offline files of W&B, for tests."""

import json
import struct
import time
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a part of a record, as in the log format of LevelDB."""
FULL, LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Return the records of all offline runs in the folder of a run, in order."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [
        wandb_internal_pb2.Record.FromString(data) for file in files for data in _parts(file.read_bytes())
    ]


def _parts(content: bytes) -> list[bytes]:
    complete, data, place = [], b"", HEADER.size  # the file begins with a header of the same size
    while place + HEADER.size <= len(content):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size
        data += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            complete.append(data)
            data = b""
    return complete


def finished_records(folder: Path, seconds: float = 20) -> list[Any]:
    """Return the records after all runs have ended; W&B's process may write them after it was closed."""
    deadline = time.monotonic() + seconds
    while True:
        found = records(folder)
        kinds = [each.WhichOneof("record_type") for each in found]
        if 0 < kinds.count("header") == kinds.count("exit") or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged values of all offline runs in the folder of a run."""
    found = finished_records(folder)
    logged = [each.history.item for each in found if each.WhichOneof("record_type") == "history"]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in logged
    ]


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the offline runs in the folder of a run."""
    return [each.run.run_id for each in records(folder) if each.WhichOneof("record_type") == "run"]
