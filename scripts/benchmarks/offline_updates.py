"""Time of an update of each agent that is trained offline, on a GPU with and without CUDA graphs."""

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import is_cuda, machine, now
from benchmarks.update_clock import UpdateClock
from rlxf import BehaviorCloning, DecisionTransformer, ReturnConditionedMLP
from rlxf.agents.decision_transformer import HighestValueReturn, MaxReturn
from rlxf.agents.offline.objectives import QRegularized
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.data import Trajectories, load_trajectories

AGENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "BehaviorCloning": (BehaviorCloning, {}),
    "ReturnConditionedMLP": (ReturnConditionedMLP, {}),
    "DecisionTransformer": (DecisionTransformer, {}),
    "DecisionTransformer, averaged weights": (DecisionTransformer, {"weight_averaging": 0.999}),
    "DecisionTransformer, MaxReturn": (DecisionTransformer, {"conditioning": MaxReturn()}),
    "DecisionTransformer, QRegularized and HighestValueReturn": (
        DecisionTransformer,
        {"objective": QRegularized(), "conditioning": HighestValueReturn()},
    ),
    "MaskedPretraining": (MaskedPretraining, {}),
}
"""Name of an agent -> its class and its settings besides the defaults."""


@dataclass
class OfflineUpdates:
    """Milliseconds of an update of each agent that is trained offline, with its default sizes.

    On a GPU, agents are trained with and without ``cuda_graphs``, and the program waits for the GPU after
    each update. Times are medians. The first update includes the capture.
    """

    dataset: str = "rlxf/hopper/medium-v0"
    """Minari id."""
    device: str = "cpu"
    """Device: cpu or cuda."""
    updates: int = 120
    """Updates of each agent; the first sixth is warm-up."""

    def run(self) -> None:
        """Measure and print the table."""
        data = load_trajectories(self.dataset)
        name = machine()["gpu"] if is_cuda(self.device) else "the CPU"
        columns = ("agent", "CUDA graphs", "ms per update", "ms of the first update")
        table = Table(*columns, title=f"Updates of offline agents on {name}")
        for agent in AGENTS:
            for graphs in (False, True) if is_cuda(self.device) else (False,):
                first, later = self.measure(agent, data, graphs)
                table.add_row(agent, str(graphs), f"{1000 * later:.2f}", f"{1000 * first:.0f}")
        Console(width=120).print(table)

    def measure(self, name: str, data: Trajectories, graphs: bool) -> tuple[float, float]:
        """Return the seconds of the first update of an agent, and the median of those after the warm-up."""
        agent_class, settings = AGENTS[name]
        agent = agent_class(data, seed=0, device=self.device, cuda_graphs=graphs, **settings)
        clock = UpdateClock(partial(now, self.device))
        agent.learn(self.updates, clock)
        return clock.durations[0], median(clock.durations[self.updates // 6 :])
