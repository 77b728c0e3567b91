"""Reference vectors (see vectors/README.md) and helpers that copy their weights into modules."""

import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

FOLDER = Path(os.environ.get("RLXF_VECTORS", Path(__file__).parent / "vectors"))
Vector = dict[str, Tensor]


def load(name: str) -> Vector:
    """Return the numeric arrays of a vector file."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files if file[key].dtype.kind != "U"}


def number_of(noun: str, name: str) -> int:
    """Return the number before ``noun`` in the vector's description, for sizes that no array shows."""
    return _number(rf"(\d+) {noun}", name)


def number_after(noun: str, name: str) -> int:
    """Return the number after ``noun`` in the vector's description."""
    return _number(rf"{noun} (\d+)", name)


def _number(pattern: str, name: str) -> int:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        text = str(file["description"])
    match = re.search(pattern, text)
    assert match, f"no number matches {pattern} in the description of {name}: {text}"
    return int(match[1])


def count(vector: Vector, prefix: str) -> int:
    """Return the number of modules ``prefix.0``, ``prefix.1``, ... in a state dict."""
    start = "w_" + prefix.replace(".", "__") + "__"
    return len({key.removeprefix(start).split("__")[0] for key in vector if key.startswith(start)})


def named(vector: Vector, prefix: str) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the optional bias of a torch module in a state dict; ``prefix`` as in "norm."."""
    key = "w_" + prefix.replace(".", "__") + "{}_T_out_in"
    return vector[key.format("weight")], vector.get(key.format("bias"))


def put(parameter: Tensor, value: Tensor) -> None:
    """Overwrite a parameter without broadcasting, unlike ``copy_``."""
    assert parameter.shape == value.shape, (tuple(parameter.shape), tuple(value.shape))
    with torch.no_grad():
        parameter.copy_(value)


def fill(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Overwrite weight and bias of a Linear or LayerNorm; a missing bias is 0."""
    put(module.weight, weight)
    if module.bias is not None:
        put(module.bias, torch.zeros_like(module.bias) if bias is None else bias)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Assert that all numbers agree within the tolerance."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
