"""``rlxf resume``: resume an interrupted run."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tyro.conf import Positional

from rlxf.cli.commands import COMMANDS
from rlxf.cli.options import Command, Quiet, Trust, options

if TYPE_CHECKING:
    from rlxf.cli.training_command import TrainingCommand

PROGRAM = "program"
"""Key in ``config.json`` with the name of the program that started a run, if it was not rlxf."""


@options
class Resume(Command):
    """Resume an interrupted run of "rlxf train" or "rlxf pretrain".

    The training continues from the newest intact checkpoint. On the same machine, the results are bitwise
    equal to those of an uninterrupted run. Log entries after this checkpoint are removed and written again. A
    run without any checkpoint starts from the beginning. After the last update, only the later
    stages, such as the evaluation, are repeated. A complete run is not changed. Under torchrun the number of
    processes may differ from that at the start. In this case, the results are equal up to rounding.

    Example: rlxf resume runs/dt-cartpole-random-v0-0
    """

    run: Positional[Path]
    """Folder of the run."""
    trust: Trust = False
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds, and progress bars."""
    quiet: Quiet = False

    def prepare(self) -> Callable[[], None]:
        """Read the options of the run, load its checkpoint, and return the training to run."""
        from rlxf.cli.runs import CLONING, GTRXL, OFFLINE, PRETRAINING, RVS, check_config_types
        from rlxf.training import RunFolder

        run = RunFolder.reopen(self.run)
        if "teacher" in run.config:
            raise ValueError(f"{self.run} is a run of rlxf distill, which cannot be resumed: distill again")
        if PROGRAM in run.config:
            raise ValueError(
                f"{self.run} was made by {run.config[PROGRAM]}, which saves no checkpoints to resume from; "
                f"run it again, or evaluate the run: rlxf evaluate {self.run}"
            )
        words = {GTRXL: "train gtrxl", OFFLINE: "train dt", PRETRAINING: "pretrain"}
        words |= {CLONING: "train bc", RVS: "train rvs"}
        agent = run.config.get("agent", "")
        if agent not in words:
            raise ValueError(
                f"{self.run} is a run of agent {agent!r}; only runs of rlxf train gtrxl, rlxf train dt and "
                f"rlxf pretrain can be resumed"
            )
        command: type[TrainingCommand] = resolve_name(COMMANDS[words[agent]])
        check_config_types(command, run)
        if not self.trust:
            command.check_trust(run)
        training = command.of_run(run, self.progress_bar, self.quiet)
        training.check_memory(run)
        return (training.with_trust() if self.trust else training).prepare_resume(run)
