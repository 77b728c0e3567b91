"""Benchmarks: `speed`, `learning`, `offline` and `returns`; each explains itself with --help."""

import tyro
from benchmarks.learning import Learning
from benchmarks.offline import Offline
from benchmarks.returns import Returns
from benchmarks.speed import Speed


def main() -> None:
    """Run the benchmark that the command line names."""
    tyro.extras.subcommand_cli_from_dict(
        {"speed": Speed, "learning": Learning, "offline": Offline, "returns": Returns}
    ).run()


if __name__ == "__main__":
    main()
