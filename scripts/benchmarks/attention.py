"""Time and memory of attention by the length of the sequence: which kinds grow how fast."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention_sizes import HEADS, SIZE
from benchmarks.attention_subjects import SUBJECTS
from benchmarks.kept import made
from benchmarks.offline_memory import peak_bytes

ALL_PAIRS = "every pair"
FITTED = 2048
"""Tokens from which the exponent is fitted: below, what is done once for each pass counts, too."""


@dataclass(frozen=True)
class Point:
    """One kind of attention at one length.

    Args:
        name: of the subject.
        length: tokens L.
        seconds: processor time of forward plus backward, the fastest of several.
        bytes: most memory held at a time beyond what was held before.
    """

    name: str
    length: int
    seconds: float
    bytes: int


@dataclass
class Attention:
    """Time and peak memory of forward plus backward of an attention sublayer: batch 1, 4 heads of 64, causal.

    Each is measured in a process of its own with one thread. For numbers that count, leave the machine alone.
    A measurement that is done is a line of the output and is not made again.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens."""
    only: tuple[str, ...] = ()
    """Names of what to measure, beside every pair; all, if none is given."""
    repeats: int = 5
    """Passes, of which the fastest counts, after two to warm up."""
    output: Path = Path("runs/bench-attention.jsonl")
    """Where to write each measurement; their picture stands beside it."""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SUBJECTS):
            raise ValueError(f"there is no {sorted(unknown)}; there are {', '.join(SUBJECTS)}")

    def run(self) -> None:
        """Measure what is missing, print the table, write each number and the picture."""
        points = list(self.points())
        Console(width=140).print(table(points))
        draw(points, self.output.with_suffix(".png"))
        Console().print(f"numbers: {self.output}, {self.output.with_suffix('.png')}")

    def points(self) -> Iterator[Point]:
        """All measurements, each from a fresh process."""
        for name in SUBJECTS:
            for length in self.lengths if name in (ALL_PAIRS, *(self.only or SUBJECTS)) else ():
                key = f"{name}, {length} tokens, the fastest of {self.repeats}"
                found = made({key: partial(measure, name, length, self.repeats)}, 1, self.output)
                yield Point(**found[key])


def measure(name: str, length: int, repeats: int) -> Point:
    """One subject at one length."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    attend = subject.build(length)
    x = torch.randn(1, length, HEADS * SIZE, requires_grad=True)
    attend(x[:, : subject.begins_with]).sum().backward()
    held, times = peak_bytes(), []
    for _ in range(2 + repeats):
        start = time.process_time()
        for _ in range(subject.layers):
            attend(x).square().mean().backward()
        times.append((time.process_time() - start) / subject.layers)
    return Point(name, length, min(times[2:]), peak_bytes() - held)


def exponent(points: Sequence[Point]) -> float:
    """Slope of log time over log L, from `FITTED` tokens on; nan for fewer than two lengths."""
    long = [point for point in points if point.length >= FITTED]
    if len(long) < 2:
        return float("nan")
    return float(np.polyfit(np.log([p.length for p in long]), np.log([p.seconds for p in long]), 1)[0])


def by_name(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each subject."""
    names = dict.fromkeys(point.name for point in points)
    return {name: [point for point in points if point.name == name] for name in names}


def table(points: Sequence[Point]) -> Table:
    """A line for each subject: times, times as fast as every pair, memory, exponent and its claim."""
    lengths = sorted({point.length for point in points})
    result = Table(
        "",
        *(f"L = {length:,}" for length in lengths),
        "exponent",
        "claim",
        title="Attention: ms, x as fast, MB",
    )
    dense = {point.length: point.seconds for point in points if point.name == ALL_PAIRS}
    for name, own in by_name(points).items():
        cells = [
            f"{1e3 * p.seconds:.0f} ms, {dense[p.length] / p.seconds:.1f} x, {p.bytes / 1e6:.0f} MB"
            for p in own
        ]
        result.add_row(name, *cells, f"{exponent(own):.2f}", ", ".join(claims(own, dense)))
    return result


def claims(own: Sequence[Point], dense: dict[int, float]) -> Iterator[str]:
    """What a subject should be, and whether it is."""
    subject = SUBJECTS[own[0].name]
    if subject.at_most is None:
        return
    yield f"{subject.at_most:.2f}" + (" missed" if exponent(own) > subject.at_most else "")
    slower = [p.length for p in own if p.length >= subject.faster_from and p.seconds > dense[p.length]]
    if slower:
        yield f"slower at {max(slower):,}"


def draw(points: Sequence[Point], path: Path) -> None:
    """Time and memory over the length, a line for each subject."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for name, own in by_name(points).items():
        lengths = [point.length for point in own]
        axes[0].loglog(lengths, [1e3 * point.seconds for point in own], marker="o", label=name)
        axes[1].loglog(lengths, [max(1, point.bytes) / 1e6 for point in own], marker="o", label=name)
    axes[0].set(xlabel="tokens", ylabel="forward and backward, ms")
    axes[1].set(xlabel="tokens", ylabel="peak memory, MB")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
