"""What reversible layers need to learn: the memory of many beside that of few, and the same gradients."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import fresh_processes, machine
from benchmarks.offline_memory import peak_bytes
from rlxf.attention import XL, Index, Reversible, Transformer, TransformerSpec, Window

STACKS = {
    "Reversible": TransformerSpec(residual=Reversible()),
    "Reversible, XL(128)": TransformerSpec(residual=Reversible(), memory=XL(128), pattern=Window(129)),
    "Add": TransformerSpec(),
}
AT_MOST = 1.5
"""Times the memory of few layers that many may take."""
AGREE = 1e-10


@dataclass(frozen=True)
class Point:
    """One stack of layers.

    Args:
        stack: its name.
        layers: number of layers.
        weight_bytes: of the weights; their gradients take as much again.
        bytes: most memory held at a time by weights, a remembered state, a forward and a backward pass.
    """

    stack: str
    layers: int
    weight_bytes: int
    bytes: int


@dataclass
class ReversibleLayers:
    """Peak memory of forward plus backward by the number of layers, with Reversible and with plain residuals.

    Each in a process of its own, one thread; the memory of the process before there was a model is left out,
    weights, their gradients and what `XL` remembers of each layer count. Then the largest difference between
    gradients of reversible passes, in float64 and with dropout, and those of the paper's formula, which keeps
    everything.
    """

    layers: tuple[int, int] = (2, 16)
    """Few and many."""
    width: int = 64
    """Features of a token."""
    batch: int = 32
    """Sequences."""
    length: int = 512
    """Tokens of each, causal."""
    output: Path = Path("runs/bench-reversible.json")
    """Where to write all numbers."""

    def run(self) -> None:
        """Measure, print the table, write all numbers."""
        points, apart = list(self.points()), difference(self.layers[1])
        console = Console(width=120)
        console.print(table(points), f"largest difference of gradients: {apart:.1e}, at most {AGREE:.0e}")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "points": [asdict(point) for point in points], "difference": apart}
        self.output.write_text(json.dumps(found, indent=1))
        console.print(f"numbers: {self.output}")

    def points(self) -> Iterator[Point]:
        """All stacks, each from a fresh process."""
        for name in STACKS:
            for layers in self.layers:
                with fresh_processes(1) as pool:
                    yield pool.submit(measure, name, layers, self.width, self.batch, self.length).result()


def measure(name: str, layers: int, width: int, batch: int, length: int) -> Point:
    """One stack."""
    torch.manual_seed(0)
    learn(replace(STACKS[name], width=width, layers=2).build(), 1, 8)
    held = peak_bytes()
    model = replace(STACKS[name], width=width, layers=layers).build()
    learn(model, batch, length)
    weights = sum(weight.nbytes for weight in model.parameters())
    return Point(name, layers, weights, peak_bytes() - held)


def learn(model: Transformer, batch: int, length: int) -> None:
    """Forward and backward."""
    state = model.initial_state(batch) if model.spec.memory else None
    if state is not None:
        state.hidden.normal_()  # else the system has not given it room
    y = model.outputs(torch.randn(batch, length, model.spec.width), Index.range(batch, length), state)
    y.square().mean().backward()


def difference(layers: int) -> float:
    """Largest one of gradients: those of reversible passes less those of passes that keep everything."""
    torch.manual_seed(0)
    spec = TransformerSpec(width=32, layers=layers, residual=Reversible(), dropout=0.1)
    model, index = spec.build().double(), Index.range(2, 24)
    x, wanted = torch.randn(2, 2, 24, spec.width, dtype=torch.float64)
    found = gradients(model, x, wanted, model(dropped(x), index)[0])
    kept = gradients(model, x, wanted, keeping_all(model, dropped(x), index))
    return max((one - other).abs().max().item() for one, other in zip(found, kept, strict=True))


def dropped(x: Tensor) -> Tensor:
    """Tokens x, before passes that drop the same features each time."""
    torch.manual_seed(1)
    return x.requires_grad_()


def gradients(model: Transformer, x: Tensor, wanted: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Of tokens and weights."""
    return torch.autograd.grad((y * wanted).sum(), [x, *model.parameters()])


def keeping_all(model: Transformer, x: Tensor, index: Index) -> Tensor:
    """``y_1 = x_1 + Attention(x_2)``, ``y_2 = x_2 + FeedForward(y_1)``, as Gomez et al. 2017 write it."""
    first, second = x, x
    for block, relation in zip(model.blocks, model.relations(index, index), strict=True):
        first = first + block.look(block.join_attention.read(second), None, relation)
        second = second + block.consider(block.join_feed_forward.read(first))
    y: Tensor = model.norm((first + second) / 2)
    return y


def table(points: list[Point]) -> Table:
    """A line for each stack."""
    few, many = sorted({point.layers for point in points})
    result = Table(
        "stack",
        *(f"{layers} layers, MB (of which weights and gradients)" for layers in (few, many)),
        "times",
        title=f"peak memory; reversible layers: at most {AT_MOST} times",
    )
    for name in STACKS:
        own = {point.layers: point for point in points if point.stack == name}
        cells = [f"{p.bytes / 1e6:.0f} ({2 * p.weight_bytes / 1e6:.1f})" for p in (own[few], own[many])]
        result.add_row(name, *cells, f"{own[many].bytes / own[few].bytes:.2f}")
    return result
