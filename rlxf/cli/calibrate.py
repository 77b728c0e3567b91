"""``rlxf calibrate``: how early the agent of a run may leave, for a promised risk."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.screen import show

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from rlxf.agents.calibration import Calibration
    from rlxf.training import RunFolder

EPISODES = 100


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Find how early the agent of a run may leave, and let it leave as early from now on.

    For a core of depth CALM, as of "rlxf train gtrxl --core.depth calm --core.layers 4". The promise: with
    probability 1 - delta, the most likely action is another one than with all layers in a share of at most
    alpha of an episode's steps, on average over episodes, long and short ones alike. For that a GTrXLPPO
    plays episodes of its task, a Decision Transformer reads those of a dataset. Thresholds of confidence are
    tried from the safest down. The last that passes is saved in the checkpoint; if there is a best one, that
    gets its own. "rlxf evaluate" then plays so, and logs how many layers were taken as eval/mean_depth.
    Learning takes the threshold back: it holds for these weights.

    Example: rlxf calibrate runs/tmaze-calm --alpha 0.05 --episodes 200
    """

    run: Positional[Path]
    """Folder of the run."""
    alpha: float = 0.05
    """Share of an episode's steps in which another action may be the most likely one, on average over
    episodes; between 0 and 1."""
    delta: float = 0.05
    """Probability with which the promise may be broken, between 0 and 1."""
    episodes: Count | None = None
    """Episodes that a GTrXLPPO plays; None is 100. The smaller alpha and delta, the more it takes for any
    threshold to pass: at least log(delta) / log(1 - alpha), which is 59 at 0.05."""
    dataset: tuple[str, ...] = ()
    """Minari ids of episodes for a Decision Transformer, at best such as it has not learned from; none: those
    that it has, which promises less."""
    n_envs: Count = 32
    """Environments side by side, at most one per episode."""
    seed: int = 2_000_000
    """Of the environments; far from those of training and of rlxf evaluate."""
    trust: bool = False
    """Trust the authors of the run and its data: the module that their environment names is imported, and its
    arguments and wrappers are used. Without this flag only registered environments are used."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        from rlxf.agents.calibration import confidence_of
        from rlxf.agents.learn_then_test import check_levels
        from rlxf.cli.checkpoints import checkpoints_of
        from rlxf.cli.players import OFFLINE, agent_name
        from rlxf.cli.together import join_others
        from rlxf.training import RunFolder
        from rlxf.training.joining import here

        join_others()
        here().check_alone("rlxf calibrate")
        check_counts(self, "episodes", "n_envs")
        check_from_zero(self, "seed")
        check_levels(self.alpha, self.delta)
        run = RunFolder.open(self.run)
        load = self._offline if agent_name(run) == OFFLINE else self._online
        agents = {name: load(run, path) for name, path in checkpoints_of(run).items()}
        for agent in agents.values():
            confidence_of(agent.policy.transformer)
        env = None if agent_name(run) == OFFLINE else self._env(run)
        return partial(self._calibrate, agents, env, run)

    def _offline(self, run: "RunFolder", path: Path) -> Any:
        """The Decision Transformer of a checkpoint, with the episodes to read."""
        from rlxf.agents.decision_transformer import DecisionTransformer

        if self.episodes is not None:
            raise ValueError(
                f"episodes are played by a GTrXLPPO, got {self.episodes}: a Decision Transformer reads "
                f"those of --dataset"
            )
        return DecisionTransformer.load(path, list(self.dataset) or run.config["dataset"], device=self.device)

    def _online(self, run: "RunFolder", path: Path) -> Any:
        """The GTrXLPPO of a checkpoint."""
        from rlxf.agents.gtrxl import GTrXLPPO
        from rlxf.agents.gtrxl.calibrating import check_independent

        if self.dataset:
            raise ValueError(
                f"datasets are read by a Decision Transformer, got {', '.join(self.dataset)}: a GTrXLPPO "
                f"plays --episodes of its task"
            )
        agent = GTrXLPPO.load(path, device=self.device)
        check_independent(agent)
        return agent

    def _env(self, run: "RunFolder") -> "VecEnv":
        """Return the task of a run, with raw observations."""
        from rlxf.cli.players import make_env

        return make_env(run, None, {}, min(self.n_envs, self.episodes or EPISODES), self.trust)

    def _calibrate(self, agents: Mapping[str, Any], env: "VecEnv | None", run: "RunFolder") -> None:
        from rlxf.cli.checkpoints import HEADINGS, checkpoints_of
        from rlxf.cli.players import as_in_training

        with ExitStack() as stack:
            if env is not None:
                stack.callback(env.close)
            for name, agent in agents.items():
                path = checkpoints_of(run)[name]
                found = self._found(agent, env and as_in_training(run, env, path))
                agent.save(path)
                table = found.table()
                table.title = f"{HEADINGS[name].format(agent.num_timesteps)}\n{table.title}"
                show(table)
                show(_told(found, path))

    def _found(self, agent: Any, env: "VecEnv | None") -> "Calibration":
        if env is None:
            found: Calibration = agent.calibrate(self.alpha, self.delta)
        else:
            episodes = self.episodes or EPISODES
            found = agent.calibrate(env, self.alpha, self.delta, episodes=episodes, seed=self.seed)
        return found


def _told(found: "Calibration", path: Path) -> str:
    """What it comes to, in one line."""
    if not found.kept.any():
        return f"no threshold keeps the promise, so nobody leaves early; try more episodes or risk: {path}"
    told = f"threshold {found.threshold:g}, saved: {path}"
    if len(found.depth) > 1 and found.depth.min() == found.depth.max():
        return f"each threshold takes {found.depth[0]:g} passes, so none saves more than another; {told}"
    return told
