"""``rlxf resume``: resume an interrupted run, or train a run for longer."""

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from tyro.conf import Positional

from rlxf.cli.options import Command, Quiet, Trust, options

if TYPE_CHECKING:
    from rlxf.cli.training_command import TrainingCommand
    from rlxf.training import RunFolder


@options
class Resume(Command):
    """Resume an interrupted run of "rlxf train" or "rlxf pretrain", or train it for longer.

    The training continues from the newest intact checkpoint. On the same machine, the results are bitwise
    equal to those of an uninterrupted run. Log entries after this checkpoint are removed and written again. A
    run without any checkpoint starts from the beginning. After the last update, only the later
    stages, such as the evaluation, are repeated. A complete run is not changed. Under torchrun the number of
    processes may differ from that at the start. In this case, the results are equal up to rounding.

    With --total-timesteps (gtrxl) or --updates (other agents), a run is trained up to this new total, even if
    it is complete. config.json then contains the new total. Schedules, a warm-up of a tenth of the training,
    and default intervals of evaluations are computed from the new total: a learning rate that has decayed
    rises again. With constant schedules and equal evaluation intervals, the weights are bitwise equal to
    those of a run with this total from the start.

    Example: rlxf resume runs/dt-cartpole-random-v0-0
    """

    run: Positional[Path]
    """Folder of the run."""
    total_timesteps: int | None = None
    """New total number of environment steps of a run of "rlxf train gtrxl", including those that were made.
    None means that of the run."""
    updates: int | None = None
    """New total number of updates of a run of another agent, including those that were made.
    None means that of the run."""
    trust: Trust = False
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds, and progress bars."""
    quiet: Quiet = False

    def prepare(self) -> Callable[[], None]:
        """Read the options of the run, load its checkpoint, and return the training to run."""
        from rlxf.cli.runs import TRAINING_COMMANDS, check_weights_trust, command_class
        from rlxf.training import RunFolder
        from rlxf.utils.names import short_repr
        from rlxf.utils.run_files import PROGRAM, TEACHER

        run = RunFolder.reopen(self.run)
        if TEACHER in run.config:
            raise ValueError(f"{self.run} is a run of rlxf distill, which cannot be resumed: distill again")
        if PROGRAM in run.config:
            use = "evaluate" if run.final_checkpoint.is_file() else "plot"
            raise ValueError(
                f"{self.run} was made by {run.config[PROGRAM]}, which saves no checkpoints to resume from; "
                f"run it again, or {use} the run: rlxf {use} {quote(str(self.run))}"
            )
        agent = run.config.get("agent", "")
        if agent not in TRAINING_COMMANDS:
            raise ValueError(
                f"{self.run} is a run of agent {short_repr(agent)}; only runs of rlxf train and rlxf "
                f"pretrain can be resumed"
            )
        command: type[TrainingCommand] = command_class(run)
        training = command.of_run(run, self.progress_bar, self.quiet)
        if not self.trust:
            command.check_trust(run)
            if not run.resume_checkpoints.files() and not run.final_checkpoint.is_file():
                check_weights_trust(run)
        training = self._extended(training, run)
        return (training.with_trust() if self.trust else training).prepare_resume(run)

    def _extended(self, training: "TrainingCommand", run: "RunFolder") -> "TrainingCommand":
        """Return the options of the run with the new total, if one is given."""
        totals = {"total_timesteps": self.total_timesteps, "updates": self.updates}
        total = totals.pop(training.total_name)
        ((other, wrong),) = totals.items()
        if wrong is not None:
            raise ValueError(
                f"--{other.replace('_', '-')} does not apply to {run.path}, a run of agent "
                f"{run.config['agent']!r}: use --{training.total_name.replace('_', '-')}"
            )
        return training if total is None else training.extended(run, total)
