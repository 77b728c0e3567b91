"""Results of a run: its last and best checkpoints, reports of evaluations, and messages for errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf.cli.error_reporting import ReceivedSignal, exit_with
from rlxf.cli.options.env_options import trust_option
from rlxf.cli.output import print_out
from rlxf.evaluation import Report, TargetSweep
from rlxf.training import CheckpointError, NumericalError, ResumeError, RunFolder, save_normalizer
from rlxf.training.distributed import process_group
from rlxf.utils.errors import FaultyEnvironmentError

DATASTORE_SUFFIX = ", remembering"
"""Suffix of the name of a checkpoint with a datastore of trajectories."""
FOLDERS = {
    "last": "evaluation",
    "best": "evaluation-best",
    f"last{DATASTORE_SUFFIX}": "evaluation-remembering",
    f"best{DATASTORE_SUFFIX}": "evaluation-best-remembering",
}
"""Checkpoint name -> subfolder of its evaluation logs; each is a separate run in TensorBoard."""


def checkpoints_of(run: RunFolder) -> dict[str, Path]:
    """Return name -> path of the checkpoints: "last", and "best" if evaluations selected one."""
    last = {"last": run.checkpoint}
    return last | {"best": run.best} if run.best.is_file() else last


def select_checkpoints(run: RunFolder, which: str) -> dict[str, Path]:
    """Return name -> path of the selected checkpoints of a run.

    Args:
        run: the run.
        which: "last", "best", or "all" for those of `checkpoints_of`.

    Raises:
        FileNotFoundError: if "best" is requested and there is none.
    """
    files = checkpoints_of(run)
    if which == "all":
        return files
    if which not in files:
        raise FileNotFoundError(
            f"{run.path} has no {run.best.name}: it was trained without evaluations; evaluate the last "
            f"checkpoint with --checkpoint last"
        )
    return {which: files[which]}


def plot_targets(reports: Mapping[str, Report | TargetSweep], folders: Mapping[str, Path]) -> None:
    """Plot achieved against requested returns of reports with several targets, and print the paths.

    Args:
        reports: checkpoint name -> report.
        folders: checkpoint name -> folder of its plot, ``targets.png``.
    """
    for name, report in reports.items():
        if isinstance(report, TargetSweep) and len(report.reports) > 1:
            path = folders[name] / "targets.png"
            report.plot(path)
            print_out(f"plot of requested and achieved returns: {path}")


@contextmanager
def error_context(run: RunFolder) -> Iterator[None]:
    """Add the folder of the run, and how to resume it, to errors of the disk, environments and numerics.

    The folder is removed if a signal ends the process before anything was saved.

    Raises:
        OSError: replaces an `OSError`.
        SystemExit: with status 2 and one line, replaces errors for values that are not finite and for files
            from which the run cannot be resumed.
    """
    try:
        yield
    except OSError as error:
        raise OSError(_failure(run, error)) from error
    except (FaultyEnvironmentError, NumericalError) as error:
        exit_with(_failure(run, error), 2)
    except (CheckpointError, ResumeError) as error:
        exit_with(str(error), 2)
    except (ReceivedSignal, KeyboardInterrupt):
        if (
            process_group().is_main
            and run.path.exists()
            and not run.checkpoints.files()
            and not run.checkpoint.is_file()
        ):
            run.discard()
        raise


def _failure(run: RunFolder, error: Exception) -> str:
    remedies = {
        f"resume with: rlxf resume {run.path}{trust_option(run.config)}": bool(run.checkpoints.files()),
        f"start a new run from its weights with --pretrained {run.path}": run.checkpoint.is_file(),
    }
    advice = ", or ".join(remedy for remedy, available in remedies.items() if available)
    return f"the run in {run.path} failed: {error}.{advice and f' Fix the cause, then {advice}'}"


def save_agent(agent: BaseAlgorithm, run: RunFolder) -> None:
    """Save the agent and its normalization statistics. With several processes, only one of them saves.

    If the agent made no update, nothing is saved, and the folder of the run is removed. The folder stays if
    it has checkpoints: loading them failed, or the resumed run was stopped before its first update.
    """
    if not process_group().is_main:
        return
    if agent._n_updates == 0:
        _discard(agent, run)
        return
    agent.save(run.checkpoint)
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.normalizer, normalizer)
    print_out(f"checkpoint: {run.checkpoint}")


def _discard(agent: BaseAlgorithm, run: RunFolder) -> None:
    agent.logger.close()
    if not run.checkpoints.files():
        run.discard()
        print_out(f"no update was made: {run.path} is removed")
