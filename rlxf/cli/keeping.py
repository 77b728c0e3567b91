"""Saving of the agent at the end of a training, and errors that name the run."""

from collections.abc import Iterator
from contextlib import contextmanager

from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf.cli.mistakes import Ended, leave
from rlxf.cli.screen import show
from rlxf.cli.task import trust_option
from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.training import CheckpointError, NumericalError, ResumeError, RunFolder, save_normalizer
from rlxf.training.joining import here


@contextmanager
def naming(run: RunFolder) -> Iterator[None]:
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
        leave(_failure(run, error), 2)
    except (CheckpointError, ResumeError) as error:
        leave(str(error), 2)
    except (Ended, KeyboardInterrupt):
        if (
            here().writes
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


def keep(agent: BaseAlgorithm, run: RunFolder) -> None:
    """Save the agent and its normalization statistics. With several processes, only one of them saves.

    If the agent made no update, nothing is saved, and the folder of the run is removed. The folder stays if
    it has checkpoints: loading them failed, or the resumed run was stopped before its first update.
    """
    if not here().writes:
        return
    if agent._n_updates == 0:
        _discard(agent, run)
        return
    agent.save(run.checkpoint)
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.normalizer, normalizer)
    show(f"checkpoint: {run.checkpoint}")


def _discard(agent: BaseAlgorithm, run: RunFolder) -> None:
    agent.logger.close()
    if not run.checkpoints.files():
        run.discard()
        show(f"no update was made: {run.path} is removed")
