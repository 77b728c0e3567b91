"""Serialization of tensors in the safetensors format, with strict checks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from rlxf.training.strict_json import MAX_JSON_BYTES, json_memory

TENSOR_BYTES = 2048
"""Upper estimate of the memory of a tensor without its data: Python object, storage object and name."""
_DTYPE_NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64"
DTYPES = tuple(getattr(torch, name) for name in _DTYPE_NAMES.split())


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError unless all tensors are dense and of a dtype in `DTYPES`."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"tensors must be a dict of strings to tensors, got {name!r}: {type(tensor).__name__}"
            )
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__', which is reserved by safetensors")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise TypeError(
                f"tensor {name!r} is {tensor.layout} {tensor.dtype}; use a dense tensor of one of {DTYPES}"
            )


def arrays_to_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Copy arrays to tensors in row-major order."""
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def tensors_to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return views of CPU tensors as arrays."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def dump_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors of any device; views and tensors with shared storage are stored in full."""
    return safetensors.torch.save({name: _own_copy(tensor) for name, tensor in tensors.items()})


def tensors_memory(data: bytes) -> int:
    """Return an upper estimate of the memory of serialized tensors in addition to their data, in bytes."""
    header = data[8 : 8 + min(int.from_bytes(data[:8], "little"), MAX_JSON_BYTES)]
    return json_memory(header) + TENSOR_BYTES * header.count(b'"data_offsets"')


def load_tensors(data: bytes) -> dict[str, Tensor]:
    """Deserialize tensors to the CPU, each with its own storage.

    Raises:
        ValueError: if ``data`` is not valid safetensors, or its header is larger than 8 MiB.
    """
    header = int.from_bytes(data[:8], "little")
    if header > MAX_JSON_BYTES:
        raise ValueError(
            f"its header of {header:,} bytes exceeds {MAX_JSON_BYTES:,}; the file is damaged, use another "
            f"copy"
        )
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, AssertionError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"it is not valid safetensors ({error}); use another copy of the file") from error


def _own_copy(tensor: Tensor) -> Tensor:
    # safetensors rejects tensors that share storage.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
