"""``rlxf resume``: go on with a run that was cut off."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from tyro.conf import Positional

from rlxf.cli.commands import COMMANDS

PROGRAM = "program"
"""In ``config.json``, the name of the program that started a run, if it was not rlxf."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run of "rlxf train" or "rlxf pretrain" that was stopped, killed, or ended by an error.

    It goes on from its newest whole checkpoint as if nothing had happened: on the same machine the same
    weights come out, to the bit. The log goes on, too; what was logged after the checkpoint is removed and
    comes again. A run without any checkpoint begins again. What is left to do after the last update, such as
    the evaluation, is done. A run that is complete stays as it is. Under torchrun several processes go on
    with it, as many as began it or another number; then it is the same but for rounding.

    Example: rlxf resume runs/dt-rlxf-cartpole-mixed-v0-0
    """

    run: Positional[Path]
    """Folder of the run."""
    trust: bool = False
    """Trust the authors of the run and its data: the module that their environment names is imported, and its
    arguments and wrappers are used. Without this flag only registered environments are used."""
    progress_bar: bool = True
    """Show progress: steps, returns and losses every few seconds, and bars."""
    quiet: bool = False
    """Print warnings, errors and the final result only: neither the settings nor progress."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        from rlxf.cli.players import GTRXL, OFFLINE
        from rlxf.cli.pretrained import PRETRAINING
        from rlxf.cli.resumable import check_memory, check_types
        from rlxf.training import RunFolder

        run = RunFolder.reopen(self.run)
        if "teacher" in run.config:
            raise ValueError(f"{self.run} is of rlxf distill, which cannot be resumed: distill again")
        commands = {GTRXL: "train gtrxl", OFFLINE: "train dt", PRETRAINING: "pretrain"}
        if PROGRAM in run.config:
            raise ValueError(
                f"{self.run} was made by {run.config[PROGRAM]}, which keeps nothing to resume from; run that "
                f"again, or see: rlxf evaluate {self.run}"
            )
        command = commands.get(run.config.get("agent", ""))
        if command is None:
            raise ValueError(
                f"{self.run} is of agent {run.config.get('agent')!r}; only a run of rlxf train gtrxl, rlxf "
                f"train dt or rlxf pretrain can be resumed"
            )
        options = resolve_name(COMMANDS[command])
        check_types(options, run)
        begun = options.of_run(run, self.progress_bar, self.quiet, trust=self.trust)
        check_memory(run, begun.core, begun.learner)
        work: Callable[[], None] = begun.prepare_again(run)
        return work
