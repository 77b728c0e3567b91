"""Evaluation while an agent learns."""

from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization, unwrap_vec_normalize

from rlxf.evaluation.environment import EnvLike
from rlxf.evaluation.episodes import SEED, evaluate
from rlxf.evaluation.every_steps import EverySteps
from rlxf.evaluation.report import Report


class EvaluationCallback(EverySteps):
    """Evaluate the agent every so many steps and log the ``eval/*`` tags of `Report.scalars`.

    Every evaluation plays the same episodes (same seed), so that their difference is the agent's. The
    statistics of a ``VecNormalize`` around ``env`` are set to those of training.

    Args:
        env: a Gymnasium id, an ``Env``, a ``VectorEnv`` or a ``VecEnv``; not the one trained in.
        episodes: episodes of an evaluation.
        every_steps: environment steps, over all environments, from one evaluation to the next.
        deterministic: the most likely action instead of a sample.
        n_envs: environments to make when ``env`` is an id.
        seed: of the environments.

    Attributes:
        reports: the `Report` of each evaluation by the number of steps before it.

    Raises:
        ValueError: if episodes or every_steps is less than 1.
    """

    def __init__(
        self,
        env: EnvLike,
        episodes: int = 100,
        every_steps: int = 10_000,
        *,
        deterministic: bool = True,
        n_envs: int = 32,
        seed: int | None = SEED,
    ):
        super().__init__(every_steps)
        if episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {episodes}")
        self.env = env
        self.episodes = episodes
        self.deterministic = deterministic
        self.n_envs = n_envs
        self.seed = seed
        self.reports: dict[int, Report] = {}

    def act(self) -> None:
        """Evaluate and log."""
        if isinstance(self.env, VecEnv) and unwrap_vec_normalize(self.env) is not None:
            sync_envs_normalization(self.training_env, self.env)
        self.reports[self.num_timesteps] = evaluate(
            self.model,
            self.env,
            self.episodes,
            deterministic=self.deterministic,
            n_envs=self.n_envs,
            seed=self.seed,
            logger=self.logger,
        )
