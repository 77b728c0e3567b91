"""What was learned goes into the folder of its run."""

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
    """Where a disk, an environment or the numbers fail amid a run, say which, and how it goes on if it can.

    If a signal ends it before anything was saved, its folder is removed.

    Raises:
        OSError: in place of one that was raised.
        SystemExit: with 2 and one line, in place of a value that is not finite, or a file that it cannot go
            on from.
    """
    try:
        yield
    except OSError as error:
        raise OSError(_broken_off(run, error)) from error
    except (FaultyEnvironmentError, NumericalError) as error:
        leave(_broken_off(run, error), 2)
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


def _broken_off(run: RunFolder, error: Exception) -> str:
    ways = {
        f"go on with: rlxf resume {run.path}{trust_option(run.config)}": bool(run.checkpoints.files()),
        f"begin anew from its weights, with --pretrained {run.path}": run.checkpoint.is_file(),
    }
    how = ", or ".join(way for way, open_ in ways.items() if open_)
    return f"the run in {run.path} broke off: {error}.{how and f' Mend that, and {how}'}"


def keep(agent: BaseAlgorithm, run: RunFolder) -> None:
    """Save what was learned. Without a single update that is nothing, and the run's folder goes.

    A run that has checkpoints stays as it is then: it was not taken up, or stopped before its first update.
    Of several processes one does that.
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
        show(f"nothing was learned yet: {run.path} is removed")
