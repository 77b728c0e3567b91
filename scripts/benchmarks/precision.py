"""CPU time of updates in float32 and in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.offline_setting import Setting
from benchmarks.products import Work, minibatches
from benchmarks.shapes import SMALL, cleanrl_shape
from benchmarks.speed import LIGHT, TMAZE
from rlxf import DecisionTransformer
from rlxf.agents.common.precision import PRECISIONS, Precision

UPDATES = 5
"""Updates of a Decision Transformer in a round."""
Part = Callable[..., Work]
"""Builds a part of a training; takes ``precision``."""


@dataclass
class UpdatePrecision:
    """Milliseconds of minibatches and updates in float32 and in bfloat16.

    Both alternate in this process with one thread, and the lowest CPU time of the rounds counts. On
    processors without instructions for bfloat16, it is emulated. The dataset is read from
    MINARI_DATASETS_PATH.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    rounds: int = 4
    """Rounds with each precision, after one for warm-up."""

    def run(self) -> None:
        """Measure and print the table."""
        torch.set_num_threads(1)
        table = Table("part", *(f"{each}, ms" for each in PRECISIONS), "ratio", title=instructions())
        for part in self.parts():
            name, (float32, mixed) = self.measure(part)
            table.add_row(name, f"{float32:.1f}", f"{mixed:.1f}", f"{float32 / mixed:.2f}")
        Console(width=120).print(table)

    def parts(self) -> list[Part]:
        """Return the parts: minibatches of small and of large networks, and updates of trajectories."""
        shapes = {
            "2 layers of 64, GRU gates": (TMAZE, SMALL),
            "3 layers of 384, plain residuals": (LIGHT, cleanrl_shape(gated=False)),
            "3 layers of 384, GRU gates": (LIGHT, cleanrl_shape(gated=True)),
        }
        online = [partial(minibatches, name, *shape) for name, shape in shapes.items()]
        compiled = [
            partial(minibatches, f"{name}, compiled", *shape, compile=True) for name, shape in shapes.items()
        ]
        offline = [partial(self.offline_update, *sizes) for sizes in ((128, 3), (512, 4))]
        return [*online, *compiled, *offline]

    def offline_update(self, width: int, layers: int, precision: Precision) -> Work:
        """Return updates of a Decision Transformer with batches of 64 windows of 20 steps."""
        options = Setting(width, layers).arguments()
        agent = DecisionTransformer(self.dataset, seed=0, device="cpu", precision=precision, **options)
        name = f"update of DecisionTransformer, {layers} layers of {width}"
        return Work(name, lambda: agent.learn(UPDATES), UPDATES)

    def measure(self, part: Part) -> tuple[str, tuple[float, float]]:
        """Return the name of a part and its milliseconds in both precisions."""
        works = [part(precision=precision) for precision in PRECISIONS]
        rounds = [[work.milliseconds() for work in works] for _ in range(1 + self.rounds)]
        float32, mixed = map(min, zip(*rounds[1:], strict=True))
        return works[0].name, (float32, mixed)


def instructions() -> str:
    """Return the instructions of this processor for bfloat16, as torch reports them."""
    found = [name for name, has in torch.cpu.get_capabilities().items() if "bf16" in name and has]
    return f"Instructions for bfloat16: {', '.join(found) or 'none'}"
