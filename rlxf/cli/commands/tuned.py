"""``rlxf tuned``: list the tuned settings of tasks, or print those of one task."""

from collections.abc import Callable
from functools import partial

from tyro.conf import Positional

from rlxf.cli.options import Command, options


@options
class Tuned(Command):
    """List the tuned settings of tasks that "--tuned NAME" of a command uses, or print one of them.

    With a name, the settings file is printed, as a template for yours: rlxf tuned tmaze-250 > own.toml, and
    then rlxf train gtrxl --config own.toml. Its first lines name the command. Settings of the commands that
    train on datasets need --dataset, too.

    Example: rlxf tuned tmaze-250
    """

    name: Positional[str | None] = None
    """Name of the settings. None lists all of them."""

    def prepare(self) -> Callable[[], None]:
        """Check the name, and return the function that prints."""
        from rlxf.cli.output import print_out
        from rlxf.tuned import settings_text

        if self.name is None:
            return _print_list
        return partial(print_out, settings_text(self.name))


def _print_list() -> None:
    from rich.table import Column

    from rlxf.cli.output import print_out
    from rlxf.tuned import COMMANDS, description, tuned_files
    from rlxf.utils.tables import Table

    for command in COMMANDS:
        title = f"Tuned settings of rlxf {command}"
        table = Table(Column("name", no_wrap=True), "task", "result", title=title)
        for name, file in tuned_files(command).items():
            task, result, *_ = description(file)
            table.add_row(name, task, result)
        print_out(table)
