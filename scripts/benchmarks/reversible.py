"""Training memory of reversible layers by number of layers, and accuracy of their gradients."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import fresh_processes, machine
from benchmarks.process_memory import peak_bytes
from rlxf.attention import XL, Reversible, TokenIndex, Transformer, TransformerSpec, Window

STACKS = {
    "Reversible": TransformerSpec(residual=Reversible()),
    "Reversible, XL(128)": TransformerSpec(residual=Reversible(), memory=XL(128), pattern=Window(129)),
    "Add": TransformerSpec(),
}
MAX_RATIO = 1.5
"""Maximum ratio of the memory with many layers to that with few layers."""
AGREE = 1e-10


@dataclass(frozen=True)
class Point:
    """Measurement of one stack of layers.

    Args:
        stack: name of the stack.
        layers: number of layers.
        weight_bytes: bytes of the weights; their gradients need as much.
        bytes: peak memory of weights, memory state, forward and backward pass.
    """

    stack: str
    layers: int
    weight_bytes: int
    bytes: int


@dataclass
class ReversibleLayers:
    """Peak memory of forward plus backward by the number of layers, with Reversible and with plain residuals.

    Each stack is measured in a process of its own with one thread. Weights, gradients and memory states of
    `XL` count; the memory of the process before the model is built does not. The benchmark also reports the
    largest difference between gradients of reversible layers, in float64 and with dropout, and those of the
    paper's formula with stored activations.
    """

    layers: tuple[int, int] = (2, 16)
    """Small and large number of layers."""
    width: int = 64
    """Features per token."""
    batch: int = 32
    """Batch size, in sequences."""
    length: int = 512
    """Tokens per sequence, with causal attention."""
    output: Path = Path("runs/bench-reversible.json")
    """Output file."""

    def run(self) -> None:
        """Measure, print the table, and write all numbers."""
        points, largest = list(self.points()), difference(self.layers[1])
        console = Console(width=120)
        console.print(table(points), f"largest difference of gradients: {largest:.1e}, at most {AGREE:.0e}")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        data = {"machine": machine(), "points": [asdict(point) for point in points], "difference": largest}
        self.output.write_text(json.dumps(data, indent=1))
        console.print(f"numbers: {self.output}")

    def points(self) -> Iterator[Point]:
        """Yield the measurements of all stacks, each from a new process."""
        for name in STACKS:
            for layers in self.layers:
                with fresh_processes(1) as pool:
                    yield pool.submit(measure, name, layers, self.width, self.batch, self.length).result()


def measure(name: str, layers: int, width: int, batch: int, length: int) -> Point:
    """Measure one stack."""
    torch.manual_seed(0)
    learn(replace(STACKS[name], width=width, layers=2).build(), 1, 8)
    baseline = peak_bytes()
    model = replace(STACKS[name], width=width, layers=layers).build()
    learn(model, batch, length)
    weights = sum(weight.nbytes for weight in model.parameters())
    return Point(name, layers, weights, peak_bytes() - baseline)


def learn(model: Transformer, batch: int, length: int) -> None:
    """Run a forward and a backward pass."""
    state = model.initial_state(batch) if model.spec.memory else None
    if state is not None:
        state.hidden.normal_()  # else the operating system has not allocated its pages
    y = model.outputs(torch.randn(batch, length, model.spec.width), TokenIndex.range(batch, length), state)
    y.square().mean().backward()


def difference(layers: int) -> float:
    """Return the largest difference between gradients of reversible layers and of stored activations."""
    torch.manual_seed(0)
    spec = TransformerSpec(width=32, layers=layers, residual=Reversible(), dropout=0.1)
    model, index = spec.build().double(), TokenIndex.range(2, 24)
    x, weight = torch.randn(2, 2, 24, spec.width, dtype=torch.float64)
    reversible = gradients(model, x, weight, model(seeded(x), index)[0])
    stored = gradients(model, x, weight, with_stored_activations(model, seeded(x), index))
    return max((one - other).abs().max().item() for one, other in zip(reversible, stored, strict=True))


def seeded(x: Tensor) -> Tensor:
    """Return tokens x after seeding torch, so that later passes have equal dropout masks."""
    torch.manual_seed(1)
    return x.requires_grad_()


def gradients(model: Transformer, x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of tokens and weights."""
    return torch.autograd.grad((y * weight).sum(), [x, *model.parameters()])


def with_stored_activations(model: Transformer, x: Tensor, index: TokenIndex) -> Tensor:
    """Return ``y_1 = x_1 + Attention(x_2)``, ``y_2 = x_2 + FeedForward(y_1)``, as in Gomez et al. 2017."""
    first, second = x, x
    blocks: Any = model.blocks
    for block, relation in zip(blocks, model.attention_masks(index, index), strict=True):
        first = first + block.attention_branch(block.attention_norm.normalize(second), None, relation)
        second = second + block.feed_forward_branch(block.feed_forward_norm.normalize(first))
    y: Tensor = model.norm((first + second) / 2)
    return y


def table(points: list[Point]) -> Table:
    """Return a table with a row for each stack."""
    few, many = sorted({point.layers for point in points})
    result = Table(
        "stack",
        *(f"{layers} layers, MB (of which weights and gradients)" for layers in (few, many)),
        "ratio",
        title=f"peak memory; reversible layers: at most {MAX_RATIO} times",
    )
    for name in STACKS:
        own = {point.layers: point for point in points if point.stack == name}
        cells = [f"{p.bytes / 1e6:.0f} ({2 * p.weight_bytes / 1e6:.1f})" for p in (own[few], own[many])]
        result.add_row(name, *cells, f"{own[many].bytes / own[few].bytes:.2f}")
    return result
