"""``rlxf resume``: resume an interrupted run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from tyro.conf import Positional

from rlxf.cli.command_table import COMMANDS

PROGRAM = "program"
"""Key in ``config.json`` with the name of the program that started a run, if it was not rlxf."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume an interrupted run of "rlxf train" or "rlxf pretrain".

    The training continues from the newest intact checkpoint, with bitwise the same results as without the
    interruption on the same machine. Log entries after this checkpoint are removed and written again. A run
    without any checkpoint starts from the beginning. After the last update, only missing stages such as the
    evaluation are done. A complete run is not changed. Under torchrun the number of processes may differ from
    that of the start; then the results are equal up to rounding.

    Example: rlxf resume runs/dt-rlxf-cartpole-mixed-v0-0
    """

    run: Positional[Path]
    """Folder of the run."""
    trust: bool = False
    """Trust the authors of the run and of its data.
    The module that their environment names is imported, and its arguments and wrappers are used.
    Without this flag, only registered environments are used."""
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds, and progress bars."""
    quiet: bool = False
    """Print only warnings, errors and the final result, without settings and progress."""

    def prepare(self) -> Callable[[], None]:
        """Read the options of the run, load its checkpoint, and return the training to run."""
        from rlxf.cli.run_loading import GTRXL, OFFLINE, PRETRAINING
        from rlxf.cli.training_session import check_memory, check_types
        from rlxf.training import RunFolder

        run = RunFolder.reopen(self.run)
        if "teacher" in run.config:
            raise ValueError(f"{self.run} is a run of rlxf distill, which cannot be resumed: distill again")
        commands = {GTRXL: "train gtrxl", OFFLINE: "train dt", PRETRAINING: "pretrain"}
        if PROGRAM in run.config:
            raise ValueError(
                f"{self.run} was made by {run.config[PROGRAM]}, which saves no checkpoints to resume from; "
                f"run it again, or evaluate the run: rlxf evaluate {self.run}"
            )
        command = commands.get(run.config.get("agent", ""))
        if command is None:
            raise ValueError(
                f"{self.run} is a run of agent {run.config.get('agent')!r}; only runs of rlxf train gtrxl, "
                f"rlxf train dt and rlxf pretrain can be resumed"
            )
        options = resolve_name(COMMANDS[command])
        check_types(options, run)
        training = options.of_run(run, self.progress_bar, self.quiet, trust=self.trust)
        check_memory(run, training.core, training.learner)
        work: Callable[[], None] = training.prepare_again(run)
        return work
