"""Scaling of time and memory of attention with the length of the sequence."""

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
from benchmarks.process_memory import peak_bytes
from benchmarks.result_cache import run_missing

ALL_PAIRS = "every pair"
FITTED = 2048
"""Minimum length for the fit of the exponent; below, constant costs of a pass matter."""


@dataclass(frozen=True)
class Point:
    """Measurement of one subject at one length.

    Args:
        name: name of the subject.
        length: tokens L.
        seconds: CPU time of forward and backward pass, the minimum of several.
        bytes: peak memory minus the memory before the passes.
    """

    name: str
    length: int
    seconds: float
    bytes: int


@dataclass
class Attention:
    """Time and peak memory of forward and backward pass of an attention sublayer: batch 1, 4 heads of 64.

    Each measurement runs in a process of its own with one thread. For reliable numbers, run no other programs
    on the machine. Completed measurements are lines of the output file and are not repeated.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Sequence lengths, in tokens."""
    only: tuple[str, ...] = ()
    """Names of the subjects, in addition to dense attention ("every pair"); default: all."""
    repeats: int = 5
    """Timed passes after two for warm-up; the fastest counts."""
    output: Path = Path("runs/bench-attention.jsonl")
    """Output file with a line for each measurement; the figure is saved next to it."""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SUBJECTS):
            raise ValueError(f"only must be among {', '.join(SUBJECTS)}, got {sorted(unknown)}")

    def run(self) -> None:
        """Make missing measurements, print the table, and write numbers and figure."""
        points = list(self.points())
        Console(width=140).print(table(points))
        draw(points, self.output.with_suffix(".png"))
        Console().print(f"numbers: {self.output}, {self.output.with_suffix('.png')}")

    def points(self) -> Iterator[Point]:
        """Yield all measurements, each from a new process."""
        for name in SUBJECTS:
            for length in self.lengths if name in (ALL_PAIRS, *(self.only or SUBJECTS)) else ():
                key = f"{name}, {length} tokens, the fastest of {self.repeats}"
                results = run_missing({key: partial(measure, name, length, self.repeats)}, 1, self.output)
                yield Point(**results[key])


def measure(name: str, length: int, repeats: int) -> Point:
    """Measure one subject at one length."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    attend = subject.build(length)
    x = torch.randn(1, length, HEADS * SIZE, requires_grad=True)
    attend(x[:, : subject.begins_with]).sum().backward()
    baseline, times = peak_bytes(), []
    for _ in range(2 + repeats):
        start = time.process_time()
        for _ in range(subject.layers):
            attend(x).square().mean().backward()
        times.append((time.process_time() - start) / subject.layers)
    return Point(name, length, min(times[2:]), peak_bytes() - baseline)


def exponent(points: Sequence[Point]) -> float:
    """Return the slope of log time over log L, from `FITTED` tokens on; nan for fewer than two lengths."""
    long = [point for point in points if point.length >= FITTED]
    if len(long) < 2:
        return float("nan")
    return float(np.polyfit(np.log([p.length for p in long]), np.log([p.seconds for p in long]), 1)[0])


def by_name(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group points by subject."""
    names = dict.fromkeys(point.name for point in points)
    return {name: [point for point in points if point.name == name] for name in names}


def table(points: Sequence[Point]) -> Table:
    """Return a table of time, speedup over dense attention, memory, exponent and claim of each subject."""
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
    """Yield the claims about a subject, and mark those that are violated."""
    subject = SUBJECTS[own[0].name]
    if subject.at_most is None:
        return
    yield f"{subject.at_most:.2f}" + (" missed" if exponent(own) > subject.at_most else "")
    slower = [p.length for p in own if p.length >= subject.faster_from and p.seconds > dense[p.length]]
    if slower:
        yield f"slower at {max(slower):,}"


def draw(points: Sequence[Point], path: Path) -> None:
    """Plot time and memory over the length, with a line for each subject."""
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
