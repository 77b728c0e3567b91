"""Print how often the program waits for an accelerator: ``python -m tests.devices.counts``.

It is simulated, unless the environment variable ``RLXF_TEST_DEVICE`` is ``cuda``.
"""

import warnings
from collections.abc import Iterable

from gymnasium.vector import AutoresetMode
from rich.table import Table

from rlxf.utils.tables import Table as PlainTable
from tests.attention.specs import ALONE
from tests.devices import accelerator
from tests.devices.agents import GTRXL, OFFLINE, gtrxl_waits, offline_waits
from tests.devices.cores import waits
from tests.devices.tensor_envs import tmaze_waits


def agents() -> Table:
    """Return the table of the agents; a range shows that updates differ."""
    table = PlainTable("agent", "case", "step of all environments", "minibatch or update")
    for case in GTRXL:
        steps, minibatches = gtrxl_waits(case)
        table.add_row("GTrXLPPO", case, interval(steps), interval(minibatches))
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        steps, minibatches = tmaze_waits(mode, 4096)
        for name, ends in {"": False, ", an episode ends": True}.items():
            own = [count for is_end, count in steps if is_end == ends]
            table.add_row("GTrXLPPO", f"tensors, {mode.value}{name}", interval(own), interval(minibatches))
    for case, (agent, _) in OFFLINE.items():
        table.add_row(agent.__name__, case, "", interval(offline_waits(case)))
    return table


def techniques() -> Table:
    """Return the table of the techniques for which the program waits."""
    table = PlainTable("technique", "segment pass with gradient", "step")
    for name, spec in ALONE.items():
        learning, acting = waits(spec)
        if learning or acting:
            table.add_row(name, str(learning), "" if acting is None else f"{acting:.1f}")
    return table


def interval(counts: Iterable[int]) -> str:
    """Return the smallest and the largest count."""
    least, most = min(counts := list(counts)), max(counts)
    return str(least) if least == most else f"{least} to {most}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    accelerator.install()
    print(agents())
    print(techniques())
