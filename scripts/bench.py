"""Benchmarks, from `speed` to `faults`; each explains itself with --help."""

import tyro
from benchmarks.attention import Attention
from benchmarks.context import Context
from benchmarks.defaults import Defaults
from benchmarks.depth import DepthBench
from benchmarks.distilling import Distilling
from benchmarks.faults import Faults
from benchmarks.learning import Learning
from benchmarks.memories import Memories
from benchmarks.offline import Offline
from benchmarks.online import Online
from benchmarks.pretraining import Pretraining
from benchmarks.ranks import Ranks
from benchmarks.remembering import Remembering
from benchmarks.returns import Returns
from benchmarks.reversible import ReversibleLayers
from benchmarks.speed import Speed


def main() -> None:
    """Run the benchmark that the command line names."""
    tyro.extras.subcommand_cli_from_dict(
        {
            "speed": Speed,
            "attention": Attention,
            "learning": Learning,
            "defaults": Defaults,
            "memories": Memories,
            "offline": Offline,
            "returns": Returns,
            "online": Online,
            "context": Context,
            "reversible": ReversibleLayers,
            "remembering": Remembering,
            "pretraining": Pretraining,
            "distilling": Distilling,
            "depth": DepthBench,
            "faults": Faults,
            "ranks": Ranks,
        }
    ).run()


if __name__ == "__main__":
    main()
