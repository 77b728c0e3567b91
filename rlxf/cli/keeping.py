"""What was learned goes into the folder of its run."""

from collections.abc import Iterator
from contextlib import contextmanager

from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf.cli.screen import show
from rlxf.training import RunFolder, save_normalizer


@contextmanager
def naming(run: RunFolder) -> Iterator[None]:
    """Where a disk fails amid a run, say which run that is, and how it goes on if it can.

    Raises:
        OSError: in place of one that was raised.
    """
    try:
        yield
    except OSError as error:
        how = f"Mend that, and go on with: rlxf resume {run.path}" if run.checkpoints.files() else ""
        raise OSError(f"the run in {run.path} broke off: {error}. {how}".rstrip()) from error


def keep(agent: BaseAlgorithm, run: RunFolder) -> None:
    """Save what was learned. Without a single update that is nothing, and the run's folder goes."""
    if agent._n_updates == 0:
        agent.logger.close()
        run.discard()
        show(f"nothing was learned yet: {run.path} is removed")
        return
    agent.save(run.checkpoint)
    normalizer = agent.get_vec_normalize_env()
    if normalizer is not None:
        save_normalizer(run.normalizer, normalizer)
    show(f"checkpoint: {run.checkpoint}")
