"""What was learned from data goes into the folder of its run."""

from rlxf.agents.decision_transformer.window_learner import WindowLearner
from rlxf.cli.screen import show
from rlxf.training import RunFolder


def keep(agent: WindowLearner, run: RunFolder) -> None:
    """Save what was learned. Without a single update that is nothing, and the run's folder goes."""
    if agent.num_timesteps == 0:
        agent.logger.close()
        run.discard()
        show(f"nothing was learned yet: {run.path} is removed")
        return
    agent.save(run.checkpoint)
    show(f"checkpoint: {run.checkpoint}")
