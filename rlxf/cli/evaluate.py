"""``rlxf evaluate``: play episodes with the agent of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from rlxf.cli.counts import check_counts
from rlxf.cli.screen import show
from rlxf.cli.task import Json, Task

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.agents.gtrxl import GTrXLPPO
    from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play whole episodes with the agent of a run and report its returns.

    The numbers also go to TensorBoard, in the folder "evaluation" of the run.

    Example: rlxf evaluate runs/gtrxl-rlxf-TMaze-v0-0 --episodes 500
    """

    run: Positional[Path]
    """Folder of the run."""
    episodes: int = 200
    """Number of episodes: 200 resolve a success rate to about 0.07."""
    env: str | None = None
    """Gymnasium id of another task with the same spaces; None is the one trained on."""
    env_kwargs: Json = field(default_factory=dict)
    """Arguments of the environment as a JSON object; without --env they change those trained with."""
    deterministic: bool = True
    """Take the most likely action instead of a sample."""
    n_envs: int = 32
    """Environments side by side, at most one per episode."""
    seed: int = 1_000_000
    """Of the environments; far from the seeds one trains with, so that generated levels are new."""
    progress_bar: bool = True
    """Show a progress bar."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        from rlxf.agents.gtrxl import GTrXLPPO
        from rlxf.training import RunFolder, load_normalizer

        check_counts(self, "episodes", "n_envs")
        run = RunFolder.open(self.run)
        env = self._task(run.config).make(min(self.n_envs, self.episodes), None)
        agent = GTrXLPPO.load(run.checkpoint, env=env, device=self.device)
        if run.config.get("normalize_observations", False):
            env = load_normalizer(run.normalizer, env)
        return partial(self._evaluate, agent, env, run)

    def _task(self, config: dict[str, Any]) -> Task:
        previous_reward = config.get("previous_reward", False)
        if self.env is not None:
            return Task(env=self.env, env_kwargs=self.env_kwargs, previous_reward=previous_reward)
        kwargs = config["env_kwargs"] | self.env_kwargs
        return Task(env=config["env"], env_kwargs=kwargs, previous_reward=previous_reward)

    def _evaluate(self, agent: "GTrXLPPO", env: "VecEnv", run: "RunFolder") -> None:
        from torch.utils.tensorboard import SummaryWriter

        from rlxf.evaluation import evaluate

        with SummaryWriter(str(run.path / "evaluation")) as writer:
            report = evaluate(
                agent,
                env,
                self.episodes,
                deterministic=self.deterministic,
                seed=self.seed,
                progress_bar=self.progress_bar,
                logger=writer,
            )
        env.close()
        show(report.table())
