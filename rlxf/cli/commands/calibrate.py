"""``rlxf calibrate``: choose an early-exit threshold with a risk bound for the agent of a run."""

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3.common.vec_env import VecEnv
from tyro.conf import Positional

from rlxf.agents.common.calibration import Calibration, calibratable_exit, check_levels
from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.calibration import check_independent_episodes
from rlxf.cli.normalization import normalize_as_in_training
from rlxf.cli.options import Command, Device, Trust, check_counts, check_options_not_negative, options
from rlxf.cli.output import print_out
from rlxf.cli.reports import checkpoints_of, print_titled
from rlxf.cli.runs import OFFLINE, TRANSFORMERS, agent_name, dataset_ids, make_env
from rlxf.cli.torchrun_job import init_distributed
from rlxf.training import RunFolder
from rlxf.training.distributed import process_group

DEFAULT_EPISODES = 100
"""Default number of episodes for a GTrXLPPO."""


@options
class Calibrate(Command):
    """Calibrate the early-exit threshold of the agent of a run.

    The threshold is saved in checkpoint.zip and, if they exist, best.zip and best-validation.zip.

    The core must have depth CALM, e.g. from "rlxf train gtrxl --core.depth calm --core.layers 4". The risk is
    the fraction of an episode's steps in which the most likely action differs from that of the full-depth
    model. Box actions count as equal within 0.05 of half the range (Decision Transformer), or if the means
    differ by at most 0.5 standard deviations (GTrXLPPO). With probability at least 1 - delta, the mean risk
    over episodes, with equal weight for each episode, is at most alpha. A GTrXLPPO plays calibration episodes
    of its task; a Decision Transformer reads a dataset.

    Confidence thresholds are tested from the safest to the least safe, until one fails. The last one that
    passed is saved. Each checkpoint is calibrated separately. "rlxf evaluate" then uses the threshold, and
    logs the mean number of layers as eval/mean_depth. Further training resets the threshold, because it is
    valid only for these weights.

    Example: rlxf calibrate runs/tmaze-calm --alpha 0.05 --episodes 200
    """

    run: Positional[Path]
    """Folder of the run."""
    alpha: float = 0.05
    """Maximum mean fraction of an episode's steps with a different most likely action, between 0 and 1."""
    delta: float = 0.05
    """Maximum probability that the guarantee fails, between 0 and 1."""
    episodes: int | None = None
    """Number of episodes that a GTrXLPPO plays. None means 100.
    A threshold can pass only with at least log(delta) / log(1 - alpha) episodes: 59 with the defaults."""
    dataset: tuple[str, ...] = ()
    """Minari ids of calibration episodes for a Decision Transformer, preferably not its training data.
    By default its training data are used, which weakens the guarantee."""
    n_envs: int = 32
    """Number of parallel environments, at most one per episode."""
    seed: int = 2_000_000
    """Seed of the environments. The default differs from those of training and of "rlxf evaluate"."""
    trust: Trust = False
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Load the agents, make the environments, and return the calibration to run."""
        init_distributed()
        process_group().check_single_process("rlxf calibrate")
        check_counts(self, "episodes", "n_envs")
        check_options_not_negative(self, "seed")
        check_levels(self.alpha, self.delta)
        run = RunFolder.open(self.run)
        offline = agent_name(run, TRANSFORMERS) == OFFLINE
        load = partial(self._load_offline, run) if offline else self._load_online
        agents = {name: load(path) for name, path in checkpoints_of(run).items()}
        for agent in agents.values():
            calibratable_exit(agent.policy.transformer)
            if offline:
                agent.policy.check_window("calibrate")
        n_envs = min(self.n_envs, self.episodes or DEFAULT_EPISODES)
        env = None if offline else make_env(run, None, {}, n_envs, self.trust)
        return partial(self._calibrate, agents, env, run)

    def _load_offline(self, run: RunFolder, path: Path) -> Any:
        """Load the Decision Transformer of a checkpoint with the calibration data."""
        if self.episodes is not None:
            raise ValueError(
                f"--episodes applies to GTrXLPPO only, got {self.episodes}: a Decision Transformer reads the "
                f"episodes of --dataset"
            )
        return DecisionTransformer.load(path, list(self.dataset) or dataset_ids(run), device=self.device)

    def _load_online(self, path: Path) -> Any:
        """Load the GTrXLPPO of a checkpoint."""
        if self.dataset:
            raise ValueError(
                f"--dataset applies to Decision Transformers only, got {', '.join(self.dataset)}: a GTrXLPPO "
                f"plays --episodes of its task"
            )
        agent = GTrXLPPO.load(path, device=self.device)
        check_independent_episodes(agent.policy)
        return agent

    def _calibrate(self, agents: Mapping[str, Any], env: VecEnv | None, run: RunFolder) -> None:
        with nullcontext() if env is None else closing(env):
            for name, agent in agents.items():
                path = checkpoints_of(run)[name]
                if env is None:
                    calibration = agent.calibrate(self.alpha, self.delta)
                else:
                    normalized = normalize_as_in_training(run, env, path)
                    episodes = self.episodes or DEFAULT_EPISODES
                    calibration = agent.calibrate(
                        normalized, self.alpha, self.delta, episodes=episodes, seed=self.seed
                    )
                agent.save(path)
                print_titled(calibration.table(), run, name, agent)
                print_out(_describe(calibration, path))


def _describe(calibration: Calibration, path: Path) -> str:
    """Return the result in one line."""
    if not calibration.within_bound.any():
        return f"{path}: no threshold passes, so early exit stays off; use more episodes or a larger alpha"
    result = f"threshold {calibration.threshold:g} is saved in {path}"
    if len(calibration.depth) > 1 and calibration.depth.min() == calibration.depth.max():
        passes = f"{calibration.depth[0]:g} passes"
        return f"all thresholds exit after {passes}, so early exit saves no computation; {result}"
    return result
