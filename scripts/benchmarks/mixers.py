"""Cost of recurrent mixers: acting late in an episode, size of the state, and learning from long segments."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.acting import processor_seconds
from benchmarks.result_cache import run_missing
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import GRUGate, TokenIndex, Transformer, TransformerSpec
from rlxf.attention.registry import TECHNIQUES

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
STEPS = (10, 100, 1000, 10_000)
CALLS = 200
"""Calls whose median is the time of an acting step."""
XL_MEMORY = 1024
"""Memory of the Gated Transformer-XL in the table, for comparison."""


@dataclass(frozen=True)
class Cost:
    """Cost of one core with two layers of 64 features, on one thread.

    Args:
        name: name of the recurrence, or XL.
        weights: number of parameters.
        acting: step of an episode -> median milliseconds of an acting step of one environment.
        state: bytes of the state of one environment.
        learning: length -> CPU seconds of a forward and a backward pass over one segment.
    """

    name: str
    weights: int
    acting: dict[int, float]
    state: int
    learning: dict[int, float]

    @property
    def exponent(self) -> float:
        """Slope of log time over log length."""
        lengths, seconds = zip(*sorted(self.learning.items()), strict=True)
        return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


@dataclass
class Mixers:
    """Measure time per acting step, bytes of the state and learning time of each recurrent mixer."""

    only: tuple[str, ...] = ()
    """Names of the mixers; default: all, and a Gated Transformer-XL."""
    repeats: int = 3
    """Repetitions of each learning time, of which the fastest counts."""
    output: Path = Path("runs/bench-mixers.jsonl")
    """Output file with all results; completed ones are not repeated."""

    def run(self) -> None:
        """Make missing measurements and print the table."""
        names = self.only or ("XL", *TECHNIQUES["recurrence"])
        measures = (partial(measure, name, self.repeats) for name in names)
        jobs = dict(zip((f"{name}, the fastest of {self.repeats}" for name in names), measures, strict=True))
        results = run_missing(jobs, 1, self.output)
        Console(width=160).print(table([read(results[key]) for key in jobs]))


def read(result: dict[str, Any]) -> Cost:
    """Return a result of `measure` from JSON, whose keys are texts."""
    numbers = {key: {int(n): x for n, x in result[key].items()} for key in ("acting", "learning")}
    return Cost(**result | numbers)


def core_of(name: str) -> TransformerSpec:
    """Return the core with a recurrence, or the Gated Transformer-XL for "XL"."""
    if name == "XL":
        return gtrxl(XL_MEMORY)
    return TransformerSpec(recurrence=TECHNIQUES["recurrence"][name](), residual=GRUGate(bias=2.0))


def measure(name: str, repeats: int) -> Cost:
    """Measure one core."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = core_of(name).build()
    acting, state = acting_costs(model)
    learning = {length: learning_seconds(model, length, repeats) for length in LENGTHS}
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Cost(name, weights, acting, state, learning)


@torch.inference_mode()
def acting_costs(model: Transformer) -> tuple[dict[int, float], int]:
    """Return milliseconds by step of an episode, and the bytes of the state of one environment."""
    start = model.initial_state(1)
    cache, x, costs = model.cache(start, start.index.shape[1] + 1), torch.randn(1, model.spec.width), {}
    for step in range(max(STEPS) + 1):
        index = TokenIndex.range(1, 1, start=step)
        if step in STEPS:
            calls = [processor_seconds(partial(model.step, x, index, cache.copy())) for _ in range(CALLS)]
            costs[step] = 1000 * median(calls)
        model.step(x, index, cache)
    return costs, state_bytes(model)


def state_bytes(model: Transformer) -> int:
    """Return the bytes of the state of one environment: stored inputs of a memory, and recurrent states."""
    state = model.initial_state(1)
    recurrent = [] if state.recurrent is None else list(state.recurrent.named_tensors().values())
    return state.hidden.nbytes + sum(x.nbytes for x in recurrent)


def learning_seconds(model: Transformer, length: int, repeats: int) -> float:
    """Return the CPU time of a forward and a backward pass over a segment of one episode."""
    x, index, times = torch.randn(1, length, model.spec.width), TokenIndex.range(1, length), []
    for _ in range(1 + repeats):
        start = time.process_time()
        model.outputs(x, index).square().mean().backward()
        times.append(time.process_time() - start)
    return min(times[1:])


def table(costs: Sequence[Cost]) -> Table:
    """Return a table with a row for each core."""
    acting, lengths = (f"acting at {step:,}, ms" for step in STEPS), (f"{n:,} tokens, s" for n in LENGTHS)
    result = Table("core", "weights", "state, bytes", *acting, *lengths, "exponent")
    for row in rows(costs):
        result.add_row(*row)
    return result


def rows(costs: Sequence[Cost]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each core."""
    for cost in costs:
        acts = (f"{cost.acting[step]:.2f}" for step in STEPS)
        learns = (f"{cost.learning[length]:.3f}" for length in LENGTHS)
        yield cost.name, f"{cost.weights:,}", f"{cost.state:,}", *acts, *learns, f"{cost.exponent:.2f}"
