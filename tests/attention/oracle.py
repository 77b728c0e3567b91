"""Reference vectors (see vectors/README.md) and how their weights enter our modules."""

import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

FOLDER = Path(os.environ.get("RLXF_VECTORS", Path(__file__).parent / "vectors"))
Vector = dict[str, Tensor]


def load(name: str) -> Vector:
    """The numeric arrays of a vector file."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files if file[key].dtype.kind != "U"}


def number_of(noun: str, name: str) -> int:
    """A size that no array shows: the number before ``noun`` in the vector's description."""
    return _number(rf"(\d+) {noun}", name)


def number_after(noun: str, name: str) -> int:
    """As `number_of`: the number behind ``noun``."""
    return _number(rf"{noun} (\d+)", name)


def _number(pattern: str, name: str) -> int:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        text = str(file["description"])
    found = re.search(pattern, text)
    assert found, f"no number like {pattern} in the description of {name}: {text}"
    return int(found[1])


def count(vector: Vector, prefix: str) -> int:
    """How many numbered parts ``prefix.0``, ``prefix.1``, ... a state dict has."""
    start = "w_" + prefix.replace(".", "__") + "__"
    return len({key.removeprefix(start).split("__")[0] for key in vector if key.startswith(start)})


def named(vector: Vector, prefix: str) -> tuple[Tensor, Tensor | None]:
    """Weight, and bias if there is one, of a torch module in a state dict: ``prefix`` as in "norm."."""
    key = "w_" + prefix.replace(".", "__") + "{}_T_out_in"
    return vector[key.format("weight")], vector.get(key.format("bias"))


def put(parameter: Tensor, value: Tensor) -> None:
    """Overwrite a parameter; unlike ``copy_``, no broadcasting."""
    assert parameter.shape == value.shape, (tuple(parameter.shape), tuple(value.shape))
    with torch.no_grad():
        parameter.copy_(value)


def fill(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Overwrite weight and bias of a Linear or LayerNorm; no bias given: 0."""
    put(module.weight, weight)
    if module.bias is not None:
        put(module.bias, torch.zeros_like(module.bias) if bias is None else bias)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Fail unless all numbers agree."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
