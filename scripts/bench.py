"""Benchmarks: `speed` and `learning`; each explains itself with --help."""

import tyro
from benchmarks.learning import Learning
from benchmarks.speed import Speed


def main() -> None:
    """Run the benchmark that the command line names."""
    tyro.extras.subcommand_cli_from_dict({"speed": Speed, "learning": Learning}).run()


if __name__ == "__main__":
    main()
