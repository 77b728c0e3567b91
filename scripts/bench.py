"""Command line of the benchmarks; --help describes each of them."""

from collections.abc import Sequence
from typing import Any

import tyro
from benchmarks.ablation import Ablation
from benchmarks.acting import Acting
from benchmarks.attention import Attention
from benchmarks.checkpoints import Checkpoints
from benchmarks.context import Context
from benchmarks.cores import Cores
from benchmarks.corridors import Corridors
from benchmarks.curriculum import Curriculum
from benchmarks.defaults import Defaults
from benchmarks.depth import DepthBench
from benchmarks.devices import Devices
from benchmarks.distillation import Distillation
from benchmarks.export import Export
from benchmarks.faults import Faults
from benchmarks.learning import Learning
from benchmarks.memory import MemoryBench
from benchmarks.mixers import Mixers
from benchmarks.offline import Offline
from benchmarks.offline_ablation import OfflineAblation
from benchmarks.offline_updates import OfflineUpdates
from benchmarks.online import Online
from benchmarks.phases import Phases
from benchmarks.precision import UpdatePrecision
from benchmarks.pretraining import Pretraining
from benchmarks.products import Products
from benchmarks.ranking import Ranking
from benchmarks.ranks import Ranks
from benchmarks.retrieval import Retrieval
from benchmarks.returns import Returns
from benchmarks.reversible import ReversibleLayers
from benchmarks.speed import Speed
from benchmarks.stitching import Stitching
from benchmarks.targets import Targets
from benchmarks.tensors import Tensors
from benchmarks.updates import Updates

BENCHMARKS: dict[str, Any] = {
    "speed": Speed,
    "phases": Phases,
    "tensors": Tensors,
    "products": Products,
    "precision": UpdatePrecision,
    "acting": Acting,
    "attention": Attention,
    "learning": Learning,
    "defaults": Defaults,
    "ablation": Ablation,
    "memory": MemoryBench,
    "mixers": Mixers,
    "cores": Cores,
    "offline": Offline,
    "offline-ablation": OfflineAblation,
    "offline-updates": OfflineUpdates,
    "returns": Returns,
    "targets": Targets,
    "checkpoints": Checkpoints,
    "ranking": Ranking,
    "online": Online,
    "context": Context,
    "corridors": Corridors,
    "curriculum": Curriculum,
    "stitching": Stitching,
    "reversible": ReversibleLayers,
    "retrieval": Retrieval,
    "pretraining": Pretraining,
    "distillation": Distillation,
    "depth": DepthBench,
    "devices": Devices,
    "export": Export,
    "faults": Faults,
    "ranks": Ranks,
    "updates": Updates,
}


def main() -> None:
    """Run the benchmark that is named on the command line."""
    parse().run()


def parse(args: Sequence[str] | None = None) -> Any:
    """Return the benchmark for command-line arguments, with its options; None: ``sys.argv``."""
    return tyro.extras.subcommand_cli_from_dict(BENCHMARKS, args=args)


if __name__ == "__main__":
    main()
