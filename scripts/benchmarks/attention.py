"""Scaling of time and memory of attention with the length of the sequence."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.attention_flex import CUDA_SUBJECTS
from benchmarks.attention_sizes import HEADS, SIZE
from benchmarks.attention_subjects import SUBJECTS, Subject
from benchmarks.machine import is_cuda, now
from benchmarks.process_memory import peak_bytes
from benchmarks.result_cache import check_names, run_missing, run_missing_here
from rlxf.attention.registry import TECHNIQUES
from rlxf.utils.matrix_products import float32_products

ALL_PAIRS = "all pairs"
OTHERS = (ALL_PAIRS, "package")
"""First words of the names of subjects that are not those of rlxf."""
MARKERS = "osD^v<>PXph*d8"
"""Markers of the lines in a panel of the figure."""
LIGHT = plt.colormaps["tab20"].resampled(20)
"""Colors of the lines after the tenth."""
FITTED = 2048
"""Minimum length for the fit of the exponent; below, constant costs of a pass matter."""


@dataclass(frozen=True)
class Point:
    """Measurement of one subject at one length.

    Args:
        name: name of the subject.
        length: tokens L.
        seconds: CPU time of forward and backward pass, on a GPU elapsed time; the minimum of several.
        bytes: peak memory minus the memory before the passes.
    """

    name: str
    length: int
    seconds: float
    bytes: int


@dataclass
class Attention:
    """Time and peak memory of forward and backward pass of an attention sublayer: batch 1, 4 heads of 64.

    Each measurement runs in a process of its own with one thread; on a GPU all run in this process, and the
    memory is that of its tensors. torch's flex_attention is measured on a GPU only, and the claims are about
    the CPU. For reliable numbers, run no other programs on the machine. Completed measurements are lines of
    the output file and are not repeated.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Sequence lengths, in tokens."""
    only: tuple[str, ...] = ()
    """Names of the subjects, in addition to dense attention ("all pairs"); default: all."""
    repeats: int = 5
    """Timed passes after two for warm-up; the fastest counts."""
    device: str = "cpu"
    """Device: cpu or cuda."""
    output: Path = Path("runs/bench-attention.jsonl")
    """Output file with a line for each measurement; the figure is saved next to it."""

    def __post_init__(self) -> None:
        check_names(only=(self.only, self.subjects))

    @property
    def subjects(self) -> dict[str, Subject]:
        """Subjects on the device by name, without claims on a GPU."""
        if not is_cuda(self.device):
            return SUBJECTS
        return {name: replace(subject, at_most=None) for name, subject in (SUBJECTS | CUDA_SUBJECTS).items()}

    def run(self) -> None:
        """Make missing measurements, print the table, and write numbers and figure."""
        points = list(self.points())
        Console(width=140).print(table(points, self.subjects))
        draw(points, self.output.with_suffix(".png"))
        Console().print(f"numbers: {self.output}, {self.output.with_suffix('.png')}")

    def points(self) -> Iterator[Point]:
        """Yield all measurements, each from a new process; on a GPU, all from this one."""
        for name in self.subjects:
            for length in self.lengths if name in (ALL_PAIRS, *(self.only or self.subjects)) else ():
                yield self.point(name, length)

    def point(self, name: str, length: int) -> Point:
        """Return the measurement of one subject at one length, from the output file if it is there."""
        key = f"{name}, {length} tokens, the fastest of {self.repeats}"
        job = partial(measure, name, length, self.repeats, self.device)
        if is_cuda(self.device):
            (result,) = run_missing_here({f"{key}, {self.device}": job}, self.output).values()
        else:
            (result,) = run_missing({key: job}, 1, self.output).values()
        return Point(**result)


def measure(name: str, length: int, repeats: int, device: str) -> Point:
    """Measure one subject at one length."""
    torch.manual_seed(0)
    gc.collect()  # memory of earlier subjects, if they were measured in this process
    subject = (SUBJECTS | CUDA_SUBJECTS)[name]
    attend = subject.build(length).to(device)
    x = torch.randn(1, length, HEADS * SIZE).to(device).requires_grad_()
    attend(x[:, : subject.begins_with]).sum().backward()
    baseline = reset_peak(device)
    size = 0 if name.startswith(OTHERS) else length * (HEADS * SIZE) ** 2
    with float32_products(size, device):  # as in an agent
        seconds = min([timed_pass(attend, x, subject.layers, device) for _ in range(2 + repeats)][2:])
    return Point(name, length, seconds, peak(device) - baseline)


def timed_pass(attend: nn.Module, x: Tensor, layers: int, device: str) -> float:
    """Return the seconds of forward and backward pass of a layer, the mean of ``layers`` that take turns."""
    start = now(device, time.process_time)
    for _ in range(layers):
        attend(x).square().mean().backward()
    return (now(device, time.process_time) - start) / layers


def reset_peak(device: str) -> int:
    """Return the peak memory until now; on a GPU it is reset to the current memory before."""
    if is_cuda(device):
        torch.cuda.reset_peak_memory_stats(device)
    return peak(device)


def peak(device: str) -> int:
    """Return the peak memory in bytes: of the process, or of the tensors on a GPU since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if is_cuda(device) else peak_bytes()


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


def table(points: Sequence[Point], subjects: Mapping[str, Subject]) -> Table:
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
            f"{milliseconds(p.seconds)} ms, {dense[p.length] / p.seconds:.1f} x, {p.bytes / 1e6:.0f} MB"
            for p in own
        ]
        result.add_row(name, *cells, f"{exponent(own):.2f}", ", ".join(claims(subjects[name], own, dense)))
    return result


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with decimals if it is short."""
    return f"{1e3 * seconds:.{0 if seconds >= 0.01 else 2}f}"


def claims(subject: Subject, own: Sequence[Point], dense: dict[int, float]) -> Iterator[str]:
    """Yield the claims about a subject, and mark those that are violated."""
    if subject.at_most is None:
        return
    yield f"{subject.at_most:.2f}" + (" missed" if exponent(own) > subject.at_most else "")
    slower = [p.length for p in own if p.length >= subject.faster_from and p.seconds > dense[p.length]]
    if slower:
        yield f"slower at {max(slower):,}"


def draw(points: Sequence[Point], path: Path) -> None:
    """Plot time over the length: patterns, and kernels, each with dense attention; packages are left out."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 5), sharey=True)
    for kind, panel in zip(("pattern", "kernel"), panels, strict=True):
        draw_lines(panel, [point for point in points if kind_of(point.name) in (None, kind)])
        panel.set(xlabel="tokens", title=f"{kind}s")
    panels[0].set(ylabel="forward and backward pass, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_lines(panel: Axes, points: Sequence[Point]) -> None:
    """Draw a line for each subject, with its own color and marker; packages are left out."""
    own = {name: own for name, own in by_name(points).items() if not name.startswith("package")}
    for number, (name, measured) in enumerate(own.items()):
        panel.loglog(
            [point.length for point in measured],
            [1e3 * point.seconds for point in measured],
            color="black" if name == ALL_PAIRS else f"C{number}" if number < 10 else LIGHT(2 * number - 19),
            marker=MARKERS[number % len(MARKERS)],
            label=name,
        )
    panel.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def kind_of(name: str) -> str | None:
    """Return the axis of the technique that the name of a subject contains, None if there is none."""
    words = {word.strip(",") for word in name.split()}
    return next((axis for axis in ("pattern", "kernel") if words & {*TECHNIQUES[axis]}), None)
