"""``rlxf tuned``: list the tuned settings of tasks, or print those of one task."""

from collections.abc import Callable
from functools import partial

from tyro.conf import Positional

from rlxf.cli.options import Command, options


@options
class Tuned(Command):
    """List the tuned settings of tasks that "rlxf train gtrxl --tuned NAME" uses, or print one of them.

    With a name, the settings file is printed, as a start for an own one: rlxf tuned NAME > own.toml, and then
    rlxf train gtrxl --config own.toml

    Example: rlxf tuned tmaze-250
    """

    name: Positional[str | None] = None
    """Name of the settings. None lists all of them."""

    def prepare(self) -> Callable[[], None]:
        """Check the name, and return the function that prints."""
        from rlxf.cli.output import print_out
        from rlxf.tuned import tuned_file

        if self.name is None:
            return _print_list
        return partial(print_out, tuned_file("train gtrxl", self.name).read_text(encoding="utf-8").rstrip())


def _print_list() -> None:
    from rich.table import Column

    from rlxf.cli.output import print_out
    from rlxf.tuned import description, tuned_files
    from rlxf.utils.tables import Table

    name_column = Column("name", no_wrap=True)
    table = Table(name_column, "task", "result", title="Tuned settings of rlxf train gtrxl")
    for name, file in tuned_files("train gtrxl").items():
        task, result, *_ = description(file)
        table.add_row(name, task, result)
    print_out(table)
