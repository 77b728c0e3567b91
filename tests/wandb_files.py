"""Reader of the offline files of W&B, for tests."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a part of a record, as in the log format of LevelDB."""
FULL, LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Return the records of all offline runs in the folder of a run, in order."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/*/*.wandb"))
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


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged values of all offline runs in the folder of a run."""
    logged = [each.history.item for each in records(folder) if each.WhichOneof("record_type") == "history"]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in logged
    ]


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the offline runs in the folder of a run."""
    return [each.run.run_id for each in records(folder) if each.WhichOneof("record_type") == "run"]
