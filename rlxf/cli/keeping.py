"""What was learned goes into the folder of its run."""

from stable_baselines3.common.base_class import BaseAlgorithm

from rlxf.cli.screen import show
from rlxf.training import RunFolder, save_normalizer


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
